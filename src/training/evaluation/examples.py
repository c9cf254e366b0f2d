"""Some validation pairs with what the model holds nearest to them: what retrieval's figures look like."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from io import BytesIO

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from shardclip.training.data.finite import FinitePass
from shardclip.training.data.samples import Captions, LeftOut
from shardclip.training.data.sources import RawSample
from shardclip.training.distributed import Processes
from shardclip.training.evaluation.contact_sheet import CAPTIONS, PICTURES, SIDE, Found, Query, contact_sheet
from shardclip.training.evaluation.pairs import EncodedPairs
from shardclip.training.evaluation.retrieval import Side, nearest

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Shown:
    """A sample as it is drawn."""

    picture: Image.Image
    captions: tuple[str, ...]


_BLANK = _Shown(Image.new("RGB", (SIDE, SIDE), "lightgray"), ())


def draw_examples(
    encoded: EncodedPairs,
    pairs: FinitePass,
    captions: Captions,
    metrics: Mapping[str, float],
    *,
    count: int,
    processes: Processes,
) -> Image.Image | None:
    """Queries evenly spaced over the samples, pictures and captions in turn, with their nearest neighbours.

    Neighbours are those among all samples of all ranks. The few samples that are shown are read once more.

    Args:
        encoded: the features of this rank's samples.
        pairs: where these samples came from.
        captions: reads the captions of a sample.
        metrics: the figures of the evaluation, for the headings.
        count: queries of each kind.
        processes: the ranks; every one calls this.

    Returns:
        The sheet on rank 0; None elsewhere, and where no sample has both sides.
    """
    images, texts = _queries(encoded, count, processes)
    if not images and not texts:
        return None
    captions_found = nearest(_stacked(images), encoded.texts, CAPTIONS, processes)
    pictures_found = nearest(_stacked(texts), encoded.images, PICTURES, processes)
    found = [sample for rows in captions_found + pictures_found for sample, _ in rows]
    shown = _read_again(encoded, pairs, captions, {*found, *images, *texts}, processes)
    if not processes.is_primary:
        return None
    return contact_sheet(
        [_query(sample, rows, shown) for sample, rows in zip(images, captions_found, strict=True)],
        [_query(sample, rows, shown) for sample, rows in zip(texts, pictures_found, strict=True)],
        (
            f"picture -> captions: R@1 {metrics['image_to_text_R@1']:.1%}",
            f"caption -> pictures: R@1 {metrics['text_to_image_R@1']:.1%}",
        ),
    )


def _queries(
    encoded: EncodedPairs, count: int, processes: Processes
) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Sample number -> features, on every rank: of pictures that ask, and of captions that ask."""
    samples = sum(processes.all_gather_object(len(encoded.keys)))
    asking = torch.linspace(0, samples - 1, min(2 * count, samples)).long().tolist()
    own = [_first_rows(side, set(asking)) for side in (encoded.images, encoded.texts)]
    images, texts = (
        {sample: row for part in gathered for sample, row in part.items()}
        for gathered in zip(*processes.all_gather_object(own), strict=True)
    )
    both = [sample for sample in asking if sample in images and sample in texts]
    return {sample: images[sample] for sample in both[0::2]}, {sample: texts[sample] for sample in both[1::2]}


def _first_rows(side: Side, samples: set[int]) -> dict[int, Tensor]:
    first = side.is_first.tolist()
    return {
        sample: side.features[row].cpu()
        for row, sample in enumerate(side.sample.tolist())
        if first[row] and sample in samples
    }


def _stacked(queries: Mapping[int, Tensor]) -> Tensor:
    return torch.stack(list(queries.values())) if queries else torch.zeros(0, 1)


def _read_again(
    encoded: EncodedPairs, pairs: FinitePass, captions: Captions, samples: set[int], processes: Processes
) -> dict[int, _Shown]:
    """The samples by number, on every rank: each is read by the rank that has it."""
    own: dict[int, _Shown] = {}
    with processes.together("reading what is drawn"):
        for row, sample in enumerate(encoded.numbers.tolist()):
            if sample in samples:
                raw = pairs.read_again(encoded.keys[row], *encoded.places[row])
                own[sample] = _BLANK if raw is None else _shown(raw, captions)
    return {sample: shown for part in processes.all_gather_object(own) for sample, shown in part.items()}


def _shown(raw: RawSample, captions: Captions) -> _Shown:
    """A sample that was read before; should it have changed meanwhile, a blank takes its place."""
    content = raw.parts.get("image")
    try:
        if isinstance(content, bytes):
            picture = Image.open(BytesIO(content)).convert("RGB")
        else:
            picture = Image.fromarray(np.array(content))
        picture.thumbnail((SIDE, SIDE))
        return _Shown(picture, tuple(text for texts in captions.of(raw) for text in texts))
    except (OSError, ValueError, TypeError, LeftOut) as error:
        _log.debug("%s cannot be drawn: %r", raw.key, error)
        return _BLANK


def _query(sample: int, rows: Iterable[tuple[int, int]], shown: Mapping[int, _Shown]) -> Query:
    own = shown.get(sample, _BLANK)
    found = tuple(
        Found(shown.get(other, _BLANK).picture, _caption(shown.get(other, _BLANK), position), other == sample)
        for other, position in rows
    )
    return Query(own.picture, _caption(own, 0), found)


def _caption(shown: _Shown, position: int) -> str:
    return shown.captions[position] if position < len(shown.captions) else ""
