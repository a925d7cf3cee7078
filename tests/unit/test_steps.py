"""The step log: means over the logged steps, one line each, a file per rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ds_ckpt.telemetry import Counters, Purpose, steps
from ds_ckpt.telemetry.steps import Event, ExchangeSample, StepLog


@pytest.mark.parametrize("name", ["exp.v1.jsonl", "exp.v1"])
def test_a_record_is_the_mean_over_its_steps(tmp_path: Path, name: str) -> None:
    counters = Counters()
    log = StepLog(counters, every_n_steps=2, path=str(tmp_path / "new" / name), rank=3)
    for step in range(1, 6):
        with counters.purpose(Purpose.REDUCE):
            counters.sent(100 * step)
        counters.gathers.update([7, 7, 8, 8])
        log.step_ended(step)
    lines = (tmp_path / "new" / "exp.v1.3.jsonl").read_text().splitlines()
    first, second = map(json.loads, lines)
    assert (first["step"], first["steps"]) == (2, 2)
    assert first["sent_bytes"]["reduce"] == 150
    assert second["sent_bytes"]["reduce"] == 350
    assert first["gathers_a_parameter"] == 2
    assert first["sent_bytes"]["other"] == 0
    assert first["step_time_s"] > 0
    assert log.last is not None
    assert log.last["step"] == 4


def test_a_file_that_cannot_be_written_ends_no_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    log = StepLog(Counters(), every_n_steps=1, path=str(tmp_path / "file" / "log"), rank=0)
    log.step_ended(1)
    log.step_ended(2)
    assert log.last is not None
    assert log.last["step"] == 2
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "telemetry is no longer written" in caplog.text


def test_an_exchange_adds_its_times_and_its_errors(tmp_path: Path) -> None:
    energies, logged = {"PowerSGD rank 4": (4.0, 1.0)}, list[Event]()
    norms, step = [None, 4.0, None], 0
    log = StepLog(
        Counters(),
        every_n_steps=3,
        path=str(tmp_path / "t.jsonl"),
        rank=0,
        sample=lambda: ExchangeSample({"wire": 0.5 * step}, energies, norms.pop(), True),
        monitor=logged.extend,
    )
    for step in range(1, 7):
        log.step_ended(step)
    first, second = map(json.loads, (tmp_path / "t.0.jsonl").read_text().splitlines())
    for record in (first, second):
        assert record["exchange_s"] == {"wire": 0.5}
        assert record["compression_error"] == {"PowerSGD rank 4": 0.5}
        assert record["compresses"] is True
    assert first["residual_norm"] == {"PowerSGD rank 4": 0.25}  # 1.0 of 4.0
    assert second["residual_norm"] == {}
    events = {name: (value, step) for name, value, step in logged}
    assert events["ds_ckpt/compression_error/PowerSGD rank 4"] == (0.5, 6)
    assert events["ds_ckpt/compresses"] == (1.0, 6)
    assert "ds_ckpt/sent_bytes/reduce" in events


def test_a_field_is_one_registered_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "FIELDS", dict(steps.FIELDS))

    @steps.step_field
    def gathers_per_step(interval: steps.Interval) -> float:
        return sum(interval.counted.gathers.values()) / interval.steps

    logged: list[Event] = []
    counters, path = Counters(), tmp_path / "t.jsonl"
    log = StepLog(counters, every_n_steps=2, path=str(path), rank=0, monitor=logged.extend)
    for step in (1, 2):
        counters.gathers[7] += 3
        log.step_ended(step)
    assert json.loads((tmp_path / "t.0.jsonl").read_text())["gathers_per_step"] == 3
    assert ("ds_ckpt/gathers_per_step", 3.0, 2) in logged
