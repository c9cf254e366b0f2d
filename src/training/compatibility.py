"""open_clip's flag names, and the seed-era FSDP names: each is accepted with its meaning or answered in one line."""

from shardclip.training.parsing import Setting

ANSWERS: dict[str, str] = {}


def rewrite(setting: Setting) -> list[Setting] | str:
    """The setting under this project's name."""
    return [setting]
