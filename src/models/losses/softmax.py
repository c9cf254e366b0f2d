"""The softmax contrastive loss: each image picks its text among all texts, each text its image.

Radford et al., "Learning Transferable Visual Models From Natural Language Supervision" (CLIP),
https://arxiv.org/abs/2103.00020, with the objective of van den Oord et al. (InfoNCE),
https://arxiv.org/abs/1807.03748.
"""

from __future__ import annotations

from torch import Tensor

from shardclip.models.losses.gather import GlobalBatch
from shardclip.models.losses.normalisers import Normalisers
from shardclip.models.losses.tiles import TILE, GradientSums, Logits, PairsInTile, exact, tiles_of


def softmax_contrastive(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor,
    batch: GlobalBatch,
    *,
    mask_duplicates: bool = False,
    logit_bias: Tensor | None = None,
    tile: int = TILE,
) -> Tensor:
    """The mean over pairs of -(log softmax over texts + log softmax over images) / 2, of the global batch.

    Images and texts without the other side are further negatives. Without any pair the loss and its gradients
    are 0. Every rank of `batch.group` must call it (two collectives: 2 floats per image and text, 3 floats).

    Args:
        image_features: [I, D], as given to `gather`; its gradient is complete, not a share of it.
        text_features: [T, D], likewise.
        logit_scale: [], the factor itself; its gradient is that of the global loss, on every rank.
        batch: what `gather` returned for these features.
        mask_duplicates: take equal captions of different samples out of the negatives.
        logit_bias: []; a softmax does not depend on it, its gradient is exactly 0.
        tile: side of the squares that the logits are computed in; memory grows with its square.

    Returns:
        [], fp32 (float64 for float64 features): the same value on every rank.

    Raises:
        ValueError: the features are not this rank's part of `batch`.
    """
    sums = GradientSums(batch, image_features, text_features, logit_scale)
    with exact(image_features.device):
        logits = Logits(batch, logit_scale, mask_duplicates=mask_duplicates)
        normalisers = Normalisers(batch, logits, tile)
        value = normalisers.over_pairs(normalisers.pairs)
        softmaxes = normalisers.exchange(only_pairs=True)
        for place in tiles_of(batch, tile, rows=sums.needs.images, columns=sums.needs.texts):
            slopes = softmaxes.probabilities(logits(place), place)
            if place.may_hold_pairs:
                PairsInTile.of(batch, place).add(slopes, -2.0)
            sums.add(place, slopes)
    loss = sums.loss(value, batch.per_pair / 2)
    # Not the sum of the slopes, which is 0 but for rounding: Adam would make steps of that.
    return loss if logit_bias is None else loss + 0 * logit_bias
