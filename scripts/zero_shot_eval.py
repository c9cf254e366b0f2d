"""Zero-shot classification from Python, on one process or many.

python scripts/zero_shot_eval.py runs/my-run path/to/dataset
torchrun --nproc-per-node 2 scripts/zero_shot_eval.py ViT-B-32 path/to/dataset --pretrained weights.pt

The data set is a folder of one folder a class, or CLIP_benchmark's webdataset layout. `shardclip eval` does
the same and more; this file shows the pieces.
"""

import argparse

from shardclip.models import factory
from shardclip.models.factory import ModelConfig
from shardclip.training.data.config import DataConfig
from shardclip.training.data.finite import FolderSource, labelled_images
from shardclip.training.data.image_input import ImageInput, normalise
from shardclip.training.distributed import DistributedConfig, start
from shardclip.training.evaluation import names
from shardclip.training.evaluation.loading import load, locate
from shardclip.training.evaluation.zero_shot import classifier, zero_shot


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", help="a run, a checkpoint, an exported file, or a name of open_clip's list")
    parser.add_argument("data", help="the labelled pictures")
    parser.add_argument("--pretrained", help="weights for a name")
    parser.add_argument("--batch-size", type=int, default=64)
    flags = parser.parse_args()

    with start(DistributedConfig()) as processes:
        # 1. A model, its tokenizer, and what it wants to see.
        saved = locate(flags.model, ModelConfig(pretrained=flags.pretrained))
        model = load(saved).to(processes.device)
        tokenize = factory.tokenizer(saved.spec)
        image_input = ImageInput.from_preprocess_cfg(saved.spec.preprocess_cfg)

        # 2. This rank's share of the pictures, and the words for their classes.
        images = labelled_images(
            DataConfig(val_data=flags.data),
            image_input,
            batch_size=flags.batch_size,
            rank=processes.rank,
            world_size=processes.world_size,
        )
        source = images.reader.source
        folders = source.classes if isinstance(source, FolderSource) else []
        words = names.find(flags.data, None, None, folders)

        # 3. One vector per class, then each picture's nearest. All ranks get the same figures.
        weights = classifier(model, tokenize, words.classnames, words.templates, processes=processes)
        figures = zero_shot(
            model, weights, images, normalise=lambda x: normalise(x, image_input), processes=processes
        )
        if processes.is_primary:
            for name, value in figures.items():
                print(f"{name:24} {value:.4f}")


if __name__ == "__main__":
    main()
