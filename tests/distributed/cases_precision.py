"""Run in the worker processes: 16 bits, offloaded parameters and two levels, all at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed.accelerator import get_accelerator

from tests.distributed import cases_compression, cases_resume
from tests.distributed.cases_levels import hosts


@contextmanager
def fp16_on_cpu() -> Iterator[None]:
    """DeepSpeed refuses fp16 on CPUs because it is slow there; torch computes it all the same."""
    accelerator = get_accelerator()
    accelerator.is_fp16_supported = lambda: True
    try:
        yield
    finally:
        del accelerator.is_fp16_supported


def poisoned(slots: list[int], *arguments: Any, **options: Any) -> dict[str, Any]:
    """As `cases_compression.poisoned`, on hosts with so many processes each."""
    with hosts(slots), fp16_on_cpu():
        return cases_compression.poisoned(*arguments, **options)


def train(slots: list[int], *arguments: Any, **options: Any) -> dict[str, Any]:
    """As `cases_resume.train`."""
    with hosts(slots), fp16_on_cpu():
        return cases_resume.train(*arguments, **options)


def save(slots: list[int], *arguments: Any, **options: Any) -> dict[str, Any]:
    """As `cases_resume.save`."""
    with hosts(slots), fp16_on_cpu():
        return cases_resume.save(*arguments, **options)


def resume(slots: list[int], *arguments: Any, **options: Any) -> dict[str, Any]:
    """As `cases_resume.resume`."""
    with hosts(slots), fp16_on_cpu():
        return cases_resume.resume(*arguments, **options)


def run(kind: str, section: dict[str, Any], steps: int, **options: Any) -> dict[str, Any]:
    """As `cases_compression.run`."""
    with fp16_on_cpu():
        return cases_compression.run(kind, section, steps, **options)
