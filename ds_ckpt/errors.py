"""Errors that a user can act on: location, observed value, reason, remedy. The plugin's logger.

`AssertionError` is reserved for broken invariants of our own.
"""

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

log = logging.getLogger("ds_ckpt")


@dataclass(frozen=True)
class Problem:
    """One mistake: JSON path (or option, parameter, symbol), observed value, reason, remedy."""

    where: str
    found: str
    why: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.where}: found {self.found}\n    why: {self.why}\n    fix: {self.remedy}"


class DsCkptError(Exception):
    """Base of every deliberate error of ds_ckpt. Carries all problems found at once."""

    headline = "ds_ckpt cannot continue"

    def __init__(
        self, problems: Problem | Sequence[Problem], *, headline: str | None = None
    ) -> None:
        self.problems = (problems,) if isinstance(problems, Problem) else tuple(problems)
        self.headline = headline or self.headline
        numbered = (f"  {i}. {problem}" for i, problem in enumerate(self.problems, 1))
        super().__init__("\n".join([self.headline, *numbered]))

    def __reduce__(self) -> tuple[Any, ...]:
        """Support pickling, so that another process can raise the error."""
        return functools.partial(type(self), headline=self.headline), (self.problems,)


class ConfigError(DsCkptError, ValueError):
    """The JSON configuration is wrong, or requests an unsupported combination."""

    headline = "the configuration cannot be used"


class ContractError(DsCkptError, ImportError):
    """The installed DeepSpeed lacks a symbol that a hook needs."""

    headline = "the installed DeepSpeed does not fit this ds_ckpt"


class UnsupportedError(DsCkptError, RuntimeError):
    """The model, engine or optimizer is not supported."""

    headline = "ds_ckpt does not support this engine"


class StateError(DsCkptError, RuntimeError):
    """Saved plugin state does not fit the run that loads it."""

    headline = "the saved compression state does not fit"


class RecomputeError(DsCkptError, RuntimeError):
    """A checkpointed block did not repeat its forward; the gradients would be wrong."""

    headline = "a recomputation differs from its forward"
