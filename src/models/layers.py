"""The layers of a tower as groups of parameter names: the one source for locking and for layer-wise decay.

Groups are found as timm finds them: a matcher (regular expressions from input to output) sorts parameter
names. timm's models declare theirs; for open_clip's and Hugging Face's towers it stands here.
"""

import difflib
import re
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from shardclip.errors import UserError

_WITH_PREVIOUS = (99999,)  # timm's mark for "belongs to the group before", as a final norm to its block


def layer_groups(tower: nn.Module) -> list[list[str]]:
    """Parameter names of `tower`, grouped from input to output; every parameter is in exactly one group.

    Group 0 is the stem (patch or token embeddings, positions), then one group per block, the final norm with
    the last of them, then a pooler that has parameters, and last the projection. A tower without one of these
    has no such group. A tower of one's own declares `group_matcher()` in timm's format.

    Raises:
        UserError: the tower's class is unknown and it declares no `group_matcher()`.
    """
    import open_clip
    from open_clip.hf_model import HFTextEncoder
    from open_clip.modified_resnet import ModifiedResNet
    from open_clip.timm_model import TimmModel

    if isinstance(tower, TimmModel):
        trunk = _match(tower.trunk, tower.trunk.group_matcher())
        head = [f"head.{name}" for name, _ in tower.head.named_parameters()]
        return [[f"trunk.{name}" for name in group] for group in trunk] + ([head] if head else [])
    if isinstance(tower, open_clip.transformer.VisionTransformer):
        return _match(tower, _vision_transformer_matcher(tower.attn_pool is not None))
    if isinstance(tower, open_clip.transformer.TextTransformer):
        return _match(tower, _TEXT_TRANSFORMER)
    if isinstance(tower, open_clip.transformer.MultimodalTransformer):
        return _match(tower, _CAPTION_DECODER)
    if isinstance(tower, ModifiedResNet):
        return _match(tower, _MODIFIED_RESNET)
    if isinstance(tower, HFTextEncoder):
        return _match(tower, _hugging_face_matcher(tower))
    if callable(matcher := getattr(tower, "group_matcher", None)):
        return _match(tower, matcher())
    raise UserError(
        f"the layers of a {type(tower).__name__} are not known, so it cannot be locked or decayed by depth: "
        "give it a group_matcher() as timm's models have, or lock it by name (--lock-patterns)"
    )


def _match(module: nn.Module, matcher: Any) -> list[list[str]]:
    from timm.models import group_parameters

    return list(group_parameters(module, matcher).values())


_TEXT_TRANSFORMER = {
    "stem": r"^(?:token_embedding|positional_embedding|cls_emb)",
    "blocks": [(r"^transformer\.resblocks\.(\d+)", None), (r"^ln_final", _WITH_PREVIOUS)],
    "projection": r"^text_projection",
}

_CAPTION_DECODER = {
    "blocks": [(r"^(?:resblocks|cross_attn)\.(\d+)", None), (r"^ln_final", _WITH_PREVIOUS)],
    "projection": r"^text_projection",
}

_MODIFIED_RESNET = {
    "stem": r"^(?:conv|bn)\d",
    "blocks": r"^layer(\d+)\.(\d+)",
    "pooler": r"^attnpool",
}


def _vision_transformer_matcher(has_pooler: bool) -> dict[str, Any]:
    blocks = (r"^transformer\.resblocks\.(\d+)", None)
    return {
        "stem": r"^(?:conv1|class_embedding|positional_embedding|ln_pre)",
        # CoCa normalises after its attentional pooler, the others after the last block.
        "blocks": blocks[0] if has_pooler else [blocks, (r"^ln_post", _WITH_PREVIOUS)],
        "pooler": r"^(?:attn_pool|ln_post)",
        "projection": r"^proj",
    }


def _hugging_face_matcher(tower: nn.Module) -> dict[str, Any]:
    """The blocks are the outermost list of modules; embeddings come before them wherever they stand."""
    lists = [name for name, module in tower.named_modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise UserError(
            f"no list of layers in the Hugging Face tower {type(tower.transformer).__name__}: "
            "lock it by name (--lock-patterns)"
        )
    blocks = re.escape(min(lists, key=lambda name: name.count(".")))
    return {
        "stem": rf"^(?!{blocks}\.)transformer\.(?:.*\.)?[^.]*(?:embed|shared)",
        "blocks": [
            (rf"^{blocks}\.(\d+)", None),
            (r"^transformer\.(?!(?:.*\.)?pooler\.)", _WITH_PREVIOUS),
        ],
        "pooler": r"^transformer\.(?:.*\.)?pooler\.",
        "projection": r"^proj",
    }


def select(names: Collection[str], globs: Iterable[str], flag: str) -> set[str]:
    """The parameter names that a glob matches; `*` matches dots too.

    Raises:
        UserError: a glob, given by `flag`, matches nothing; the message names the nearest parameters.
    """
    selected: set[str] = set()
    for glob in globs:
        matched = {name for name in names if fnmatchcase(name, glob)}
        if not matched:
            raise UserError(f"{flag} {glob!r} matches no parameter; {_nearest(names, glob)}")
        selected |= matched
    return selected


def _nearest(names: Collection[str], glob: str) -> str:
    if any(fnmatchcase(name, f"*{glob}*") for name in names):
        return f"a glob matches the whole name: *{glob}* would match"
    # Wildcards count against the likeness of two names, so they are left out of the comparison.
    literal = re.sub(r"[*?\[\]]", "", glob)
    nearest = difflib.get_close_matches(literal, names, n=3, cutoff=0.0)
    return "the nearest are " + ", ".join(nearest)
