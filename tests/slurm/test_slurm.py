"""The shipped batch files on a real SLURM: who is who, preemption, requeue, a loss curve without a seam."""

import json
import os
import sys
from pathlib import Path

import pytest
from cluster import Cluster

pytestmark = pytest.mark.slurm

ROOT = Path(__file__).parents[2]

MODEL = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 16},
    "text_cfg": {"context_length": 8, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
}
STEPS = 100
TRAIN = (
    "--model-config model.json --dataset-type synthetic --fsdp --device cpu --precision fp32 --workers 0 "
    f"--batch-size 4 --train-num-samples {STEPS * 8} --epochs 1 --warmup 0 --log-every-n-steps 1"
)
ONE_TASK_A_NODE = ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1", "--cpus-per-task=1", "--time=30")
ONE_NODE = ("--gpus-per-node=1", "--cpus-per-task=2", "--time=30")

INTRODUCE = """
import sys
from shardclip.training.distributed import DistributedConfig
from shardclip.training.worker import run_worker
sys.exit(run_worker(lambda p: print(f"I am {p.rank} of {p.world_size}"), DistributedConfig(device="cpu")))
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to submit from, with the scripts, and this interpreter's `shardclip` on the PATH."""
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def _submit(cluster: Cluster, place: Path, name: str, file: str, options: tuple[str, ...], flags: str) -> str:
    cluster.environment["PATH"] = os.environ["PATH"]
    words = ("-J", name, *options, f"scripts/slurm/{file}", *flags.split())
    return cluster.submit(*words, cwd=place, NPROC="2", OMP_NUM_THREADS="1")


def _losses(place: Path, run: str) -> dict[int, float]:
    """The loss by step; a step that was logged twice counts as it was last."""
    file = place / "runs" / run / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return {row["step"]: row["loss"] for row in map(json.loads, lines) if "loss" in row}


def _preempt(cluster: Cluster, place: Path, job: str, run: str) -> None:
    """Signal the job when it has made a step more than now; back when it is requeued."""
    before, made = int(cluster.job(job)["Restarts"]), len(_losses(place, run))
    # No more than one: a fast machine makes many steps before the signal is heard.
    cluster.until(lambda: len(_losses(place, run)) > made)
    cluster.run("scancel", "--signal=USR1", "--batch", job)
    cluster.until(lambda: int(cluster.job(job)["Restarts"]) == before + 1)


def test_b22_the_tasks_of_a_step_are_ranks_and_a_plain_process_of_a_job_is_alone(
    cluster: Cluster, place: Path
) -> None:
    (place / "introduce.py").write_text(INTRODUCE)
    (place / "job.sh").write_text(
        f"#!/bin/bash\n{sys.executable} introduce.py > alone\n"
        f"srun --label {sys.executable} introduce.py > step\n"
    )
    job = cluster.submit(*ONE_TASK_A_NODE, "job.sh", cwd=place)
    assert cluster.finished(job)["JobState"] == "COMPLETED"
    alone, step = (place / "alone").read_text(), (place / "step").read_text()
    assert "SLURM_NTASKS=2" in alone
    assert "I am 0 of 1" in alone
    assert {"0: I am 0 of 2", "1: I am 1 of 2"} <= set(step.splitlines())
    # Both nodes have this machine's host name; SLURM's own names tell them apart.
    first = [line for line in step.splitlines() if line.startswith("0: ")]
    assert "0:   n1: rank 0 (cpu)\n0:   n2: rank 1 (cpu)\n" in "\n".join([*first, ""])


