"""shardclip: a trainer for CLIP-like models, on one process or sharded over a cluster."""

__version__ = "0.1.0"
