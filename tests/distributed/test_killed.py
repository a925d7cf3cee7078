"""A killed or stopped process: the other ends in a stated time, and the run resumes to the bit."""

import contextlib
import io
import json
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.distributed import models
from tests.distributed.models import topk_section
from tests.distributed.pool import Pool, PoolError
from tests.distributed.training import outcome, running

SECTION = topk_section(topk={"density": 0.05})
STEPS = 6
VICTIM = 1
AT = 3
"""The step in which it happens; saves come after every second one."""
WAIT_S = 20.0
"""Timeout of every process group in the run with a fault."""


def _trained(folder: Path, notes: Path, fault: str = "") -> dict[str, Any]:
    """Go on from the last save, if there is one, until all steps are done; losses by step.

    A rank that fails ends, as a user's script does, and writes time and cause into `notes`.
    """
    with running("llama", SECTION) as engine:
        for group in list(distributed_c10d._world.pg_map) if fault else []:
            distributed_c10d._set_pg_timeout(timedelta(seconds=WAIT_S), group)
        if (folder / "latest").exists():
            engine.load_checkpoint(str(folder))
        began, losses = int(engine.global_steps), {}
        try:
            for step in range(began, STEPS):
                if step == AT and fault and dist.get_rank() == VICTIM:
                    FAULTS[fault](notes)
                losses[step] = models.train(engine, "llama", 1, first=step)
                if step % 2:
                    engine.save_checkpoint(str(folder))
        except BaseException as error:
            message = "".join(traceback.format_exception_only(error)).strip()
            _note(notes, f"error_{dist.get_rank()}", message=message)
            os._exit(1)
        return {"began": began, "by step": losses, **outcome(engine, [])}


def _note(notes: Path, name: str, **more: Any) -> None:
    (notes / f"{name}.json").write_text(json.dumps({"time_s": time.time(), **more}))


def _end(notes: Path) -> None:
    _note(notes, "happened")
    os.kill(os.getpid(), signal.SIGKILL)


def _in_mid_exchange(notes: Path) -> None:
    """Kill a rank while a bucket is being exchanged."""
    import deepspeed.comm.comm as ds_comm

    all_to_all_single = ds_comm.cdb.all_to_all_single

    def begun(*args: Any, **kwargs: Any) -> Any:
        threading.Timer(0.01, _end, [notes]).start()
        return all_to_all_single(*args, **kwargs)

    ds_comm.cdb.all_to_all_single = begun


def _in_mid_save(notes: Path) -> None:
    """Half of the victim's optimizer file is written; residuals are, and `latest` is not."""
    save = torch.save

    def half(state: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        if "optim_states" not in str(path):
            return save(state, path, *args, **kwargs)
        save(state, whole := io.BytesIO())
        Path(path).write_bytes(whole.getvalue()[: whole.tell() // 2])
        return _end(notes)

    torch.save = half


def _stopped(notes: Path) -> None:
    """A process that does not come on, as on a host that swaps without end."""
    _note(notes, "happened")
    time.sleep(3600)


FAULTS: dict[str, Callable[[Path], None]] = {
    "killed in mid-exchange": _in_mid_exchange,
    "killed in mid-save": _in_mid_save,
    "stopped": _stopped,
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("fault", "ends_s"),
    [("killed in mid-exchange", 10), ("killed in mid-save", 10), ("stopped", WAIT_S + 10)],
)
def test_all_end_in_time_and_go_on_from_the_last_save(world2, tmp_path, fault, ends_s) -> None:
    smooth, checkpoint, notes = (tmp_path / name for name in ("smooth", "checkpoint", "notes"))
    for folder in (smooth, checkpoint, notes):
        folder.mkdir()
    expected = world2.run(_trained, smooth, notes)
    own = Pool(2)
    with contextlib.suppress(PoolError):
        own.run(_trained, checkpoint, notes, fault, timeout=240)
    own.stop()
    records = {path.stem: json.loads(path.read_text()) for path in notes.iterdir()}
    happened = records.pop("happened")
    (record,) = records.values()
    assert 0 < record["time_s"] - happened["time_s"] < ends_s
    for process, whole in zip(world2.run(_trained, checkpoint, notes), expected, strict=True):
        began = process["began"]
        assert 0 <= AT - began <= 2
        losses = {step: loss for step, loss in whole["by step"].items() if step >= began}
        assert process == {**whole, "began": began, "by step": losses}
