"""PowerSGD's memory: the factor that a tensor's next approximation starts from.

Transactional as `feedback` is: `rollback` leaves every committed factor bit-equal. Equal on all
processes that exchange, because it comes out of their all-reduce.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch import Tensor

Side = Literal["left", "right"]
SIDES: tuple[Side, ...] = ("left", "right")


class Factors:
    """By parameter name the factor that was sent last, and which of the two it is."""

    def __init__(self) -> None:
        self._committed: dict[str, tuple[Side, Tensor]] = {}
        self._pending: dict[str, tuple[Side, Tensor]] = {}

    def get(self, name: str) -> tuple[Side, Tensor] | None:
        """Side and fp32 [rows or columns, rank], of this step if it sent one already."""
        return self._pending.get(name) or self._committed.get(name)

    def put(self, name: str, side: Side, factor: Tensor) -> None:
        """The summed factor that this step sent; `factor` is kept, not copied."""
        self._pending[name] = (side, factor)

    def commit(self) -> None:
        """The step was taken."""
        self._committed.update(self._pending)
        self._pending.clear()

    def rollback(self) -> None:
        """The step was skipped."""
        self._pending.clear()

    def state_dict(self) -> dict[str, Tensor]:
        """Committed factors as `left:name` or `right:name`."""
        return {f"{side}:{name}": factor for name, (side, factor) in self._committed.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace every factor by a copy; a step under way is forgotten.

        Raises:
            ValueError: a key without `left:` or `right:`.
        """
        loaded: dict[str, tuple[Side, Tensor]] = {}
        for key, factor in state.items():
            side, _, name = key.partition(":")
            if side not in SIDES:
                raise ValueError(f"{key!r} is not the key of a factor")
            loaded[name] = (side, factor.detach().clone())
        self._committed = loaded
        self._pending.clear()

    @property
    def nbytes(self) -> int:
        """Memory that is held."""
        held = [*self._committed.values(), *self._pending.values()]
        return sum(factor.numel() * factor.element_size() for _, factor in held)
