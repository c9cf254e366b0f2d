"""What is compiled again after the first step is counted, and warned of once."""

import torch

from shardclip.training.compilation import Compilations, warning


def test_graphs_after_the_first_step_are_counted() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
    counted = Compilations()
    try:
        compiled(torch.zeros(2))
        found = [counted.again()]
        for rows in (2, 3, 3, 4):
            compiled(torch.zeros(rows))
            found.append(counted.again())
        assert found == [0, 0, 1, 1, 2]
    finally:
        counted.close()
    compiled(torch.zeros(5))
    assert counted.again() == 2


def test_only_new_graphs_are_warned_of_and_the_rank_is_named() -> None:
    assert warning(2, [1, 2]) is None
    text = warning(2, [1, 5])
    assert text is not None
    assert "5 graphs" in text
    assert "rank 1, 3 of them since the last line" in text
