"""Run in the worker processes: a compressor from outside the package on real engines."""

from __future__ import annotations

from typing import Any

from tests import guide
from tests.distributed import cases_compression as cases
from tests.distributed.models import topk_section


def section() -> dict[str, Any]:
    """The guide's, from its JSON."""
    return topk_section(**guide.section())


def trained(steps: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """A run with the guide's compressor, and one that sends everything."""
    with guide.registered():
        ours = cases.run("llama", section(), steps, lr=3e-3)
    return ours, cases.run("llama", {"compression": {"method": "dense"}}, steps, lr=3e-3)


def conservation(kind: str, steps: int, accumulation: int) -> dict[str, float]:
    """Law 3 with it."""
    with guide.registered():
        return cases.conservation(kind, section(), steps, accumulation)
