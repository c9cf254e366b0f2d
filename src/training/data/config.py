"""What data a run reads and how it is turned into samples: the flags of the data side."""

from __future__ import annotations

import ast
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, Literal

from shardclip.errors import UserError


@dataclass(frozen=True)
class DataConfig:
    """Sources, captions, decoding and reading."""

    train_data: str | None = None
    """Training data: tar shards, folders, .txt lists of shards, .csv/.tsv/.parquet tables. Brace ranges
    expand; `::` joins several sources; pipe:, http(s):// and what fsspec opens (s3://, gs://) are read as
    streams."""
    train_data_upsampling_factors: str | None = None
    """How often an epoch meets each source's samples, joined by `::` (for example 1::0.5); with
    --dataset-resampled, the weights that shards are drawn with."""
    train_num_samples: int | None = None
    """Samples of one epoch; counted from the data when not given."""
    val_data: str | None = None
    """Validation data, in the forms that --train-data takes."""
    val_num_samples: int | None = None
    """Read only the first so many samples of the validation data."""
    dataset_type: Literal["auto", "webdataset", "csv", "synthetic"] = "auto"
    """Kind of data; auto goes by the file names."""
    dataset_resampled: bool = False
    """Draw the training data with replacement instead of meeting each sample once an epoch."""
    csv_separator: str | None = None
    """Column separator of a table (a tab may be written as backslash and t); found from the header line (tab,
    comma, semicolon, bar) when not given."""
    csv_img_key: str = "filepath"
    """Column of the image's path; a relative path starts at the table's folder."""
    csv_caption_key: str = "title"
    """Column of the caption."""
    csv_label_key: str = "label"
    """Column of the class number, for tables of labelled images."""
    image_key: str = "jpg;png;jpeg;webp"
    """Tar suffixes of the image, the first that a sample has is taken."""
    text_key: str = "txt"
    """Tar suffixes of the caption, the first that a sample has is taken."""
    json_text_key: str | None = None
    """Take the caption from these fields of the .json member (`;` between them), the first that holds one.
    Of a list of captions one is drawn."""
    json_text_key_probs: tuple[float, ...] | None = None
    """Draw the field of --json-text-key with these weights instead of taking the first."""
    sample_key: Literal["first-dot", "last-dot"] = "first-dot"
    """Where a tar member's name is cut into the sample's key and the suffix: at the first dot of the base
    name (the format's rule), or at the last, for names that hold dots."""
    unpaired: Literal["drop", "negatives"] = "drop"
    """A sample without a caption or without an image: left out and counted, or kept as a negative for the
    other side."""
    decode: Literal["fast", "exact"] = "fast"
    """fast: JPEG pictures are decoded at the scale that the crop needs. exact: open_clip's own transform,
    bit for bit (evaluation always is)."""
    max_image_pixels: int = 25_000_000
    """Leave out (and count) pictures of more pixels, before they are decoded."""
    aug_cfg: tuple[str, ...] = ()
    """open_clip's augmentation settings as key=value (scale, ratio, color_jitter, color_jitter_prob,
    gray_scale_prob, use_timm, ...)."""
    workers: int = 4
    """Reading processes of each rank; 0 reads in the training process."""
    streams: int | None = None
    """Sample sequences that the run is cut into at its first start: ranks and workers may change later as
    long as the ranks divide it. Chosen from ranks, workers and batch size when not given."""
    data_timeout: float = 300.0
    """Seconds to wait for a worker's samples, or for a remote shard's next bytes, before the run stops."""
    data_retries: int = 3
    """How often a remote shard is opened again after a failure, before it is left out and counted."""
    max_skip_rate: float = 0.1
    """Stop when more than this share of the last 10,000 samples read had to be left out."""

    def __post_init__(self) -> None:
        if self.json_text_key_probs is not None and (
            len(self.json_text_key_probs) != len(suffixes(self.json_text_key or ""))
            or min(self.json_text_key_probs) < 0
            or sum(self.json_text_key_probs) <= 0
        ):
            raise UserError(
                f"--json-text-key-probs {self.json_text_key_probs} needs one weight >= 0 for each field of "
                f"--json-text-key ({self.json_text_key}), not all of them 0."
            )
        if self.train_num_samples is not None and self.train_num_samples < 1:
            raise UserError(
                f"--train-num-samples is {self.train_num_samples}: 1 or more are meant, or none for a count."
            )
        if self.csv_delimiter is not None and len(self.csv_delimiter) != 1:
            raise UserError(
                f"--csv-separator is '{self.csv_separator}': one character is meant, or \\t for a tab. Leave "
                "it out to have it found from the header line."
            )
        if self.workers < 0:
            raise UserError(f"--workers is {self.workers}: 0 or more are meant.")
        if not 0 <= self.max_skip_rate <= 1:
            raise UserError(f"--max-skip-rate is {self.max_skip_rate}: a share between 0 and 1 is meant.")
        self.augmentation()

    @property
    def csv_delimiter(self) -> str | None:
        """The separator itself: a shell hands over the two characters of '\\t' as they are."""
        return "\t" if self.csv_separator == "\\t" else self.csv_separator

    def augmentation(self) -> dict[str, Any]:
        """`aug_cfg` as a dictionary of Python values.

        Raises:
            UserError: not key=value, no key that open_clip knows, a jitter that lacks its strengths, or
                erasing, which is not done here.
        """
        settings: dict[str, Any] = {}
        for item in self.aug_cfg:
            name, equals, text = item.partition("=")
            if not equals or not name:
                raise UserError(f"--aug-cfg {item!r} is not of the form key=value.")
            try:
                settings[name] = ast.literal_eval(text)
            except (ValueError, SyntaxError):
                settings[name] = text
        if settings:
            _check_augmentation(settings)
        return settings

    def wanted(self, label: bool = False) -> dict[str, tuple[str, ...]]:
        """What a sample is made of: role -> the tar suffixes that serve it, by priority.

        Roles are "image" and, for the other side, "text", "json" (which holds the caption) or "cls".
        """
        roles = {"image": suffixes(self.image_key)}
        if label:
            roles["cls"] = ("cls",)
        elif self.json_text_key is not None:
            roles["json"] = ("json",)
        else:
            roles["text"] = suffixes(self.text_key)
        return roles


def _check_augmentation(settings: dict[str, Any]) -> None:
    from open_clip.transform import AugmentationCfg

    known = [setting.name for setting in fields(AugmentationCfg)]
    for name in settings:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"; the nearest is {near[0]}" if near else f"; there are {', '.join(known)}"
            raise UserError(f"--aug-cfg {name} is not one of open_clip's settings{hint}.")
    jitter = settings.get("color_jitter")
    strengths = len(jitter) if isinstance(jitter, tuple | list) else 0
    if settings.get("color_jitter_prob") and not settings.get("use_timm") and strengths != 4:
        raise UserError(
            "--aug-cfg color_jitter_prob needs the four strengths color_jitter=(brightness, contrast, "
            f"saturation, hue); it is {jitter}."
        )
    if settings.get("re_prob") and settings.get("use_timm"):
        raise UserError(
            f"--aug-cfg re_prob={settings['re_prob']} erases parts of normalised pictures, and here pictures "
            "are normalised on the device, after all augmentation: leave it out."
        )


def suffixes(keys: str) -> tuple[str, ...]:
    """The items of a `;` list, in order, as the tar suffixes or fields that they name."""
    return tuple(key for key in keys.split(";") if key)
