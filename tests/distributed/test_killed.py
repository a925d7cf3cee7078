"""A killed or stopped process: the other ends in a stated time, and the run resumes to the bit."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.cases_killed import AT, trained
from tests.distributed.models import topk_section
from tests.distributed.pool import Pool, PoolError

SECTION = topk_section(topk={"density": 0.05})
STEPS = 6
WAIT_S = 20.0
"""Timeout of every process group in the run with a fault."""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("fault", "ends_s"),
    [("killed in mid-exchange", 10), ("killed in mid-save", 10), ("stopped", WAIT_S + 10)],
)
def test_all_end_in_time_and_go_on_from_the_last_save(
    world2: Any, tmp_path: Path, fault: str, ends_s: float
) -> None:
    smooth, checkpoint, notes = (tmp_path / name for name in ("smooth", "checkpoint", "notes"))
    for folder in (smooth, checkpoint, notes):
        folder.mkdir()
    expected = world2.run(trained, str(smooth), "", SECTION, STEPS)
    own, arguments = Pool(2), (str(checkpoint), str(notes), SECTION, STEPS)
    with contextlib.suppress(PoolError):
        own.run(trained, *arguments, fault, WAIT_S, timeout=240)
    own.stop()
    records = {path.stem: json.loads(path.read_text()) for path in notes.iterdir()}
    happened = records.pop("happened")
    (record,) = records.values()
    assert 0 < record["time_s"] - happened["time_s"] < ends_s
    for process, whole in zip(world2.run(trained, *arguments), expected, strict=True):
        began = process["began"]
        assert 0 <= AT - began <= 2
        assert process["losses"] == {s: x for s, x in whole["losses"].items() if s >= began}
        assert all(process[key] == whole[key] for key in ("weights", "state"))
