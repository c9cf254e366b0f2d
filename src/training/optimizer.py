"""The optimizer: which parameters decay, their groups, and the norm of their gradients.

The plan is made by name and shape on the plain model, before an engine wraps it, and looked up by name when
the optimizer is built on the wrapped one.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardclip.errors import UserError
from shardclip.models.dual_encoder import DualEncoder
from shardclip.models.layers import layer_groups, select


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer, weight decay, clipping and the learning rate's schedule."""

    opt: str = "adamw"
    """adamw, nadamw, sgd, or timm/NAME for one of timm's."""
    lr: float = 5e-4
    """Peak learning rate."""
    beta1: float = 0.9
    """Decay of Adam's first moment."""
    beta2: float = 0.98
    """Decay of Adam's second moment, whatever the model: CLIP's value for ViTs (its ResNets had 0.999)."""
    eps: float = 1e-6
    """Adam's epsilon, whatever the model: CLIP's value for ViTs (its ResNets had 1e-8)."""
    wd: float = 0.2
    """Weight decay: decoupled, except that sgd adds it to the gradient."""
    wd_exclude: tuple[str, ...] = ()
    """More parameters without weight decay: globs on whole names, such as 'text.token_embedding.*'."""
    momentum: float = 0.9
    """Momentum of sgd and of timm's optimizers that have one."""
    opt_kwargs: tuple[str, ...] = ()
    """Further arguments of the optimizer, as key=value."""
    grad_clip_norm: float | None = None
    """Largest global gradient norm; larger ones are scaled down to it."""
    text_layer_decay: float | None = None
    """Factor in (0, 1] by which the learning rate falls per layer group below the text tower's last."""
    image_layer_decay: float | None = None
    """Factor in (0, 1] by which the learning rate falls per layer group below the image tower's last."""
    lr_scheduler: Literal["cosine", "const", "const-cooldown"] = "cosine"
    """Learning rate after the warm-up."""
    warmup: int = 10_000
    """Steps over which the learning rate rises, turned into samples at the run's first start."""
    epochs_cooldown: float | None = None
    """Epochs of cooldown at the end, for const-cooldown."""
    lr_cooldown_end: float = 0.0
    """Learning rate at the end of the cooldown."""
    lr_cooldown_power: float = 1.0
    """Exponent of the cooldown; 1 is linear."""
    skip_scheduler: bool = False
    """Keep the learning rate constant from the first step, without warm-up."""

    def __post_init__(self) -> None:
        for flag, factor in (
            ("--text-layer-decay", self.text_layer_decay),
            ("--image-layer-decay", self.image_layer_decay),
        ):
            if factor is not None and not 0 < factor <= 1:
                raise UserError(f"{flag} {factor}: must be above 0 and at most 1")
        if self.grad_clip_norm is not None and self.grad_clip_norm <= 0:
            raise UserError(f"--grad-clip-norm {self.grad_clip_norm}: must be above 0; leave it out for none")
        if self.warmup < 0:
            raise UserError(f"--warmup {self.warmup}: must be 0 or more")


class Planned(NamedTuple):
    """What is decided for one parameter."""

    decay: bool
    lr_scale: float
    """Factor on the learning rate, from layer-wise decay."""


@dataclass(frozen=True)
class ParameterPlan:
    """Every trainable parameter of a model, by clean name, with what is decided for it."""

    parameters: dict[str, Planned]
    counts: dict[str, int]
    """Numbers held by each parameter, of the whole model."""

    def groups(self) -> dict[str, list[str]]:
        """Names of the optimizer's groups -> names of their parameters, in the model's order."""
        groups: dict[str, list[str]] = defaultdict(list)
        for name in self.parameters:
            groups[self.group_of(name)].append(name)
        return dict(sorted(groups.items()))

    def group_of(self, name: str) -> str:
        """The optimizer's group of a parameter; scale and bias have their own.

        They are plain tensors where others are DTensors, and the two may not meet in one fused update.
        """
        if name in _SCALARS:
            return "scale"
        decay, lr_scale = self.parameters[name]
        return ("decay" if decay else "no-decay") + ("" if lr_scale == 1 else f" x{lr_scale:.6g}")

    def table(self) -> list[tuple[str, int, int]]:
        """(group, tensors, numbers) for each group, to print."""
        return [
            (group, len(names), sum(self.counts[name] for name in names))
            for group, names in self.groups().items()
        ]

    def listing(self) -> str:
        """Every group with all of its parameters, for the log file."""
        return "\n".join("\n  ".join([f"{group}:", *names]) for group, names in self.groups().items())


