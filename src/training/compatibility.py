"""Flag names of open_clip (3.3.0 and main), the seed-era FSDP proposal and torchrun that are not flags here.

Each is another name for a flag, or asks for what always happens, or is answered with one line. Names that are
flags here, with the same meaning, are not listed: see docs/from-open-clip.md for all of them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from shardclip.training.parsing import Setting


@dataclass(frozen=True)
class Answer:
    """What becomes of a foreign name."""

    kind: Literal["alias", "always", "refused"]
    """Another name for one of our flags; accepted because it is so anyway; not accepted."""
    text: str
    """Our flag's name (alias), or the line that is shown."""


def _alias(name: str) -> Answer:
    return Answer("alias", name)


def _always(text: str) -> Answer:
    return Answer("always", text)


def _refused(text: str) -> Answer:
    return Answer("refused", text)


_CAPTIONS = "a causal text tower gets no padding anyway; for others, lower --force-context-length"
_AUDIO = "audio is not this project's job: open_clip's main branch trains CLAP"
_NAFLEX = "NaFlex is not this project's job: open_clip's main branch has it; here --force-image-size is fixed"

ANSWERS: dict[str, Answer] = {
    # Other names for flags of ours.
    "logs": _alias("output-dir"),
    "visual-layer-decay": _alias("image-layer-decay"),
    "fsdp-offload-cpu": _alias("fsdp-cpu-offload"),
    # What these ask for is always so.
    "local-loss": _always("always on: each rank computes its own rows of the one global loss"),
    "gather-with-grad": _always("always on: gradients are those of one process on the whole batch"),
    "loss-dist-impl": _always("features are gathered once a step, for every loss: no choice is needed"),
    "force-custom-text": _always("always on: two towers, two modules, each sharded by itself"),
    "text-pooler-own-group": _always("always on: the pooler is a layer group of its own"),
    "ddp-static-graph": _always("the graph of a step is the same on every rank; the flag changes nothing"),
    "log-local": _always("always on: every rank has a log file of its own in the run's folder"),
    "torchcompile-strategy": _always("always block by block: this is what works together with --fsdp"),
    "val-retrieval-precision": _always("always fp32"),
    "fsdp-init-on-cpu": _always("always on: rank 0 builds the model on its CPU and sends out the shards"),
    "fsdp-use-distributed-checkpointer": _always("always on: each rank writes and reads its own shards"),
    "fsdp-checkpoint": _always("always sharded; `shardclip export` writes one file that open_clip opens"),
    "fsdp-limit-allgathers": _always("always on: FSDP2 frees memory in time without it"),
    # What these ask for is done otherwise, or not here.
    "nproc-per-node": _refused("torchrun's word; here it is --nproc, and of submit --gpus-per-node"),
    "horovod": _refused("replaced by torchrun or srun with --ddp or --fsdp"),
    "torchscript": _refused("replaced by --torchcompile"),
    "trace": _refused("replaced by --torchcompile, and by `shardclip export` for inference"),
    "use-bnb-linear": _refused("int8 layers are not this project's job; --precision has bf16"),
    "opt-fallback-list": _refused("only Muon needs it, which is not here; --opt takes timm/NAME"),
    "copy-codebase": _refused("install a copy instead: pip install --target FOLDER, then run it from there"),
    "remote-sync-frequency": _always("always at once: each checkpoint is copied when it is whole"),
    "remote-sync-protocol": _always("the URL of --remote-sync says it"),
    "length-bucketing": _refused(_CAPTIONS),
    "bucket-pool": _refused(_CAPTIONS),
    "bucket-chunk": _refused(_CAPTIONS),
    "bucket-prefetch-pools": _refused(_CAPTIONS),
    "text-pad-multiple": _refused(_CAPTIONS),
    "pretrained-audio": _refused(_AUDIO),
    "use-naflex": _refused(_NAFLEX),
    "force-naflex-vision": _refused(_NAFLEX),
}
"""By foreign name, without dashes. Families of names are in `FAMILIES`."""

FAMILIES = {"audio-": _refused(_AUDIO), "naflex-": _refused(_NAFLEX)}
"""By what the names of a family begin with."""


VALUES: dict[str, dict[str, str]] = {
    "precision": dict.fromkeys(
        ("pure_bf16", "pure_fp16"),
        "weights stay fp32 in every precision; bf16 and fp16 compute the towers in it throughout",
    ),
    "dataset-type": dict.fromkeys(("webdataset-audio", "synthetic-audio"), _AUDIO),
}
"""Values of open_clip's that flags of ours do not take, and the line that is shown."""


def answer(name: str) -> Answer | None:
    """What becomes of a foreign flag (given without dashes); None if the name is unknown."""
    family = next((reply for prefix, reply in FAMILIES.items() if name.startswith(prefix)), None)
    return ANSWERS.get(name, family)


def rewrite(setting: Setting) -> list[Setting] | str:
    """The same setting under our name, nothing where it is so anyway, or the line that refuses it."""
    for value in setting.values:
        if value in VALUES.get(setting.name, {}):
            return f"{value}: {VALUES[setting.name][value]}"
    if setting.name == "force-image-size" and len(setting.values) > 1:  # open_clip takes height and width
        if len(set(setting.values)) > 1:
            return "only square pictures are taken: give one number"
        return [replace(setting, values=setting.values[:1])]
    negated = setting.name.startswith("no-") and answer(setting.name) is None
    reply = answer(setting.name.removeprefix("no-") if negated else setting.name)
    if reply is None:
        return [setting]
    if reply.kind == "alias":
        return [replace(setting, name=f"no-{reply.text}" if negated else reply.text)]
    accepted = negated == (reply.kind == "refused")
    return [] if accepted else reply.text


def notes(names: Iterable[str]) -> list[str]:
    """One line for each of the foreign flags that were accepted because they are so anyway."""
    replies = {name: answer(name) for name in names}
    return [f"--{name}: {reply.text}" for name, reply in replies.items() if reply and reply.kind == "always"]
