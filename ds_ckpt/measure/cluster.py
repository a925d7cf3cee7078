"""`--like "4 nodes x 8 A100, 100 Gbit/s, llama-7b"`: a link rate that makes this machine alike.

What decides how much compression helps is the ratio of the time the network needs to the time that
computing needs. On the named cluster, a micro-step of ZeRO-3 with block checkpointing:

    compute_s = 8 * parameters * tokens / (flop_per_s * share_of_peak)
        6 FLOP a parameter and token for forward and backward, 2 for the recompute
    bytes     = 3 * 2 * parameters * (W - 1) / W
        two gathers and one reduction in 16 bits, W devices in a ring in the order of the nodes: a
        node's link carries what one device sends
    network_s = 8 * bytes / rate

Here, a checkpointed step with the best dense exchange is measured on a link that is not shaped, and

    rate = 8 * link bytes / (compute_s here * network_s / compute_s there)

No overlap of computing and network is assumed on either side. The figures come from
`hardware.json`, or from a file of the same form that the user gives; the rate from the text, or
from a file of `ds-ckpt probe`, whose slowest pair counts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_ckpt.config import load_file
from ds_ckpt.errors import ConfigError, Problem
from ds_ckpt.hosts.probe import Links

HARDWARE = Path(__file__).with_name("hardware.json")
_FORM = re.compile(
    r"^(?P<nodes>\d+) nodes? x (?P<devices>\d+) (?P<accelerator>\S+), "
    r"(?P<rate>[\d.]+) ?(?P<unit>[GM])bit/s, (?P<model>\S+)$",
    re.IGNORECASE,
)
_EXAMPLE = "4 nodes x 8 A100, 100 Gbit/s, llama-7b"


@dataclass(frozen=True)
class Cluster:
    """A cluster that is not here, with a model on it; one micro-step."""

    text: str
    devices: int
    """In all."""
    rate_bit_per_s: float
    rate_source: str
    device: dict[str, Any]
    """`hardware.json`'s."""
    model: dict[str, Any]

    @property
    def compute_s(self) -> float:
        flop = 8 * self.model["parameters"] * self.model["tokens"]
        return float(flop / (self.device["flop_per_s"] * self.device["share_of_peak"]))

    @property
    def link_bytes(self) -> float:
        """That a node's link carries in each direction."""
        return 3 * 2 * float(self.model["parameters"]) * (self.devices - 1) / self.devices

    @property
    def network_s(self) -> float:
        return 8 * self.link_bytes / self.rate_bit_per_s

    @property
    def ratio(self) -> float:
        """Seconds of network a second of computing."""
        return self.network_s / self.compute_s


def cluster(text: str, *, hardware: Path | None = None, links: Path | None = None) -> Cluster:
    """The cluster that `text` names.

    Raises ConfigError with everything that is wrong with the text or the file.
    """
    match = _FORM.match(" ".join(text.split()))
    if match is None:
        why = "nodes, devices a node, their kind, the rate of a node's link and the model"
        raise _wrong(Problem("--like", text, f"it must say {why}", f'write "{_EXAMPLE}"'))
    path = hardware or HARDWARE
    known = load_file(path)
    problems = []
    if int(match["nodes"]) < 2:
        why = "one node has no link to another"
        problems.append(Problem("--like", match["nodes"] + " nodes", why, "name at least 2"))

    def entry(group: str, name: str, needed: tuple[str, ...]) -> dict[str, Any]:
        entries = {key.lower(): value for key, value in known.get(group, {}).items()}
        if name.lower() not in entries:
            why = f"{path.name} has {', '.join(known.get(group, {})) or 'none'}"
            remedy = f"name one of those, or give its figures: --hardware (copy {path.name})"
            problems.append(Problem("--like", f"{group[:-1]} {name}", why, remedy))
            return {}
        found: dict[str, Any] = entries[name.lower()]
        for figure in needed:
            value = found.get(figure)
            if not isinstance(value, (int, float)) or value <= 0:
                why = "the formulas need a number above 0 there"
                problems.append(Problem(f"{path}: {name}", f"no {figure}", why, "write it"))
        return found

    device = entry("accelerators", match["accelerator"], ("flop_per_s", "share_of_peak"))
    model = entry("models", match["model"], ("parameters", "tokens"))
    rate, source = float(match["rate"]) * (1e9 if match["unit"] in "gG" else 1e6), "as named"
    if links is not None:
        try:
            both = [
                (p.both_forward_bytes_per_s, p.both_backward_bytes_per_s)
                for p in Links.load(links).pairs
            ]
            rate = 8 * min(map(min, both))
            source = f"the slowest pair in {links.name}, both sending"
        except ValueError as error:
            remedy = "make it: ds-ckpt probe --output FILE"
            problems.append(Problem(str(links), "no links", str(error), remedy))
    if problems:
        raise _wrong(*problems)
    devices = int(match["nodes"]) * int(match["devices"])
    return Cluster(text, devices, rate, source, device, model)


def rate_mbit(named: Cluster, *, compute_s: float, link_bytes: float) -> float:
    """The rate here, Mbit/s, for the ratio there.

    Args:
        compute_s: of a checkpointed step here, recompute included.
        link_bytes: that a host's link carries in it.
    """
    return 8e-6 * link_bytes / (compute_s * named.ratio)


def account(named: Cluster, *, compute_s: float, link_bytes: float) -> list[str]:
    """How the rate comes about, in sentences for the report."""
    rate = rate_mbit(named, compute_s=compute_s, link_bytes=link_bytes)
    device, model = named.device, named.model
    sources = [v for one in (device, model) for k, v in one.items() if k.endswith("_source")]
    return [
        f"Like {named.text}: there a micro-step of {model['tokens']} tokens a device computes for "
        f"{named.compute_s:.2f} s (8 x {model['parameters']:.3g} parameters x {model['tokens']} "
        f"tokens / ({device['flop_per_s']:.3g} FLOP/s x {device['share_of_peak']:g})), and a "
        f"node's link of {named.rate_bit_per_s / 1e9:.3g} Gbit/s ({named.rate_source}) carries "
        f"{named.link_bytes / 1e9:.2f} GB in {named.network_s:.2f} s: {named.ratio:.2f} s of "
        "network a second of computing.",
        f"Here a checkpointed step with the best dense exchange computes for {compute_s:.3f} s and "
        f"sends {link_bytes / 1e6:.2f} MB over a host's link (measured, link not shaped). "
        f"{rate:.0f} Mbit/s give the same ratio.",
        f"Sources: {'; '.join(sources)}.",
    ]


def _wrong(*problems: Problem) -> ConfigError:
    return ConfigError(list(problems), headline="this names no cluster")
