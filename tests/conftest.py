"""Fixtures that all tests share."""

from collections.abc import Callable, Iterator

import fsspec
import pytest
from ranks import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """`ranks(n)`: the session's pool of n gloo processes."""
    pools: dict[int, RankPool] = {}
    yield lambda world_size: pools.setdefault(world_size, RankPool(world_size))
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="session")
def bucket() -> Iterator[str]:
    """A bucket on moto's server, on loopback."""
    monkeypatch = pytest.MonkeyPatch()
    server_module = pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir("runs")
    yield "s3://runs"
    server.stop()
    monkeypatch.undo()