_SCALARS = ("logit_scale", "logit_bias")

# Last component of a name, less ".weight". Positions (native, timm, Hugging Face), token types, relative
# positions (T5, Swin, DeBERTa), class and register tokens, and scales of attention heads.
_NO_DECAY = re.compile(
    r"pos(?:ition(?:al)?)?_?emb(?:ed(?:ding)?s?)?|absolute_pos_embed|embed_positions|token_type_embeddings"
    r"|relative_attention_bias|relative_position_bias_table|rel_pos\w*|rel_embeddings"
    r"|(?:cls|class|dist|reg)_(?:tokens?|emb(?:edding)?)|logit_scale|logit_bias|head_scale"
)


def plan_parameters(model: DualEncoder, config: OptimizerConfig) -> ParameterPlan:
    """Decide weight decay and learning-rate scale of every trainable parameter of the plain, locked model.

    No decay: fewer than two dimensions, what a module declares by `no_weight_decay()`, positions, class
    tokens, relative position biases, scale and bias, and `--wd-exclude`. Layer-wise decay gives group i of a
    tower's n the factor decay ** (n - 1 - i) (BEiT, https://arxiv.org/abs/2106.08254, appendix).

    Raises:
        UserError: a glob of `--wd-exclude` matches no parameter.
    """
    named = dict(model.named_parameters())
    without = _declared(model) | select(named, config.wd_exclude, "--wd-exclude")
    without |= {n for n, p in named.items() if p.ndim < 2 or _NO_DECAY.fullmatch(_leaf(n))}
    scales = {
        **_layer_scales(model.visual, "visual", config.image_layer_decay),
        **_layer_scales(model.text, "text", config.text_layer_decay),
    }
    trainable = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    return ParameterPlan(
        parameters={name: Planned(name not in without, scales.get(name, 1.0)) for name in trainable},
        counts={name: parameter.numel() for name, parameter in trainable.items()},
    )


def _leaf(name: str) -> str:
    return name.removesuffix(".weight").rpartition(".")[2]


def _declared(model: nn.Module) -> set[str]:
    """Full names of what the model's modules declare by `no_weight_decay()`, names or globs as in timm."""
    declared: set[str] = set()
    for path, module in model.named_modules():
        if callable(declares := getattr(module, "no_weight_decay", None)):
            globs = declares()
            for name, _ in module.named_parameters():
                if any(fnmatchcase(name, glob) for glob in globs):
                    declared.add(f"{path}.{name}")
    return declared


def _layer_scales(tower: nn.Module, prefix: str, decay: float | None) -> dict[str, float]:
    if decay is None:
        return {}
    groups = layer_groups(tower)
    return {
        f"{prefix}.{name}": decay ** (len(groups) - 1 - index)
        for index, group in enumerate(groups)
        for name in group
    }


def clean_name(name: str) -> str:
    """The name that a parameter has in the plain model, from the one it has in a wrapped or compiled one."""
    name = re.sub(r"(?:_orig_mod|_checkpoint_wrapped_module)\.", "", name)
    return name.removeprefix("module.")


