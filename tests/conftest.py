"""Fixtures that all tests share."""

from collections.abc import Callable, Iterator

import pytest
from ranks import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """`ranks(n)`: the session's pool of n gloo processes."""
    pools: dict[int, RankPool] = {}
    yield lambda world_size: pools.setdefault(world_size, RankPool(world_size))
    for pool in pools.values():
        pool.close()
