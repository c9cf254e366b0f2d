"""The sigmoid contrastive loss: each image-text combination is a yes-or-no question of its own.

Zhai et al., "Sigmoid Loss for Language Image Pre-Training" (SigLIP), https://arxiv.org/abs/2303.15343.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shardclip.models.losses.gather import GlobalBatch
from shardclip.models.losses.tiles import (
    TILE,
    GradientSums,
    Logits,
    PairsInTile,
    exact,
    tiles_of,
)


def sigmoid_contrastive(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor,
    logit_bias: Tensor | None,
    batch: GlobalBatch,
    *,
    mask_duplicates: bool = False,
    tile: int = TILE,
) -> Tensor:
    """Sum over all images x all texts of -log sigmoid(+-logit), divided by the number of pairs.

    The sign is + for the two sides of a pair and - for all else, images and texts without the other side
    included. Without any pair the loss and its gradients are 0. Every rank of `batch.group` must call it
    (one collective, of 3 floats).

    Args:
        image_features: [I, D], as given to `gather`; its gradient is complete, not a share of it.
        text_features: [T, D], likewise.
        logit_scale: [], the factor itself; its gradient is that of the global loss, on every rank.
        logit_bias: [], added to every logit; its gradient is global likewise. None for 0.
        batch: what `gather` returned for these features.
        mask_duplicates: take equal captions of different samples out of the negatives.
        tile: side of the squares that the logits are computed in; memory grows with its square.

    Returns:
        [], fp32 (float64 for float64 features): the same value on every rank.

    Raises:
        ValueError: the features are not this rank's part of `batch`.
    """
    sums = GradientSums(batch, image_features, text_features, logit_scale, logit_bias)
    with exact(image_features.device):
        logits = Logits(batch, logit_scale, logit_bias, mask_duplicates)
        value = torch.zeros([], dtype=torch.float64, device=image_features.device)
        for place in tiles_of(batch, tile, columns=sums.needs.texts):
            scores = logits(place)
            pairs = PairsInTile.of(batch, place) if place.may_hold_pairs else None
            if pairs is not None:
                # -log sigmoid(z) of a pair is softplus(-z): its logit changes sign here, its slope below.
                pairs.add(scores, -2 * pairs.read(scores))
            if place.own_images is not None:
                value += softplus(scores).sum()
            slopes = scores.sigmoid_()
            if pairs is not None:
                pairs.add(slopes, -2 * pairs.read(slopes))
            sums.add(place, slopes)
    return sums.loss(value, batch.per_pair)


def softplus(logits: Tensor) -> Tensor:
    """log(1 + exp(logits)); torch's default would be linear from 20 on, which float64 can tell."""
    return F.softplus(logits, threshold=40)
