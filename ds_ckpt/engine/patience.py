"""How long a process waits for one that has gone: as long as `init_distributed` was told.

torch gives every new group a default of its own, 30 minutes on gloo, whatever the program said when
it began. DeepSpeed's clone of the world, on which ZeRO-3 gathers and reduces, is such a group, and
so are the plugin's.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import distributed_c10d


def patience(group: Any = None) -> timedelta | None:
    """Of a group, by default the world; None where this torch or backend does not tell."""
    group = group or torch.distributed.group.WORLD
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if (found := getattr(options, "_timeout", None)) is not None:
            return timedelta(seconds=found.total_seconds())
    return None


class AsPatientAsTheWorld:
    """Groups that wait as long as the world does, until `undo()`."""

    def __init__(self, groups: Iterable[Any]) -> None:
        self._before: list[tuple[Any, timedelta]] = []
        if (wanted := patience()) is None:
            return
        for group in groups:
            before = patience(group)
            if before is not None and before != wanted:
                self._before.append((group, before))
                distributed_c10d._set_pg_timeout(wanted, group)

    def undo(self) -> None:
        before, self._before = self._before, []
        for group, was in before:
            if group in distributed_c10d._world.pg_map:  # ours have ended
                distributed_c10d._set_pg_timeout(was, group)
