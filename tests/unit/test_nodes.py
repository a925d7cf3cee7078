"""Which processes share a host, from launchers' environments; odd layouts in words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_ckpt.exchange.hierarchy import Place, arrange, here


@given(st.integers(2, 5), st.integers(2, 5), st.randoms())
def test_equal_hosts_make_two_levels(hosts: int, local: int, random: object) -> None:
    places = [Place(f"h{host}", index) for host in range(hosts) for index in range(local)]
    random.shuffle(places)  # type: ignore[attr-defined]
    found = arrange(places)
    assert not isinstance(found, str)
    assert all(len(host) == local for host in found)
    assert sorted(p for host in found for p in host) == list(range(hosts * local))
    for host in found:
        assert list(host) == sorted(host)
        assert len({places[p].host for p in host}) == 1


@pytest.mark.parametrize(
    ("places", "word"),
    [
        ([Place("a", 0), Place("a", 1)], "share one node"),
        ([Place("a", 0), Place("b", 0), Place("c", 0)], "every node has one rank"),
        ([Place("a", 0), Place("a", 1), Place("b", 0)], "unequal numbers of ranks (1, 2)"),
        ([Place("a", 0), Place("a", 1), Place("a", 0), Place("a", 1)], "same local rank"),
    ],
)
def test_other_layouts_have_one_level_and_a_reason(places: list[Place], word: str) -> None:
    found = arrange(places)
    assert isinstance(found, str)
    assert word in found


def test_the_launchers_variables() -> None:
    deepspeed = here({"CROSS_RANK": "1", "LOCAL_RANK": "3"})
    assert deepspeed.host.endswith("/1")
    assert deepspeed.local == 3
    torchrun = here({"GROUP_RANK": "2", "LOCAL_RANK": "0"})
    assert torchrun.host.endswith("/2")
    assert here({"OMPI_COMM_WORLD_LOCAL_RANK": "5"}).local == 5
    assert here({}).local is None