def build_optimizer(model: nn.Module, plan: ParameterPlan, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer over the trainable parameters of a plain or wrapped model, in the plan's groups.

    Each group carries its `name` and `lr_scale`. Groups and their order depend on the plan alone, so they are
    the same under every engine.

    Raises:
        UserError: an unknown optimizer, or an argument or a value that it does not take.
    """
    parameters = {clean_name(n): p for n, p in model.named_parameters() if p.requires_grad}
    if parameters.keys() != plan.parameters.keys():
        difference = sorted(parameters.keys() ^ plan.parameters.keys())
        raise RuntimeError(f"the plan and the model differ in what trains: {difference[:5]}")
    groups = []
    for group, names in plan.groups().items():
        decay, lr_scale = plan.parameters[names[0]]
        groups.append(
            {
                "params": [parameters[name] for name in names],
                "name": group,
                "lr": config.lr * lr_scale,
                "lr_scale": lr_scale,
                "weight_decay": config.wd if decay else 0.0,
            }
        )
    try:
        return _construct(groups, config)
    except (TypeError, ValueError) as error:
        raise UserError(f"--opt {config.opt} with --opt-kwargs {config.opt_kwargs}: {error}") from error


def _construct(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    further = dict(map(_key_value, config.opt_kwargs))
    adam = {"lr": config.lr, "betas": (config.beta1, config.beta2), "eps": config.eps}
    if config.opt == "adamw":
        return torch.optim.AdamW(groups, **{**adam, "fused": _can_fuse(groups), **further})
    if config.opt == "nadamw":
        return torch.optim.NAdam(groups, **{**adam, "decoupled_weight_decay": True, **further})
    if config.opt == "sgd":
        return torch.optim.SGD(groups, **{"lr": config.lr, "momentum": config.momentum, **further})
    if config.opt.startswith("timm/"):
        return _timm_optimizer(groups, config, further)
    raise UserError(f"--opt {config.opt}: must be adamw, nadamw, sgd or timm/NAME")


def _timm_optimizer(
    groups: list[dict[str, Any]], config: OptimizerConfig, further: dict[str, Any]
) -> torch.optim.Optimizer:
    from timm.optim import create_optimizer_v2, get_optimizer_info, list_optimizers

    name = config.opt.removeprefix("timm/")
    if name not in list_optimizers():
        raise UserError(f"--opt {config.opt}: timm has " + ", ".join(map(str, list_optimizers())))
    # timm leaves out what an optimizer does not have, but for betas, of which some have one or three.
    arguments: dict[str, Any] = {"lr": config.lr, "momentum": config.momentum, "eps": config.eps}
    if get_optimizer_info(name).num_betas == 2:
        arguments["betas"] = (config.beta1, config.beta2)
    arguments |= further
    return create_optimizer_v2(groups, opt=name, weight_decay=0.0, filter_bias_and_bn=False, **arguments)


def _key_value(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise UserError(f"--opt-kwargs {text!r}: must be key=value")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value


def _can_fuse(groups: list[dict[str, Any]]) -> bool:
    return all(p.device.type in ("cuda", "cpu") for group in groups for p in group["params"])


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Global L2 norm of the gradients, [] fp32: that of one process, on every rank alike.

    A sharded gradient is summed over the ranks that share it out and counted once whatever its replicas, a
    plain one is the same everywhere and counted as it is, one that is None is left out. Every rank must pass
    the same parameters, with gradients on the same of them.
    """
    plain: list[Tensor] = []
    sharded: dict[tuple[Any, tuple[int, ...]], list[Tensor]] = defaultdict(list)
    for gradient in _gradients(parameters):
        if isinstance(gradient, DTensor):
            dimensions = tuple(i for i, p in enumerate(gradient.placements) if not p.is_replicate())
            sharded[gradient.device_mesh, dimensions].append(gradient.to_local())
        else:
            plain.append(gradient)
    squares = [_square_sum(plain)] if plain or not sharded else []
    for (mesh, dimensions), shards in sharded.items():
        # The mesh's device, not the shards': shards that are kept on the CPU have no backend there.
        square = _square_sum(shards).to(mesh.device_type)
        for dimension in dimensions:
            dist.all_reduce(square, group=mesh.get_group(dimension))
        squares.append(square)
    return torch.stack([square.to(squares[-1].device) for square in squares]).sum().sqrt()


def _square_sum(tensors: list[Tensor]) -> Tensor:
    return torch.nn.utils.get_total_norm([t for t in tensors if t.numel() > 0]).float().square()


def _gradients(parameters: Iterable[nn.Parameter]) -> Iterator[Tensor]:
    return (p.grad for p in parameters if p.grad is not None)


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], factor: Tensor) -> None:
    """Multiply the gradients in place by `factor` ([]), which is the same on every rank."""
    by_device: dict[torch.device, list[Tensor]] = defaultdict(list)
    for gradient in _gradients(parameters):
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        by_device[local.device].append(local)
    for device, gradients in by_device.items():
        torch._foreach_mul_(gradients, factor.to(device))
