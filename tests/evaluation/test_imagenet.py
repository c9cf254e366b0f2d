"""ImageNet by folders and by tars, and ImageNet-v2: labels are those that open_clip's names are for."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from data.shards import write_tar
from evaluation import small
from PIL import Image

from shardclip.training.data.config import DataConfig
from shardclip.training.data.image_input import normalise
from shardclip.training.distributed import current
from shardclip.training.evaluation import names, run
from shardclip.training.evaluation.config import EvaluationConfig
from shardclip.training.evaluation.zero_shot import classifier

PICTURES, RIGHT = 13, 8


def png(number: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(small.picture(number)).save(file, "png")
    return file.getvalue()


def write_folders(folder: Path, form: str, labels: list[int]) -> None:
    """One folder for each of the 1,000 classes, most of them empty."""
    for number in range(1000):
        (folder / form.format(number)).mkdir(parents=True)
    for number, label in enumerate(labels):
        (folder / form.format(label) / f"{number}.png").write_bytes(png(number))


@pytest.mark.long
def test_imagenets_names_meet_its_labels_in_every_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = names.imagenet()
    model = small.model().eval()
    weights = classifier(model, small.tokenize, words.classnames, words.templates, processes=current())
    pixels = torch.stack([torch.from_numpy(small.picture(n)).permute(2, 0, 1) for n in range(PICTURES)])
    with torch.no_grad():
        features = model(image=normalise(pixels, small.IMAGE_INPUT)).image_features
    nearest = (features @ weights).argmax(dim=1).tolist()
    labels = [label if n < RIGHT else (label + 1) % 1000 for n, label in enumerate(nearest)]

    write_folders(tmp_path / "val", "n{:08d}", labels)
    write_folders(tmp_path / "v2" / "imagenetv2-matched-frequency-format-val", "{}", labels)
    members: list[tuple[str, bytes]] = []
    for number, label in enumerate(labels):
        members += [(f"{number}.png", png(number)), (f"{number}.cls", str(label).encode())]
    write_tar(tmp_path / "tars" / "0.tar", members)

    def once(*arguments: Any, **more: Any) -> torch.Tensor:
        assert arguments[2:] == (words.classnames, words.templates)
        return weights

    monkeypatch.setattr(run, "classifier", once)
    found = []
    for flags in (
        {"imagenet_val": "val", "imagenet_v2": "v2"},
        {"imagenet_val": "tars"},
    ):
        paths = {name: str(tmp_path / place) for name, place in flags.items()}
        found += run.evaluate(
            model,
            EvaluationConfig(**paths),
            DataConfig(workers=0),
            small.IMAGE_INPUT,
            small.tokenize,
            processes=current(),
        )
    assert [result.dataset for result in found] == ["imagenet1k", "imagenetv2", "imagenet1k"]
    for result in found:
        assert (result.samples, result.classes, result.templates) == (PICTURES, 1000, 80)
        assert result.metrics["acc1"] == RIGHT / PICTURES
        assert result.names_digest == words.digest
