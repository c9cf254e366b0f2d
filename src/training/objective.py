"""What a run minimises: the losses by name, each with its weight."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shardclip.errors import UserError
from shardclip.models.factory import ModelSpec
from shardclip.models.losses.distill import distillation
from shardclip.models.losses.gather import GlobalBatch
from shardclip.models.losses.sigmoid import sigmoid_contrastive
from shardclip.models.losses.softmax import softmax_contrastive


@dataclass(frozen=True)
class ObjectiveConfig:
    """The losses and their weights."""

    siglip: bool = False
    """Sigmoid loss (SigLIP) in place of softmax; the model gets a bias, and starts at scale 10, bias -10."""
    coca_contrastive_loss_weight: float = 1.0
    """Weight of the contrastive loss of a captioning model (CoCa)."""
    coca_caption_loss_weight: float = 2.0
    """Weight of the caption loss of a captioning model (CoCa)."""
    distill_model: str | None = None
    """Teacher architecture to distil from, by name."""
    distill_pretrained: str | None = None
    """Weights of the teacher: a tag of open_clip's list or a file."""
    mask_duplicates: bool = False
    """Take samples with the same caption out of each other's negatives."""
    loss_tile: int = 2048
    """Side of the tiles that the loss is computed in: memory against launches, same result."""


@dataclass(frozen=True)
class Teacher:
    """What the teacher of a distillation says about the whole batch."""

    batch: GlobalBatch
    logit_scale: Tensor
    logit_bias: Tensor | None


class Objective:
    """The sum of losses that a configuration and a model ask for."""

    def __init__(self, config: ObjectiveConfig, spec: ModelSpec) -> None:
        if config.siglip and not spec.is_sigmoid:
            raise UserError(f"--siglip: {spec.name} has no logit_bias")
        self.config = config
        self.is_captioning = spec.is_captioning and config.coca_caption_loss_weight > 0

    @property
    def caption_weight(self) -> float:
        """Factor of the caption loss; the step applies it where it computes token losses."""
        return self.config.coca_caption_loss_weight if self.is_captioning else 0.0

    def feature_losses(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor,
        logit_bias: Tensor | None,
        batch: GlobalBatch,
        teacher: Teacher | None = None,
    ) -> dict[str, Tensor]:
        """Weighted losses of the whole batch that are functions of features alone, by name.

        Args:
            image_features: this rank's [I, D], fp32, unit length.
            text_features: this rank's [T, D], likewise.
            logit_scale: [], the factor itself.
            logit_bias: [] or None.
            batch: what all ranks hold.
            teacher: the teacher's view of the same batch.

        Returns:
            `contrastive_loss`, and with a teacher `distill_loss`: [] each, equal on all ranks, whose gradient
            is complete for this rank's features and global for scale and bias.
        """
        mask, tile = self.config.mask_duplicates, self.config.loss_tile
        features = (image_features, text_features, logit_scale)
        if self.config.siglip:
            assert logit_bias is not None
            loss = sigmoid_contrastive(*features, logit_bias, batch, mask_duplicates=mask, tile=tile)
        else:
            loss = softmax_contrastive(*features, batch, mask_duplicates=mask, tile=tile)
        weight = self.config.coca_contrastive_loss_weight if self.is_captioning else 1.0
        losses = {"contrastive_loss": weight * loss}
        if teacher is not None:
            losses["distill_loss"] = distillation(
                *features,
                batch,
                teacher.batch,
                teacher.logit_scale,
                logit_bias=logit_bias if self.config.siglip else None,
                teacher_bias=teacher.logit_bias,
                student_kind="sigmoid" if self.config.siglip else "softmax",
                teacher_kind="softmax" if teacher.logit_bias is None else "sigmoid",
                tile=self.config.loss_tile,
            )
        return losses
