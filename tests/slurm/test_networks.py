"""Two machines, as network namespaces that share nothing but a cable: launchers, c10d rendezvous, gloo."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launched import HANG_SECONDS

pytestmark = pytest.mark.slurm

WORK = """
import sys, torch, torch.distributed as dist
from shardclip.training.distributed import DistributedConfig
from shardclip.training.worker import run_worker

def work(processes):
    total = torch.ones(3)
    dist.all_reduce(total)
    print(processes.rank, "sees", processes.all_gather_object(sys.argv[1]), total.tolist(), flush=True)
    return 0

sys.exit(run_worker(work, DistributedConfig(device="cpu")))
"""

LAUNCH = """
import sys
from shardclip.launch import launch_command, split_launch_flags
config, words = split_launch_flags(sys.argv[1:])
sys.exit(launch_command(config, [sys.executable, *words]))
"""


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def machines() -> Iterator[dict[str, str]]:
    """Two namespaces joined by a veth pair: name -> address."""
    names = {f"clip{os.getpid()}{end}": f"10.213.7.{number}" for number, end in ((1, "a"), (2, "b"))}
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("needs root and iproute2")
    made = []
    try:
        for name in names:
            try:
                _ip("netns", "add", name)
            except subprocess.CalledProcessError:
                pytest.skip("this machine does not allow network namespaces")
            made.append(name)
        first, second = names
        _ip(
            "link", "add", "cable0", "netns", first, "type", "veth", "peer", "name", "cable0", "netns", second
        )
        for name, address in names.items():
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "cable0")
            _ip("-n", name, "link", "set", "cable0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in made:
            _ip("netns", "del", name)


LAUNCHERS = {
    "shardclip": "launch.py --nproc 1 --nnodes 2 --rdzv-endpoint {endpoint} --node-address {address}",
    # torchrun compares the endpoint with the addresses of the host's name, which here is no machine's.
    "torchrun": "-m torch.distributed.run --nproc-per-node 1 --nnodes 2 --rdzv-backend c10d --rdzv-id run "
    "--rdzv-endpoint {endpoint} --rdzv-conf is_host={first} --local-addr {address}",
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_machines_meet_by_the_address_of_one(
    machines: dict[str, str], tmp_path: Path, launcher: str
) -> None:
    (tmp_path / "work.py").write_text(WORK)
    (tmp_path / "launch.py").write_text(LAUNCH)
    first = next(iter(machines.values()))
    launchers = []
    for name, address in machines.items():
        flags = LAUNCHERS[launcher].format(
            endpoint=f"{first}:29400", address=address, first=int(address == first)
        )
        command = f"ip netns exec {name} {sys.executable} {flags} work.py {address}".split()
        launchers.append(
            subprocess.Popen(
                command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    try:
        said = [launcher.communicate(timeout=HANG_SECONDS)[0] for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.kill()
    assert [launcher.returncode for launcher in launchers] == [0, 0], said
    lines = sorted(line for text in said for line in text.splitlines() if "sees" in line)
    assert [line[0] for line in lines] == ["0", "1"]
    assert lines[0][1:] == lines[1][1:]
    assert lines[0].endswith("[2.0, 2.0, 2.0]")
    assert all(address in lines[0] for address in machines.values())
