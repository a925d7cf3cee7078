"""Run in the worker processes: training that something outside ends, and what it goes on with."""

from __future__ import annotations

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

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import ds_ckpt
from tests.distributed import models
from tests.distributed.cases_resume import state_digest
from tests.distributed.pool import fresh

VICTIM = 1
AT = 3
"""The step in which it happens; saves come after every second one."""


def trained(
    folder: str, notes: str, section: dict[str, Any], steps: int, fault: str = "", wait_s: float = 0
) -> dict[str, Any]:
    """Go on from the last save, if there is one, until `steps` are done; losses by step.

    A rank that fails ends, as a user's script does, and writes time and cause into `notes`.

    Args:
        fault: of `FAULTS`, in step `AT`.
        wait_s: timeout of every process group.
    """
    fresh()
    engine = models.start("llama", models.zero3_config(ds_ckpt=section))
    for group in list(distributed_c10d._world.pg_map) if wait_s else []:
        distributed_c10d._set_pg_timeout(timedelta(seconds=wait_s), group)
    if (Path(folder) / "latest").exists():
        engine.load_checkpoint(folder)
    began, losses = int(engine.global_steps), {}
    try:
        for step in range(began, steps):
            if step == AT and fault:
                FAULTS[fault](engine, Path(notes))
            losses[step] = models.train(engine, "llama", 1, first=step)
            if step % 2:
                engine.save_checkpoint(folder)
    except BaseException as error:
        message = "".join(traceback.format_exception_only(error)).strip()
        _note(Path(notes), f"error_{dist.get_rank()}", message=message)
        os._exit(1)
    session = ds_ckpt.session_of(engine)
    result = {
        "began": began,
        "losses": losses,
        "weights": models.weights_digest(engine),
        "state": state_digest(session),
    }
    engine.destroy()
    return result


def _note(notes: Path, name: str, **more: Any) -> None:
    (notes / f"{name}.json").write_text(json.dumps({"time_s": time.time(), **more}))


def _end(notes: Path) -> None:
    _note(notes, "happened")
    os.kill(os.getpid(), signal.SIGKILL)


def _in_mid_exchange(engine: Any, notes: Path) -> None:
    """With a bucket half on its way."""
    import deepspeed.comm.comm as ds_comm

    if dist.get_rank() != VICTIM:
        return
    all_to_all_single = ds_comm.cdb.all_to_all_single

    def begun(*args: Any, **kwargs: Any) -> Any:
        threading.Timer(0.01, _end, [notes]).start()
        return all_to_all_single(*args, **kwargs)

    ds_comm.cdb.all_to_all_single = begun


def _in_mid_save(engine: Any, notes: Path) -> None:
    """Half of the victim's optimizer file is written; residuals are, and `latest` is not."""
    save = torch.save

    def half(state: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        if "optim_states" not in str(path):
            return save(state, path, *args, **kwargs)
        save(state, whole := io.BytesIO())
        Path(path).write_bytes(whole.getvalue()[: whole.tell() // 2])
        return _end(notes)

    if dist.get_rank() == VICTIM:
        torch.save = half


def _stopped(engine: Any, notes: Path) -> None:
    """A process that does not come on, as on a host that swaps without end."""
    if dist.get_rank() == VICTIM:
        _note(notes, "happened")
        time.sleep(3600)


FAULTS: dict[str, Callable[[Any, Path], None]] = {
    "killed in mid-exchange": _in_mid_exchange,
    "killed in mid-save": _in_mid_save,
    "stopped": _stopped,
}