def test_b25_a_run_that_is_preempted_twice_equals_one_that_is_not(cluster: Cluster, place: Path) -> None:
    whole = _submit(cluster, place, "whole", "one_node.sbatch", ONE_NODE, TRAIN)
    assert cluster.finished(whole)["JobState"] == "COMPLETED", (place / f"whole-{whole}.log").read_text()
    cut = _submit(cluster, place, "cut", "many_nodes.sbatch", ONE_TASK_A_NODE, TRAIN)
    _preempt(cluster, place, cut, f"cut-{cut}")
    _preempt(cluster, place, cut, f"cut-{cut}")
    assert cluster.finished(cut)["JobState"] == "COMPLETED"

    losses = _losses(place, f"whole-{whole}")
    assert len(losses) == STEPS
    assert _losses(place, f"cut-{cut}") == losses
    log = (place / f"cut-{cut}.log").read_text()
    assert [f"start {number}, on n[1-2]" in log for number in range(4)] == [True, True, True, False]
    assert f"--name cut-{cut} --resume latest" in log
    assert [file.name for file in sorted((place / "logs" / f"cut-{cut}").iterdir())] == [
        "rank-0000.log",
        "rank-0001.log",
    ]


def test_b25_a_run_on_one_node_goes_on_after_preemption(cluster: Cluster, place: Path) -> None:
    job = _submit(cluster, place, "one", "one_node.sbatch", ONE_NODE, TRAIN)
    _preempt(cluster, place, job, f"one-{job}")
    assert cluster.finished(job)["JobState"] == "COMPLETED", (place / f"one-{job}.log").read_text()
    assert sorted(_losses(place, f"one-{job}")) == list(range(1, STEPS + 1))


def test_a_mistake_ends_the_job_with_its_code(cluster: Cluster, place: Path) -> None:
    flags = f"{TRAIN} --dataset-type webdataset --train-data missing-{{0..3}}.tar"
    job = _submit(cluster, place, "wrong", "many_nodes.sbatch", ONE_TASK_A_NODE, flags)
    shown = cluster.finished(job)
    assert (shown["JobState"], shown["ExitCode"], shown["Restarts"]) == ("FAILED", "2:0", "0")
    logs = place / "logs" / f"wrong-{job}"
    assert "missing-0.tar" in (logs / "rank-0000.log").read_text()
    assert "missing-0.tar" not in (logs / "rank-0001.log").read_text()


def _stand_in(place: Path, body: str) -> str:
    """A PATH on which `shardclip` is a shell script."""
    stand_in = place / "bin" / "shardclip"
    stand_in.parent.mkdir()
    stand_in.write_text(f"#!/bin/bash\n{body}\n")
    stand_in.chmod(0o755)
    return f"{stand_in.parent}:{os.environ['PATH']}"


def test_a_cancelled_job_saves_and_stays_cancelled(cluster: Cluster, place: Path) -> None:
    path = _stand_in(place, "trap 'touch saved; exit 85' TERM USR1; touch ready; sleep 300 & wait")
    job = cluster.submit(*ONE_TASK_A_NODE, "scripts/slurm/many_nodes.sbatch", cwd=place, PATH=path)
    cluster.until((place / "ready").exists)
    cluster.run("scancel", job)
    shown = cluster.finished(job)
    cluster.until((place / "saved").exists)
    assert (shown["JobState"], shown["Restarts"]) == ("CANCELLED", "0")


def test_each_element_of_an_array_gets_its_line(cluster: Cluster, place: Path) -> None:
    path = _stand_in(place, 'echo "$@"')
    (place / "runs.txt").write_text("--name a --lr 1e-3\n--name b --lr 1e-4\n")
    job = cluster.submit(
        *ONE_NODE,
        "--array=1-2",
        "scripts/slurm/array.sbatch",
        "runs.txt",
        "--fsdp",
        cwd=place,
        PATH=path,
    )
    for element, flags in ((1, "--fsdp --name a --lr 1e-3"), (2, "--fsdp --name b --lr 1e-4")):
        assert cluster.finished(f"{job}_{element}")["JobState"] == "COMPLETED"
        assert (place / f"clip-array-{job}-{element}.log").read_text().splitlines()[-1].endswith(flags)
