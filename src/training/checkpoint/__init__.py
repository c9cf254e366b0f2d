"""Checkpoints: whole or absent, of any engine and number of ranks, tensors and plain values only."""

from shardclip.training.checkpoint.checkpoints import Checkpoints
from shardclip.training.checkpoint.config import CheckpointConfig
from shardclip.training.checkpoint.folders import published
from shardclip.training.checkpoint.state import TrainState
from shardclip.training.checkpoint.storage import read_state, samples_of

__all__ = ["CheckpointConfig", "Checkpoints", "TrainState", "published", "read_state", "samples_of"]
