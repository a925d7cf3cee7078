"""Run in the worker processes: a compressor from outside the package on real engines."""

from __future__ import annotations

from typing import Any

from tests import guide
from tests.distributed import cases_compression as cases
from tests.distributed.models import topk_section


def section(kind: str) -> dict[str, Any]:
    """The guide's, from its JSON; its rule is on embeddings, which `plain` has none of."""
    compression = guide.section()
    if kind == "plain":
        del compression["rules"]
    return topk_section(**compression)


def trained(steps: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """A run with the guide's compressor, and one that sends everything."""
    with guide.registered():
        ours = cases.run("llama", section("llama"), steps, lr=3e-3)
    return ours, cases.run("llama", {"compression": {"method": "dense"}}, steps, lr=3e-3)


def conservation(kind: str, steps: int, accumulation: int) -> dict[str, float]:
    """Law 3 with it."""
    with guide.registered():
        return cases.conservation(kind, section(kind), steps, accumulation)
