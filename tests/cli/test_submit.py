"""`shardclip submit`: the batch file that a run's settings make."""

import subprocess
from pathlib import Path

import pytest

from shardclip import cli

RUN = [
    "--model",
    "ViT-B-32",
    "--workers",
    "6",
    "--train-data",
    "shards/{0..3}.tar",
    "--train-num-samples",
    "64",
]


def test_a_dry_run_prints_a_batch_file_that_runs_the_shipped_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--nodes", "4", "--time=48:00:00", "--partition", "long"]
    assert cli.main(["submit", "--dry-run", *asked, *RUN, "--name", "two words"]) == 0
    text = capsys.readouterr().out
    options = {
        "--nodes=4",
        "--ntasks-per-node=8",
        "--gpus-per-node=8",
        "--cpus-per-task=8",
        "--time=48:00:00",
        "--partition=long",
        "--signal=B:USR1@300",
        "--requeue",
    }
    assert options <= {line.removeprefix("#SBATCH ") for line in text.splitlines()}
    # The words reach the shipped file as they were given.
    body = tmp_path / "scripts" / "slurm" / "many_nodes.sbatch"
    body.parent.mkdir(parents=True)
    body.write_text('printf "%s\\n" "$@"\n')
    said = subprocess.run(
        ["bash"], input=text, cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    assert said.splitlines() == [*RUN, "--name", "two words"]


def test_a_wrong_flag_of_the_run_is_told_before_it_is_queued(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["submit", "--dry-run", *RUN, "--lock-imag"]) == 2
    assert "--lock-imag: no such setting; the nearest is --lock-image" in capsys.readouterr().err
    assert cli.main(["submit", "--nodes", "0", *RUN]) == 2
