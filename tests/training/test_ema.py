"""The moving average against its closed form, under every engine, through evaluation and checkpoints."""

import pytest
import torch
import torch.nn.functional as F
import towers
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardclip.errors import UserError
from shardclip.models.locking import LockConfig, lock
from shardclip.training.ema import Ema, EmaConfig
from shardclip.training.optimizer import clean_name

DECAY = 0.5


def _wrapped(engine: str) -> nn.Module:
    model = towers.model("native")
    lock(model, LockConfig(lock_patterns=("visual.conv1.weight",)))
    if engine == "ddp":
        return DistributedDataParallel(model)
    if engine == "fsdp":
        for block in (*model.visual.transformer.resblocks, *model.text.transformer.resblocks):
            fully_shard(block, reshard_after_forward=False)
        for tower in (model.visual, model.text):
            fully_shard(tower, reshard_after_forward=False)
        fully_shard(model, ignored_params={model.logit_scale})
    return model


def _whole(tensor: Tensor) -> Tensor:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone()


def _weights(model: nn.Module) -> dict[str, Tensor]:
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    return {clean_name(name): _whole(p) for name, p in model.named_parameters()}


def _features(model: nn.Module) -> Tensor:
    with torch.no_grad():
        out = model(*towers.inputs("native", seed=9))
    return torch.cat([out.image_features, out.text_features])


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    optimizer.zero_grad()
    out = model(*towers.inputs("native", seed=seed))
    (out.logit_scale * F.mse_loss(out.image_features, out.text_features)).backward()
    optimizer.step()


def _run(engine: str) -> None:
    """Three steps and updates, then an evaluation on the average; asserts on each rank."""
    model = _wrapped(engine)
    ema = Ema(model, DECAY, warmup=False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    expected = {name: value.double() for name, value in _weights(model).items()}
    for step in range(3):
        _step(model, optimizer, step)
        _features(model)
        ema.update()
        for name, value in _weights(model).items():
            expected[name] += (1 - DECAY) * (value.double() - expected[name])

    averages = {name: _whole(value) for name, value in ema.state_dict().items() if name != "updates"}
    assert set(expected) - set(averages) == {"visual.conv1.weight"}
    for name, value in averages.items():
        torch.testing.assert_close(value.double(), expected[name], rtol=1e-6, atol=1e-7)

    plain = towers.model("native")
    plain.load_state_dict({**_weights(model), **averages})
    weights, features = _weights(model), _features(model)
    with ema.swap():
        torch.testing.assert_close(_features(model), _features(plain), rtol=1e-5, atol=1e-6)
    assert torch.equal(_features(model), features)
    after = _weights(model)
    assert all(torch.equal(after[name], value) for name, value in weights.items())
    assert not torch.allclose(features, _features(plain), atol=1e-4)
    _step(model, optimizer, 3)
    assert not torch.equal(_weights(model)["visual.proj"], weights["visual.proj"])


def test_average_on_one_process():
    _run("none")


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_average_on_two_processes(ranks, engine):
    assert ranks(2).run(_run, engine) == [None, None]


def _shards() -> list[bool]:
    averages = Ema(_wrapped("fsdp"), DECAY).state_dict()
    return [isinstance(value, DTensor) for name, value in averages.items() if name.startswith("text.")]


def test_average_is_sharded_as_the_weights_are(ranks):
    for kinds in ranks(2).run(_shards):
        assert len(kinds) > 20
        assert all(kinds)


def test_warmup_forgets_the_first_weights():
    model = nn.Linear(1, 1, bias=False)
    ema = Ema(model, 0.999)
    start = model.weight.item()
    kept = 1.0
    with torch.no_grad():
        model.weight.fill_(start + 1)
    for n in range(20):
        ema.update()
        kept *= (1 + n) / (10 + n)
        assert ema.state_dict()["weight"].item() == pytest.approx(start + 1 - kept, abs=1e-6)


def test_state_comes_back():
    model = towers.model("native")
    ema, other = Ema(model, DECAY), Ema(model, DECAY)
    with torch.no_grad():
        model.visual.proj.add_(1)
    ema.update()
    other.load_state_dict({k: v.clone() if isinstance(v, Tensor) else v for k, v in ema.state_dict().items()})
    assert other.updates == 1
    assert all(torch.equal(v, other.state_dict()[k]) for k, v in ema.state_dict().items() if k != "updates")
    ema.load_state_dict({**ema.state_dict(), "updates": 7})
    assert ema.updates == 7


def test_average_survives_an_evaluation_that_fails():
    model = towers.model("native")
    ema = Ema(model, DECAY, warmup=False)
    with torch.no_grad():
        model.visual.proj.add_(1)
    before = model.visual.proj.clone()
    with pytest.raises(RuntimeError, match="no data"), ema.swap():
        raise RuntimeError("no data")
    assert torch.equal(model.visual.proj, before)


@pytest.mark.parametrize("decay", [0.0, 1.0, -0.5])
def test_impossible_decay_is_refused(decay):
    with pytest.raises(UserError, match="--ema-decay"):
        EmaConfig(ema_decay=decay)
