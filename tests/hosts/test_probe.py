"""The link probe over Open MPI between emulated hosts."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from ds_ckpt.errors import UnsupportedError
from ds_ckpt.lab.hosts import probe
from ds_ckpt.lab.hosts.backends import Hostfile, Prepared
from ds_ckpt.lab.hosts.emulated import EmulatedHosts
from ds_ckpt.lab.hosts.launcher import LaunchError
from ds_ckpt.lab.hosts.probe import Links, Pair

SET_BYTES_PER_S = 200e6 / 8
PAYLOAD = 1448 / 1514
"""Of a full Ethernet frame with TCP's time stamps."""


def _one_way(pair: Pair) -> tuple[float, float]:
    return pair.forward_bytes_per_s, pair.backward_bytes_per_s


@pytest.mark.timeout(300)
def test_the_rate_that_was_set_is_found_within_5_percent(two_hosts: EmulatedHosts) -> None:
    """The best of a few tries: other work on the machine slows a stream, nothing speeds it."""
    one_way, both = [0.0, 0.0], [0.0, 0.0]
    for _ in range(6):
        said = list[str]()
        links = probe.probe(two_hosts, on_pair=said.append)
        assert said == ["measuring host0 - host1"]
        assert links.hosts == ("host0", "host1")
        (pair,) = links.pairs
        assert 0 < pair.latency_s < 0.1
        one_way = list(map(max, one_way, _one_way(pair)))
        at_once = pair.both_forward_bytes_per_s, pair.both_backward_bytes_per_s
        both = list(map(max, both, at_once))
        assert max(*one_way, *both) < 1.05 * SET_BYTES_PER_S * PAYLOAD
        if min(one_way) > 0.95 * SET_BYTES_PER_S and min(both) > 0.85 * SET_BYTES_PER_S:
            return
    pytest.fail(f"far from the rate that was set: one way {one_way}, both ways {both}")


@pytest.mark.timeout(120)
def test_every_pair_is_measured_and_the_command_writes_json(
    can_emulate: None, tmp_path: Path
) -> None:
    out = tmp_path / "links.json"
    command = [sys.executable, "-m", "ds_ckpt.cli", "probe", "--hosts=3", "--rate=50mbit"]
    result = subprocess.run(
        [*command, "--seconds=0.3", f"--output={out}"], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    links = Links.load(out)
    found = [(pair.first, pair.second) for pair in links.pairs]
    assert found == [("host0", "host1"), ("host0", "host2"), ("host1", "host2")]
    for pair in links.pairs:
        assert f"{pair.first} - {pair.second}: " in result.stdout
        assert 0 < max(_one_way(pair)) < 1.1 * 50e6 / 8


def test_what_mpirun_says_is_in_the_error(
    two_hosts: EmulatedHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = two_hosts.prepare

    def too_many(argv: Sequence[str], folder: Path) -> Prepared:
        return prepare([argv[0], "-n", "3", *argv[3:]], folder)

    monkeypatch.setattr(two_hosts, "prepare", too_many)
    with pytest.raises(LaunchError, match="did not finish") as caught:
        probe.probe(two_hosts)
    assert "ppr:1:node" in str(caught.value)


def test_each_pair_is_told_as_it_begins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of what the launched processes say only that, and no half of a line."""
    hosts, links = tmp_path / "hosts", tmp_path / "links.json"
    hosts.write_text("a slots=1\nb slots=1\n")
    Links(("a", "b"), (Pair("a", "b", 1e-5, 1.0, 2.0, 3.0, 4.0),)).save(links)
    script = "echo measuring a - b; echo MPI warns; printf 'measuring a'; sleep 0.5; echo ' - c'"

    def prepare(_: Hostfile, argv: Sequence[str], folder: Path) -> Prepared:
        out = argv[-1].removeprefix("--out=")
        return Prepared(["sh", "-c", f"{script}; cp {links} {out}"], dict(os.environ))

    find = importlib.util.find_spec
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *of: name == "mpi4py" or find(name, *of)
    )
    monkeypatch.setattr(Hostfile, "prepare", prepare)
    said = list[str]()
    assert probe.probe(Hostfile(hosts), on_pair=said.append).hosts == ("a", "b")
    assert said == ["measuring a - b", "measuring a - c"]


def test_what_is_missing_is_said_in_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("one slots=2\n# two slots=2\n")
    with pytest.raises(UnsupportedError, match="found 1 hosts"):
        probe.probe(Hostfile(hostfile))
    hostfile.write_text("one slots=2\ntwo slots=2\n")
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match="openmpi-bin") as caught:
        probe.probe(Hostfile(hostfile))
    assert "ds_ckpt[mpi]" in str(caught.value)


def test_a_file_that_is_none_of_the_probe_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    path.write_text("[]")
    with pytest.raises(ValueError, match="does not have the format"):
        Links.load(path)
    links = Links(("a", "b"), (Pair("a", "b", 1e-5, 1.0, 2.0, 3.0, 4.0),))
    links.save(path)
    assert Links.load(path) == links
