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
from ds_ckpt.lab.hosts.probe import Links

HARDWARE = Path(__file__).with_name("hardware.json")
EXAMPLE = "4 nodes x 8 A100, 100 Gbit/s"
_SHAPE = re.compile(r"^([1-9][0-9]*) nodes? x ([1-9][0-9]*) (.+)$", re.IGNORECASE)
_NUMBER = r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
_RATE = re.compile(rf"^{_NUMBER} ?([GM])bit/s$", re.IGNORECASE)
_LATENCY = re.compile(rf"^{_NUMBER} ?(us|ms)$", re.IGNORECASE)
_SUFFIX = "_source"


@dataclass(frozen=True)
class Figure:
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

    def figures(self) -> Iterator[Figure]:
        """Yield the figures with their sources."""
        for key, value in self.values.items():
            if isinstance(value, (int, float)):
                yield Figure(f"{self.name}: {key}", value, str(self.values.get(key + _SUFFIX, "")))


@dataclass(frozen=True)
class Cluster:
    """Nodes of equally many devices.

    Attributes:
        text: the cluster's name.
        rate, latency: of a node's link, in bit/s and s.
    """

    text: str
    nodes: int
    local: int
    device: Entry
    rate: Figure
    latency: Figure

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

    def wrong(self, *problem: str) -> None:
        """Collect a problem."""
        self.problems.append(Problem(*problem))

    def entry(self, group: str, name: str, needed: tuple[str, ...] = ()) -> Entry:
        """Look up a name, also without the memory size at its end; problems are collected."""
        known = self.groups.get(group, {})
        found = next((n for n in known if _plain(n) == _plain(name)), None)
        longer = (n for n in known if re.fullmatch(_plain(name) + r"\d+gb", _plain(n)))
        found = found or next(longer, None)
        if found is None:
            why = f"{self.path.name} has {', '.join(known) or 'none'}"
            remedy = f"name one of those, or give its figures: --hardware (copy {self.path.name})"
            self.wrong(self.where, f"{group[:-1]} {name}", why, remedy)
            return Entry(name, dict.fromkeys(needed, 1.0))
        values = dict(known[found])
        for figure in needed:
            value = values.get(figure)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
                why = "the formulas need a number above 0 there"
                self.wrong(f"{self.path}: {found}", f"no {figure}", why, "write it")
                values[figure] = 1.0
        return Entry(found, values)

    def cluster(
        self, text: str, needed: tuple[str, ...], links: Path | None = None
    ) -> Cluster | None:
        """Parse a cluster's name; None, with a problem, if the form is wrong.

        Args:
            text: as in `EXAMPLE`.
            needed: figures of the accelerator.
            links: of `ds-ckpt probe`, in place of the text's rate and latency.
        """
        parts = [part.strip() for part in " ".join(text.split()).split(",")]
        shape, rate, latency, odd = _SHAPE.match(parts[0]), None, None, False
        for part in parts[1:]:
            if match := _RATE.match(part):
                rate = match
            elif match := _LATENCY.match(part):
                latency = match
            else:
                odd = True
        alone = shape is not None and int(shape[1]) == 1
        if shape is None or odd or (rate is None and links is None and not alone):
            why = "it must name nodes, devices per node, their kind and a link rate"
            self.wrong(self.where, text, why, f'write "{EXAMPLE}"')
            return None
        per_s = float(rate[1]) * (1e9 if rate[2] in "gG" else 1e6) if rate else math.inf
        network = self.groups.get("links", {}).get("between nodes", {})
        hop_s = float(network.get("latency_s", 0.0))
        hop = Figure("latency of a node's link", hop_s, str(network.get("latency_s_source", "")))
        if latency is not None:
            scale = 1e-6 if latency[2].lower() == "us" else 1e-3
            hop = Figure(hop.what, float(latency[1]) * scale, "named in the text")
        named = Figure("rate of a node's link", per_s, "named in the text")
        if links is not None:
            named, hop = self._probed(links, named, hop)
        if named.value <= 0:
            self.wrong(self.where, text, "a link of no rate carries nothing", f'write "{EXAMPLE}"')
        device = self.entry("accelerators", shape[3], needed)
        return Cluster(text, int(shape[1]), int(shape[2]), device, named, hop)

    def _probed(self, links: Path, rate: Figure, hop: Figure) -> tuple[Figure, Figure]:
        try:
            pairs = Links.load(links).pairs
        except ValueError as error:
            remedy = "make it: ds-ckpt probe --output FILE"
            self.wrong(str(links), "no links", str(error), remedy)
            return Figure(rate.what, 1.0, ""), hop
        slowest = min(min(p.both_forward_bytes_per_s, p.both_backward_bytes_per_s) for p in pairs)
        source = f"measured: the slowest pair in {links.name}, both sending"
        far = max(p.latency_s for p in pairs)
        away = f"measured: the farthest pair in {links.name}"
        return Figure(rate.what, 8 * slowest, source), Figure(hop.what, far, away)

    def done(self, headline: str = "this names no cluster") -> None:
        """Raise ConfigError with all collected problems."""
        if self.problems:
            raise ConfigError(self.problems, headline=headline)


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).lower()
