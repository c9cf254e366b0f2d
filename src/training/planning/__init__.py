"""What a run will need, before it waits in a queue: memory, traffic and FLOPs, simulated without a GPU."""

from shardclip.training.planning.command import Plan, PlanConfig, main, plan

__all__ = ["Plan", "PlanConfig", "main", "plan"]
