"""The towers of train.py's model by themselves: forward, backward and fused AdamW, without a loss.

    python scripts/bench/bare_towers.py FOLDER [--quick] --steps N

Reads the shards and the model that train.py has left in FOLDER, makes ready the batches that a run takes, so
that the tokens are the same, and prints a line after each step.
"""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path

import torch
from train import SIDE, cases, data_of

from shardclip.models import factory
from shardclip.models.factory import ModelSpec
from shardclip.training.data.config import DataConfig
from shardclip.training.data.image_input import ImageInput, normalise
from shardclip.training.data.loader import train_loader


def main() -> None:
    """Make ready and step."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("folder", type=Path)
    options.add_argument("--quick", action="store_true")
    options.add_argument("--steps", type=int, required=True)
    chosen = options.parse_args()
    _, case = cases(chosen.quick)
    image_input = ImageInput(size=(SIDE, SIDE))
    spec = ModelSpec(case.name, case.model_cfg, {"size": SIDE})
    model = factory.build(spec, seed=0)
    data = DataConfig(train_data=data_of(chosen.folder), workers=0)
    tokenize = factory.tokenizer(spec)
    batches = train_loader(data, image_input, tokenize, batch_size=case.batch, rank=0, world_size=1, seed=0)
    ready = [
        (normalise(batch.images, image_input), model.text_input(batch.texts, torch.device("cpu")))
        for batch in islice(batches, chosen.steps)
    ]
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for images, texts in ready:
        out = model(images, texts)
        features = [out.image_features, out.text_features]
        torch.autograd.backward(features, [torch.ones_like(side) for side in features])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        print("step", flush=True)


if __name__ == "__main__":
    main()
