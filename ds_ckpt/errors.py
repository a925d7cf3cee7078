"""Errors that a user can act on: what was found, where, why it is wrong, what to write instead.

Only messages live here. `AssertionError` is kept for broken invariants of our own.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Problem:
    """One mistake: the four things that an error must say."""

    where: str
    """JSON path (`$.ds_ckpt.compression.method`), parameter name or DeepSpeed symbol."""
    found: str
    why: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.where}: found {self.found}\n    why: {self.why}\n    fix: {self.remedy}"


class DsCkptError(Exception):
    """Base of every error that ds_ckpt raises on purpose. Carries all problems found at once."""

    headline = "ds_ckpt cannot go on"

    def __init__(
        self, problems: Problem | Sequence[Problem], *, headline: str | None = None
    ) -> None:
        self.problems: tuple[Problem, ...] = (
            (problems,) if isinstance(problems, Problem) else tuple(problems)
        )
        self.headline = headline or self.headline
        lines = [self.headline]
        lines += [f"  {i}. {p}" for i, p in enumerate(self.problems, 1)]
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[Any, ...]:
        """So that it can be raised in another process, too."""
        return functools.partial(type(self), headline=self.headline), (self.problems,)


class ConfigError(DsCkptError, ValueError):
    """The JSON configuration is wrong, or asks for a combination that cannot be served."""

    headline = "the configuration cannot be used"


class ContractError(DsCkptError, ImportError):
    """The installed DeepSpeed no longer has what a hook leans on."""

    headline = "the installed DeepSpeed does not fit this ds_ckpt"


class UnsupportedError(DsCkptError, RuntimeError):
    """The model, engine or optimizer is one that the plugin cannot serve."""

    headline = "ds_ckpt cannot serve this engine"


class StateError(DsCkptError, RuntimeError):
    """Saved compression state does not fit the run that loads it."""

    headline = "the saved compression state does not fit"


class RecomputeError(DsCkptError, RuntimeError):
    """A checkpointed block did not repeat its forward; the gradients would be wrong."""

    headline = "a recompute differs from its forward"
