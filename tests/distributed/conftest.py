"""Worker pools for 2 and for 4 processes, shared by the whole session and started on first use."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.distributed.pool import Pool, importer


def _pool(world: int) -> Any:
    @pytest.fixture(scope="session", name=f"world{world}")
    def pool() -> Iterator[Pool]:
        own = Pool(world)
        yield own
        own.stop()

    return pool


@pytest.fixture(scope="session", autouse=True)
def _importer() -> Iterator[None]:
    yield
    if importer.cache_info().currsize:
        importer().end()


world2, world4 = _pool(2), _pool(4)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/distributed/" in item.path.as_posix():
            item.add_marker(pytest.mark.distributed)
