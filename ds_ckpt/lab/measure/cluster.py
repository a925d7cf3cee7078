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

No overlap of computing and network is assumed on either side; `ds-ckpt plan` simulates it. What a
cluster is, and its hardware's figures, are in `hosts/cluster.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ds_ckpt.lab.hosts.hardware import Cluster, Entry, Hardware


@dataclass(frozen=True)
class Like:
    """A cluster that is not here, with a model on it; one micro-step."""

    cluster: Cluster
    model: Entry

    @property
    def compute_s(self) -> float:
        device = self.cluster.device
        flop = 8 * self.model["parameters"] * self.model["tokens"]
        return flop / (device["flop_per_s"] * device["share_of_peak"])

    @property
    def link_bytes(self) -> float:
        """That a node's link carries in each direction."""
        devices = self.cluster.devices
        return 3 * 2 * self.model["parameters"] * (devices - 1) / devices

    @property
    def network_s(self) -> float:
        return 8 * self.link_bytes / self.cluster.rate.value

    @property
    def ratio(self) -> float:
        """Seconds of network a second of computing."""
        return self.network_s / self.compute_s


def like(text: str, *, hardware: Path | None = None, links: Path | None = None) -> Like:
    """The cluster and model that `text` names.

    Raises ConfigError with everything that is wrong with the text or the file.
    """
    known = Hardware.load(hardware, "--like")
    found = known.cluster(text, ("flop_per_s", "share_of_peak"), links, more=1)
    if found is None:
        known.done()
        raise AssertionError
    if found.nodes < 2:
        why = "one node has no link to another"
        known.wrong("--like", f"{found.nodes} nodes", why, "name at least 2")
    model = known.entry("models", found.rest, ("parameters", "tokens"))
    known.done()
    return Like(found, model)


def rate_mbit(named: Like, *, compute_s: float, link_bytes: float) -> float:
    """The rate here, Mbit/s, for the ratio there.

    Args:
        compute_s: of a checkpointed step here, recompute included.
        link_bytes: that a host's link carries in it.
    """
    return 8e-6 * link_bytes / (compute_s * named.ratio)


def account(named: Like, *, compute_s: float, link_bytes: float) -> list[str]:
    """How the rate comes about, in sentences for the report."""
    rate = rate_mbit(named, compute_s=compute_s, link_bytes=link_bytes)
    cluster, model = named.cluster, named.model
    device, tokens = cluster.device, int(model["tokens"])
    used = {"flop_per_s", "share_of_peak", "parameters", "tokens"}
    figures = [*device.figures(), *model.figures()]
    sources = [f.source for f in figures if f.what.rpartition(": ")[2] in used]
    return [
        f"Like {cluster.text}: there a micro-step of {tokens} tokens a device computes for "
        f"{named.compute_s:.2f} s (8 x {model['parameters']:.3g} parameters x {tokens} "
        f"tokens / ({device['flop_per_s']:.3g} FLOP/s x {device['share_of_peak']:g})), and a "
        f"node's link of {cluster.rate.value / 1e9:.3g} Gbit/s ({cluster.rate.source}) carries "
        f"{named.link_bytes / 1e9:.2f} GB in {named.network_s:.2f} s: {named.ratio:.2f} s of "
        "network a second of computing.",
        f"Here a checkpointed step with the best dense exchange computes for {compute_s:.3f} s and "
        f"sends {link_bytes / 1e6:.2f} MB over a host's link (measured, link not shaped). "
        f"{rate:.0f} Mbit/s give the same ratio.",
        f"Sources: {'; '.join(sources)}.",
    ]
