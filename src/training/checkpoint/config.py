"""When checkpoints are written, and which of them are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving, keeping and resuming."""

    save_frequency: int = 1
    """Save every so many epochs (0: never at an epoch's end)."""
    save_every: int | None = None
    """Also save every so many samples."""
    save_minutes: float | None = None
    """Also save every so many minutes."""
    keep_last: int | None = None
    """Keep only so many of the newest checkpoints; without it, all of them."""
    keep_every: int | None = None
    """With --keep-last: keep for good the first checkpoint after each multiple of so many samples."""
    save_most_recent: bool = False
    """Save at every epoch's end; those that --save-frequency does not ask for are replaced by the next."""
    delete_previous_checkpoint: bool = False
    """Keep only the newest checkpoint: the same as --keep-last 1."""
    async_save: bool = True
    """Go on with training while a copy of the state is written."""
    resume: str | None = None
    """Checkpoint to go on from: folder, URL, .pt of open_clip's, or `latest`, the run's newest whole one."""
    override: bool = False
    """Resume with other settings than the checkpoint's run had, where they decide what is learnt."""

    def resolved(self, samples_per_epoch: int) -> CheckpointConfig:
        """The same in `keep_last` and `keep_every` alone, without open_clip's two names for them."""
        keep_last, keep_every, frequency = self.keep_last, self.keep_every, self.save_frequency
        if self.delete_previous_checkpoint:
            keep_last = 1
        if self.save_most_recent and frequency != 1:
            keep_last = keep_last or 1
            keep_every = keep_every or (frequency * samples_per_epoch or None)
            frequency = 1
        return replace(
            self,
            save_frequency=frequency,
            keep_last=keep_last,
            keep_every=keep_every,
            save_most_recent=False,
            delete_previous_checkpoint=False,
        )


def to_prune(saved: Sequence[int], keep_last: int | None, keep_every: int | None) -> list[int]:
    """Which checkpoints may go, each given as its samples seen, in ascending order.

    The newest `keep_last` stay, and so does the first one at or after each multiple of `keep_every`. That
    choice does not change when others are pruned, so it can be taken anew after every save.
    """
    if keep_last is None:
        return []
    newest = set(saved[max(0, len(saved) - keep_last) :])
    before = [0, *saved[:-1]]
    milestones = {
        samples
        for samples, previous in zip(saved, before, strict=True)
        if keep_every is not None and samples // keep_every > previous // keep_every
    }
    return [samples for samples in saved if samples not in newest | milestones]
