"""A plan as text."""

from __future__ import annotations

from shardclip.training.planning.command import GIB, Plan


def report(plan: Plan) -> str:
    """The plan for a terminal, sizes in GiB."""
    shards = f", shards of {plan.shard_size} ranks" if plan.shard_size > 1 else ""
    lines = [
        f"{plan.model}: {plan.parameters:,} parameters; {plan.engine} on {plan.gpus:,} GPUs{shards}",
        f"local batch {plan.local_batch:,}, global batch {plan.global_batch:,}",
        "",
        f"memory of a rank at the peak (in the phase: {plan.peak_phase})",
        *(f"  {kind:<20}{size / GIB:>10.2f} GiB" for kind, size in plan.memory.items() if size > 0),
        f"  {'all':<20}{plan.peak / GIB:>10.2f} GiB of {plan.budget / GIB:.2f}",
    ]
    if plan.host_memory:
        lines.append(f"  {'on the host':<20}{plan.host_memory / GIB:>10.2f} GiB")
    lines += ["", "collectives of a step"]
    lines += [
        f"  {kind:<20}{sent['count']:>10,}   {sent['bytes'] / GIB:.3f} GiB"
        for kind, sent in plan.collectives.items()
    ]
    forward, step = plan.forward_flops_per_sample / 1e9, plan.step_flops_per_sample / 1e9
    lines += [
        "",
        f"GFLOPs of a sample: {forward:,.1f} forward, {step:,.1f} in the whole step",
        f"largest local batch that fits: {plan.largest_local_batch:,}",
    ]
    if not plan.fits:
        lines += ["", "it does not fit. Change, one after the other:"]
        lines += [
            f"  {change['flags']}: {change['peak'] / GIB:.2f} GiB{', fits' if change['fits'] else ''}"
            for change in plan.changes
        ]
    lines.append(f"\nsimulated in {plan.cpu_seconds:g} CPU-seconds; not counted: see --gpu-reserve")
    return "\n".join(lines)
