"""Zero-shot classification on one process: ties, labels, classes that occur unevenly, and when it is due."""

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from shardclip.errors import UserError
from shardclip.training.distributed import current
from shardclip.training.evaluation.config import TASKS, EvaluationConfig
from shardclip.training.evaluation.zero_shot import classifier, zero_shot


class Features(NamedTuple):
    image_features: Tensor | None = None
    text_features: Tensor | None = None


class OneHot(nn.Module):
    """A picture's features are the unit vector of its first pixel's value; a text's, that of its token."""

    def text_input(self, tokens: Tensor, device: torch.device) -> Tensor:
        return tokens

    def forward(self, image: Tensor | None = None, text: Tensor | None = None) -> Features:
        eye = torch.eye(8)
        if image is not None:
            return Features(image_features=eye[image[:, 0, 0, 0].long()])
        assert text is not None
        return Features(text_features=eye[text[:, 0]])


def tokenize(texts: list[str]) -> Tensor:
    return torch.tensor([[ord(text[-1]) - ord("a")] for text in texts])


def pictures(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.uint8)[:, None, None, None].expand(-1, 3, 2, 2)


def run(batches: Iterator[tuple[Tensor, Tensor]], names: str = "abcdef") -> dict[str, float]:
    weights = classifier(OneHot(), tokenize, list(names), ["{}"], processes=current(), batch_size=4)
    return zero_shot(OneHot(), weights, batches, normalise=lambda images: images, processes=current())


def test_shares_over_samples_and_over_classes():
    # Class a: 3 of 3; class b: 0 of 1. The other classes do not occur and have no recall.
    figures = run(iter([(pictures([0, 0]), torch.tensor([0, 0])), (pictures([0, 7]), torch.tensor([0, 1]))]))
    assert figures == {"acc1": 0.75, "acc5": 1.0, "mean_per_class_recall": 0.5, "samples": 4}


def test_equal_scores_rank_by_class_number():
    # Features that no class has: six scores of 0, so label 4 is fifth and label 5 is sixth.
    figures = run(iter([(pictures([7, 7, 7]), torch.tensor([0, 4, 5]))]))
    assert figures["acc1"] == pytest.approx(1 / 3)
    assert figures["acc5"] == pytest.approx(2 / 3)


def test_a_name_that_occurs_twice_ranks_by_its_number():
    figures = run(iter([(pictures([0, 0]), torch.tensor([0, 5]))]), names="abcdea")
    assert figures["acc1"] == 0.5


@pytest.mark.parametrize("label", [-1, 6])
def test_a_label_without_a_name_is_a_users_error(label: int):
    with pytest.raises(UserError, match=f"label {label} found, but there are 6 class names"):
        run(iter([(pictures([0]), torch.tensor([label]))]))


def test_no_picture_is_a_users_error():
    with pytest.raises(UserError, match="no picture"):
        run(iter([(pictures([0])[:0], torch.tensor([], dtype=torch.int64))]))


def test_due_by_epochs_samples_and_at_the_end():
    config = EvaluationConfig(zeroshot_frequency=2, val_frequency=1)
    assert config.due(90, 100, samples_per_epoch=100) == {"zeroshot_retrieval"}
    assert config.due(190, 210, samples_per_epoch=100) == TASKS
    assert config.due(110, 120, samples_per_epoch=100) == set()
    assert config.due(110, 120, samples_per_epoch=100, last=True) == TASKS
    never = EvaluationConfig(zeroshot_frequency=0, val_frequency=0, eval_every=50)
    assert never.due(90, 100, samples_per_epoch=100) == TASKS
    assert never.due(100, 120, samples_per_epoch=100, last=True) == set()
