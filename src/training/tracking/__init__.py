"""What a run says: console, log files, JSON lines, TensorBoard, W&B, trackio."""

from shardclip.training.tracking.tracker import Tracker, TrackingConfig

__all__ = ["Tracker", "TrackingConfig"]
