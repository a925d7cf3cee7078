"""A link rate that makes this machine like a cluster that is not here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ds_ckpt.errors import ConfigError
from ds_ckpt.lab.hosts.hardware import HARDWARE
from ds_ckpt.lab.hosts.probe import Links, Pair
from ds_ckpt.lab.measure.cluster import account, like, rate_mbit

TEXT = "4 nodes x 8 A100, 100 Gbit/s, llama-7b"


def test_the_ratio_is_that_of_the_named_cluster() -> None:
    named = like(TEXT)
    known = json.loads(HARDWARE.read_text())
    device, model = known["accelerators"]["A100 80 GB"], known["models"]["llama-7b"]
    flop = 8 * model["parameters"] * model["tokens"]
    compute_s = flop / (device["flop_per_s"] * device["share_of_peak"])
    link_bytes = 3 * 2 * model["parameters"] * 31 / 32
    assert named.compute_s == pytest.approx(compute_s)
    assert named.link_bytes == pytest.approx(link_bytes)
    assert named.ratio == pytest.approx(8 * link_bytes / 100e9 / compute_s)


def test_at_the_rate_found_the_network_takes_its_share_here() -> None:
    named = like(TEXT)
    rate = rate_mbit(named, compute_s=0.5, link_bytes=30e6)
    network_s = 8 * 30e6 / (rate * 1e6)
    assert network_s / 0.5 == pytest.approx(named.ratio)


def test_it_says_how_it_got_there() -> None:
    named = like(TEXT)
    words = " ".join(account(named, compute_s=0.5, link_bytes=30e6))
    for part in (TEXT, f"{named.ratio:.2f} s", "0.500 s", "30.00 MB", "arXiv 2104.04473"):
        assert part in words
    assert f"{rate_mbit(named, compute_s=0.5, link_bytes=30e6):.0f} Mbit/s" in words


@pytest.mark.parametrize(
    "text",
    ["2 nodes x 4 h100, 25 Gbit/s, llama-13b", " 2  node x 4 H100, 25000 Mbit/s, LLAMA-13B "],
)
def test_spelling_may_vary(text: str) -> None:
    named = like(text)
    assert (named.cluster.devices, named.cluster.rate.value) == (8, 25e9)
    assert named.model["parameters"] == 13e9


def test_figures_come_from_a_users_file(tmp_path: Path) -> None:
    known = json.loads(HARDWARE.read_text())
    known["accelerators"]["MI300X"] = {
        "flop_per_s": 1e15,
        "flop_per_s_source": "mine",
        "share_of_peak": 0.5,
        "share_of_peak_source": "mine",
    }
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(known))
    text = "2 nodes x 8 MI300X, 400 Gbit/s, llama-7b"
    assert like(text, hardware=path).cluster.device["flop_per_s"] == 1e15
    with pytest.raises(ConfigError, match=r"accelerator MI300X(.|\n)*--hardware"):
        like(text)


def test_the_rate_comes_from_a_probe(tmp_path: Path) -> None:
    pairs = (Pair("a", "b", 1e-5, 9e9, 9e9, 2e9, 3e9), Pair("a", "c", 1e-5, 9e9, 9e9, 4e9, 1e9))
    Links(("a", "b", "c"), pairs).save(tmp_path / "links.json")
    named = like(TEXT, links=tmp_path / "links.json")
    assert named.cluster.rate.value == 8e9
    assert "links.json" in account(named, compute_s=1.0, link_bytes=1e6)[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("many A100", "4 nodes x 8 A100"),
        ("4 nodes x 8 Z80, 1 Gbit/s, llama-7b", "Z80"),
        ("4 nodes x 8 A100, 1 Gbit/s, gpt-9", "gpt-9"),
        ("1 nodes x 8 A100, 1 Gbit/s, llama-7b", "at least 2"),
    ],
)
def test_what_names_no_cluster_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        like(text)


def test_every_figure_has_a_source() -> None:
    for group in json.loads(HARDWARE.read_text()).values():
        for entry in group.values():
            figures = [key for key in entry if not key.endswith("_source")]
            assert figures
            for key in figures:
                assert entry[f"{key}_source"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not JSON"),
        (
            '{"accelerators": {"A100 80 GB": {}}, "models": {"llama-7b": {"tokens": 4}}}',
            "no flop_per_s",
        ),
    ],
)
def test_a_file_of_figures_that_lacks_some_is_refused(
    tmp_path: Path, content: str, said: str
) -> None:
    path = tmp_path / "mine.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=said):
        like("4 nodes x 8 A100, 100 Gbit/s, llama-7b", hardware=path)
    with pytest.raises(ConfigError, match="ds-ckpt probe"):
        like("4 nodes x 8 A100, 100 Gbit/s, llama-7b", links=path)
    Links(("a", "b"), ()).save(path)
    with pytest.raises(ConfigError, match="no pairs"):
        like("4 nodes x 8 A100, 100 Gbit/s, llama-7b", links=path)
