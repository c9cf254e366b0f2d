"""What a run says: console, JSON lines, TensorBoard, W&B."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TrackingConfig:
    """Logs: what is written, where, how often."""

    report_to: str = ""
    """Besides console and JSON lines: tensorboard, wandb, trackio; separated by commas."""
    wandb_project_name: str = "open-clip"
    """Project of W&B and trackio."""
    wandb_notes: str = ""
    """Notes of the run in W&B."""
    log_every_n_steps: int = 100
    """Steps between lines on the console."""
    log_metric_every_n_steps: int = 10
    """Steps between entries of metrics.jsonl and of the trackers of --report-to."""
    train_loss_ema_samples: int = 50_000
    """Samples over which the loss in parentheses is averaged, exponentially."""
    debug: bool = False
    """Also log what is of use only when looking for a fault."""
