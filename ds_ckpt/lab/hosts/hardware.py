"""A cluster by name: `4 nodes x 8 A100 80 GB, 100 Gbit/s`, with its hardware's figures.

The figures come from `hardware.json`, or from the user's file of the same form. `FIGURE_source`
names each figure's source: it begins with "guess" or "measured", or is a data sheet or paper. The
link rate comes from the text, or from the slowest pair in a file of `ds-ckpt probe`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_ckpt.config import load_file
from ds_ckpt.errors import ConfigError, Problem
from ds_ckpt.lab.hosts import probe

HARDWARE = Path(__file__).with_name("hardware.json")
EXAMPLE = "4 nodes x 8 A100 80 GB, 100 Gbit/s"
_NUMBER = r"(\d+(?:\.\d*)?|\.\d+)"
_NODES = r"(?i:([1-9]\d*) (?:node|host)s? x ([1-9]\d*) ([^,]+))"
_RATE = rf"(?i:{_NUMBER} ?([GM])(?-i:b)(?:it/s|ps|/s))"
_LATENCY = rf"(?i:{_NUMBER} ?([um])s)"
_CLUSTER = re.compile(f"{_NODES}(?:, ?{_RATE})?(?:, ?{_LATENCY})?")
_UNITS = {"g": 1e9, "m": 1e6}, {"u": 1e-6, "m": 1e-3}


@dataclass(frozen=True)
class Constant:
    """A number of the hardware, with its source."""

    what: str
    value: float
    source: str

    @property
    def kind(self) -> str:
        """Kind of source."""
        first = self.source.partition(" ")[0].rstrip(":").lower()
        return first if first in ("measured", "guess", "named") else "data sheet"


@dataclass(frozen=True)
class Entry:
    """One accelerator, link or model of the file: its figures by name."""

    name: str
    values: Mapping[str, Any]

    def __getitem__(self, figure: str) -> float:
        return float(self.values[figure])

    def figures(self) -> Iterator[Constant]:
        """Yield the figures with their sources."""
        for key, value in self.values.items():
            if isinstance(value, (int, float)):
                yield Constant(
                    f"{self.name}: {key}", value, str(self.values.get(f"{key}_source", ""))
                )


@dataclass(frozen=True)
class Cluster:
    """Nodes of equally many devices; rate and latency of a node's link are in bit/s and s."""

    text: str
    nodes: int
    local: int
    device: Entry
    rate: Constant
    latency: Constant

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.nodes * self.local


@dataclass
class Hardware:
    """A file of figures, with the problems found in lookups. `where` names the option."""

    path: Path
    where: str
    groups: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    @classmethod
    def load(cls, path: Path | None, where: str) -> Hardware:
        """Read the file; ConfigError if it is not strict JSON."""
        return cls(path or HARDWARE, where, load_file(path or HARDWARE))

    def add(self, *problem: str) -> None:
        """Collect a problem."""
        self.problems.append(Problem(*problem))

    def entry(self, group: str, name: str, needed: tuple[str, ...] = ()) -> Entry:
        """Look up a name, also without the memory size at its end; problems are collected."""
        known, plain = self.groups.get(group, {}), _plain(name)
        found = [n for n in known if re.fullmatch(rf"(rtx)?{re.escape(plain)}(\d+gb)?", _plain(n))]
        values = dict(known[found[0]]) if found else {}
        name = found[0] if found else name
        if absent := [n for n in needed if not _is_positive(values.get(n))]:
            why = f"{self.path.name} has {', '.join(known)}, and each needs numbers above 0"
            remedy = f"name one of those, or give its figures: --hardware (copy {self.path.name})"
            self.add(self.where, f"{group} {name}: no {', '.join(absent)}", why, remedy)
        return Entry(name, {**dict.fromkeys(absent, 1.0), **values} if absent else values)

    def cluster(
        self, text: str, needed: tuple[str, ...], links: Path | None = None
    ) -> Cluster | None:
        """Parse a cluster's name like `EXAMPLE`; None, with a problem, if the form is wrong.

        `links` is a file of `ds-ckpt probe`, in place of the text's rate and latency.
        """
        found = _CLUSTER.fullmatch(" ".join(text.split()))
        if found is None or not (found[4] or links or found[1] == "1"):
            known = re.compile(f"{_NODES}|{_RATE}|{_LATENCY}")
            parts = re.split(", ?", " ".join(text.split()))
            unread = [part for part in parts if not known.fullmatch(part)]
            why = "it must name nodes, devices per node, their kind and a link rate"
            self.add(self.where, (unread or [text])[0], why, f'write "{EXAMPLE}"')
            return None
        nodes, local, name, rate, rate_unit, latency, latency_unit = found.groups()
        per_s = float(rate) * _UNITS[0][rate_unit.lower()] if rate else math.inf
        if per_s == 0:
            self.add(self.where, text, "a link of no rate carries nothing", f'write "{EXAMPLE}"')
        far = Constant("rate of a node's link", per_s, "named in the text")
        network = self.groups.get("links", {}).get("between nodes", {})
        hop_s, source = network.get("latency_s", 0.0), network.get("latency_s_source", "")
        if latency:
            hop_s, source = float(latency) * _UNITS[1][latency_unit.lower()], "named in the text"
        hop = Constant("latency of a node's link", hop_s, source)
        if links is not None:
            try:
                pairs = probe.load(links)
            except ValueError as error:
                remedy = "make it: ds-ckpt probe --hostfile HOSTFILE --output FILE"
                self.add(str(links), "no links", str(error), remedy)
            else:
                source = f"measured: the slowest pair in {links.name}"
                far = Constant(far.what, 8 * min(p.bytes_per_s for p in pairs), source)
                hop = Constant(hop.what, max(p.latency_s for p in pairs), source)
        device = self.entry("accelerators", name.strip(), needed)
        return Cluster(text, int(nodes), int(local), device, far, hop)

    def raise_problems(self) -> None:
        """Raise ConfigError with all collected problems."""
        if self.problems:
            raise ConfigError(self.problems, headline="this names no cluster")


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).lower()


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
