"""What a run of the demo has learnt, on drawings that it has not seen, beside what needs no learning.

    python scripts/demo/report.py runs/emoji-fsdp --data data/emoji

prints zero-shot accuracy and retrieval on the held-out drawings, and leaves `curves.png` (loss, accuracy) and
`retrieval.png` (queries and what was found) in the run's folder. It is also a short example of the Python
interface: find a model, load it, evaluate it.
"""

import argparse
from pathlib import Path

from drawings import RECALLS, Drawing, chance, majority, pixel_baseline, read_drawings
from PIL.Image import Image

from shardclip.models import factory
from shardclip.models.dual_encoder import DualEncoder
from shardclip.models.factory import ModelConfig, ModelSpec
from shardclip.training import distributed, plotting
from shardclip.training.data.config import DataConfig
from shardclip.training.data.image_input import ImageInput
from shardclip.training.evaluation.config import EvaluationConfig
from shardclip.training.evaluation.loading import load, locate
from shardclip.training.evaluation.run import evaluate

EXAMPLES = 14
"""Queries of each kind that are drawn."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Report what a run of the demo has learnt.")
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--data", type=Path, default=Path("data/emoji"), help="what prepare.py made")
    parser.add_argument("--split", choices=("validation", "test"), default="test", help="drawings to ask for")
    arguments = parser.parse_args()
    saved = locate(str(arguments.run), ModelConfig())
    model = load(saved).eval()
    drawings = read_drawings(arguments.data / arguments.split)
    concepts = {drawing.concept for drawing in drawings}
    seen = [
        drawing
        for drawing in read_drawings(arguments.data / "train")
        if drawing.artist == "twemoji" and drawing.concept in concepts
    ]
    figures, examples = measure(model, saved.spec, arguments.data / arguments.split)
    print(table(figures, drawings, pixel_baseline(drawings, seen)))
    examples.save(arguments.run / "retrieval.png", optimize=True)
    plotting.plot([arguments.run], arguments.run / "curves.png")
    print(f"pictures: {arguments.run / 'curves.png'}, {arguments.run / 'retrieval.png'}")


def measure(model: DualEncoder, spec: ModelSpec, split: Path) -> tuple[dict[str, float], Image]:
    """`acc1` on the nine groups and `image_to_text_R@k`, `text_to_image_R@k`, shares in 0 to 1; and queries
    with what was found.
    """
    results = evaluate(
        model,
        EvaluationConfig(zeroshot_data=str(split), val_examples=EXAMPLES),
        DataConfig(val_data=str(split), workers=0),
        ImageInput.from_preprocess_cfg(spec.preprocess_cfg),
        factory.tokenizer(spec),
        processes=distributed.current(),
    )
    (picture,) = (result.picture for result in results if result.picture is not None)
    return {name: value for result in results for name, value in result.metrics.items()}, picture


def table(figures: dict[str, float], drawings: list[Drawing], pixels: dict[int, float]) -> str:
    """The figures beside what needs no learning."""
    rows = {
        "image to text": {k: figures[f"image_to_text_R@{k}"] for k in RECALLS},
        "text to image": {k: figures[f"text_to_image_R@{k}"] for k in RECALLS},
        "  chance": chance(drawings),
        "  nearest 8x8 thumbnail, by another artist": pixels,
    }
    groups = {drawing.group for drawing in drawings}
    lines = [
        f"{len(drawings)} held-out drawings of concepts that were seen drawn by other artists only",
        f"{'retrieval':44}" + "".join(f"{f'R@{k}':>8}" for k in RECALLS),
        *(f"{name:44}" + "".join(f"{recall[k]:8.1%}" for k in RECALLS) for name, recall in rows.items()),
        f"{f'zero-shot, {len(groups)} groups':44}{figures['acc1']:8.1%}",
        f"{'  chance':44}{1 / len(groups):8.1%}",
        f"{'  always the largest group':44}{majority(drawings):8.1%}",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
