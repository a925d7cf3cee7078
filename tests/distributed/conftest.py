"""Worker pools for 2 and for 4 processes, shared by the whole session and started on first use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.pool import Pool

_PRELOAD = ("transformers.models.llama.modeling_llama", "transformers.trainer")


@pytest.fixture(scope="session")
def world2() -> Iterator[Pool]:
    """Two processes."""
    yield from _pool(2)


@pytest.fixture(scope="session")
def world4() -> Iterator[Pool]:
    """Four processes."""
    yield from _pool(4)


def _pool(world: int) -> Iterator[Pool]:
    pool = Pool(world, preload=_PRELOAD)
    try:
        yield pool
    finally:
        pool.stop()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/distributed/" in item.path.as_posix():
            item.add_marker(pytest.mark.distributed)
