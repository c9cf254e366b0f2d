"""BatchNorm over ranks against torch's own on one process with every row, in float64."""

import pytest
import torch
from torch import Tensor, nn

from shardclip.models.batch_norm import convert_batch_norm

WIDTH, ROWS = 3, {0: 5, 1: 2}
SHAPES = {"1d": (nn.BatchNorm1d, ()), "2d": (nn.BatchNorm2d, (4, 4))}


def data(kind: str) -> dict[int, Tensor]:
    """Rows of each rank, far from zero mean so that a careless variance would cancel."""
    torch.manual_seed(1)
    return {rank: 100.0 + torch.randn(n, WIDTH, *SHAPES[kind][1]).double() for rank, n in ROWS.items()}


def norm(kind: str) -> nn.Module:
    made = SHAPES[kind][0](WIDTH).double()
    with torch.no_grad():
        made.weight.copy_(torch.tensor([0.5, 1.0, -2.0]))
        made.bias.copy_(torch.tensor([0.1, 0.0, -0.1]))
    return made


def results(layer: nn.Module, rows: Tensor) -> dict[str, Tensor]:
    """Two passes: output and gradients of the second, statistics after both. The loss weighs all."""
    layer(rows)
    rows = rows.clone().requires_grad_()
    out = layer(rows)
    (out.sin() * rows.detach()).sum().backward()
    gradients = {"x": rows.grad, "weight": layer.weight.grad, "bias": layer.bias.grad}
    return {"out": out.detach(), **gradients, **dict(layer.named_buffers())}


def on_each_rank(kind: str, blank: int | None) -> dict[str, Tensor]:
    rank = torch.distributed.get_rank()
    model = nn.Sequential(norm(kind))
    convert_batch_norm(model, synchronised=True)
    model[0].blank = rank == blank
    return results(model[0], data(kind)[rank])


@pytest.mark.parametrize("kind", SHAPES)
def test_statistics_and_gradients_are_those_of_all_rows(ranks, kind: str) -> None:
    expected = results(norm(kind), torch.cat(list(data(kind).values())))
    found = ranks(2).run(on_each_rank, kind, None)
    for name in ("out", "x"):
        joined = torch.cat([each[name] for each in found])
        torch.testing.assert_close(joined, expected[name], rtol=1e-10, atol=1e-10)
    for name in ("weight", "bias"):
        summed = found[0][name] + found[1][name]
        torch.testing.assert_close(summed, expected[name], rtol=1e-10, atol=1e-10)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        for each in found:
            torch.testing.assert_close(each[name], expected[name], rtol=1e-10, atol=1e-10)


def test_blank_rows_leave_the_statistics_to_the_others(ranks) -> None:
    expected = results(norm("2d"), data("2d")[0])
    found = ranks(2).run(on_each_rank, "2d", 1)
    torch.testing.assert_close(found[0]["out"], expected["out"], rtol=1e-10, atol=1e-10)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        for each in found:
            torch.testing.assert_close(each[name], expected[name], rtol=1e-10, atol=1e-10)
