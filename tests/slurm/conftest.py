"""These tests start daemons as root, so they run only when asked for: `pytest -m slurm tests/slurm`."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster

HERE = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slurm: starts a SLURM on this machine; run by `make test-slurm`")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "slurm" in config.option.markexpr:
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="runs under `pytest -m slurm tests/slurm` only"))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A controller and two nodes, idle."""
    if os.geteuid() != 0 or shutil.which("slurmctld") is None:
        pytest.fail("needs root and `apt-get install slurm-wlm munge`")
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
