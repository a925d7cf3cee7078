"""When to plan anew: pure decisions on what every process has seen. The same input, the same word.

Above `high` of the capacity more is recomputed at once. Below `low` for `patience` steps in a row
less is, but not within `rest` steps of the last change. Between the two nothing happens: a plan
aims at `target`, in the middle. Where room turns out to have been none (more is recomputed within
`rest` steps of recomputing less), `rest` doubles: changes become rare and do not go to and fro.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Word = Literal["more", "less"]


@dataclass
class Watch:
    """Looks at memory between steps.

    Attributes:
        capacity_bytes: what there is.
        correction: what is planned for is this share of `target`: below 1 where more was in use
            than had been planned (fragmentation, a loss outside of the model).
    """

    capacity_bytes: int
    high: float = 0.95
    low: float = 0.75
    target: float = 0.9
    patience: int = 3
    rest: int = 5
    correction: float = 1.0
    _quiet: int = field(default=0, repr=False)
    _changed: int | None = field(default=None, repr=False)
    _last: Word | None = field(default=None, repr=False)

    @property
    def budget_bytes(self) -> int:
        """What to plan for."""
        return int(self.capacity_bytes * self.target * self.correction)

    def look(self, step: int, used_bytes: float) -> Word | None:
        """What this step's memory asks for.

        Args:
            used_bytes: the most of all processes.
        """
        share = used_bytes / self.capacity_bytes
        self._quiet = self._quiet + 1 if share < self.low else 0
        if share > self.high:
            return "more"
        rested = self._changed is None or step - self._changed >= self.rest
        return "less" if rested and self._quiet >= self.patience else None

    def changed(self, step: int, word: Word) -> None:
        """The plan has become another one."""
        soon = self._changed is not None and step - self._changed <= self.rest
        if word == "more" and self._last == "less" and soon:
            self.rest *= 2
        self._changed, self._last, self._quiet = step, word, 0

    def unchanged(self, step: int, word: Word) -> bool:
        """Planning has led to the same plan; whether to plan once more, with less to plan for."""
        self._quiet = 0
        if word == "more":
            self.correction *= self.target
            return True
        self._changed = step  # asked again after a rest only
        self.correction = 1.0
        return False
