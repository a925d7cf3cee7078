"""A run of `ds-ckpt measure`: progress, log, continuation, refused options, the demo's preset."""

import itertools
import json
import re
import shutil
import subprocess
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import ds_ckpt
from ds_ckpt.cli import app
from ds_ckpt.cli.measure_arguments import model_of, sections_of
from ds_ckpt.config import parse
from ds_ckpt.errors import ConfigError, Problem, StateError, UnsupportedError
from ds_ckpt.lab.hosts import emulated
from ds_ckpt.lab.hosts.launcher import HostError
from ds_ckpt.lab.measure import trials, worker
from ds_ckpt.lab.measure.samples import Memory, Store
from ds_ckpt.lab.measure.spec import (
    AXES,
    METHODS,
    Configuration,
    Spec,
    check_spec,
    deepspeed_config,
)
from ds_ckpt.lab.measure.worker import Worker, build_model, slowest
from tests.unit import measure_samples as known


def test_a_run_goes_on_only_with_its_settings_versions_and_machines(tmp_path, monkeypatch) -> None:
    """Jobs list what is missing; the first launch measures one trial and fails."""
    launched: list[dict[str, Any]] = []
    folder, backend, spec = tmp_path / "run", MagicMock(), Spec(methods=("4bit",), repetitions=1)
    backend.describe.return_value = "hosts"

    def launch(_backend: Any, _module: str, job: dict[str, Any], *_: Any, **options: Any) -> None:
        launched.append(job)
        options["on_event"]({"words": "1 of 8 trials", "done": 1, "total": 8})
        name, repetition = job["trials"][0]
        Store(folder).append(known.trial(spec, name, 200.0, repetition, 0.0))
        raise HostError(Problem("b", "no answer", "it has vanished", "look"))

    monkeypatch.setattr(trials, "check_hosts", lambda backend: None)
    monkeypatch.setattr(trials, "launch", launch)

    def begin(**changes: Any) -> None:
        trials.measure(
            Spec(**{"methods": ("4bit",), "repetitions": 1, **changes}),
            folder,
            backend,
            console=Console(quiet=True),
            stall_s=9.0,
            budget_s=9.0,
        )

    for _ in range(2):
        with pytest.raises(HostError):
            begin()
    with trials._reserved(folder), pytest.raises(ConfigError, match="another command measures"):
        begin()
    with pytest.raises(HostError):
        begin(repetitions=2)
    assert [len(job["trials"]) for job in launched] == [8, 7, 14]
    backend.set_rate.assert_called_with(200.0)
    for changes in ({"repetitions": 1}, {"repetitions": 2, "batch": 3}):
        with pytest.raises(ConfigError, match="other settings"):
            begin(**changes)
    with monkeypatch.context() as patch:
        patch.setattr("ds_ckpt.lab.workload.versions", lambda: {"torch": "0.1"})
        with pytest.raises(ConfigError, match=r"0\.1"):
            begin(repetitions=2)
    backend.describe.return_value = "other hosts"
    with pytest.raises(ConfigError, match="other hosts"):
        begin(repetitions=2)
    assert len(trials.read_runs(folder)) == 3


def test_a_complete_run_needs_no_launch() -> None:
    spec = replace(known.SPEC, rates=(100.0, 50.0), repetitions=2)
    jobs = trials.jobs(spec, set())
    assert [job["rate"] for job in jobs] == [100.0, 50.0]
    assert [job["memory"] for job in jobs] == [["none", "block"], []]
    first, second = jobs[0]["trials"][:8], jobs[0]["trials"][8:]
    beside = [name for name, _ in first]
    assert beside[2:6] == ["none/dense", "block/dense", "none/4bit", "block/4bit"]
    assert [name for name, _ in second] == [name for name, _ in [*first[1:], first[0]]]
    done = {sample.key for sample in known.samples(spec)}
    assert trials.jobs(spec, done) == []
    done.remove(("trial", "block/4bit", 50.0, 1))
    (job,) = trials.jobs(spec, done)
    assert (job["rate"], job["trials"]) == (50.0, [("block/4bit", 1)])


def test_progress_is_a_line_per_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    """Each has the time left, also the one before the first trial."""
    show = trials._printer(Console(width=100), 40)
    for done in range(41):
        show({"words": f"{done} of 40 steps", "done": done, "total": 40})
        show({})
    show({"words": "done"})
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert lines[:2] == ["starting the ranks, about 73 s left", "0 of 40 steps, about 48 s left"]
    assert lines[2].startswith("4 of 40 steps")
    assert lines[-1] == "done"
    assert len(lines) == 13
    trials._printer(Console(width=100), 40, least=10, until=time.time() + 0.5)
    assert capsys.readouterr().out == "  starting the ranks, about 37 s left\n"


@pytest.mark.parametrize("step_s", [0.5, 1.2, 2.4])
def test_the_time_left_does_not_jump(step_s: float) -> None:
    """It comes to the truth from what steps often take; the first ones take twice as long."""
    took_s = [step_s * (done + min(done, 7)) for done in range(101)]
    left_s = [trials.seconds_left(done, took_s[done], 100 - done) for done in range(101)]
    assert left_s[0] == pytest.approx(120)
    assert left_s[50] == pytest.approx(took_s[100] - took_s[50], rel=0.35)
    assert max(after - before for before, after in itertools.pairwise(left_s)) < 42
    for budget_s in (1.0, 20.0):  # it does not end the ten that are needed
        found = trials.seconds_left(50, took_s[50], 50, needed=10, budget_s=budget_s)
        assert found == pytest.approx(max(budget_s, left_s[50] / 5))


def test_a_time_limit_leaves_four_repetitions(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(worker, "EngineRun", MagicMock())
    monkeypatch.setattr(worker.dist, "broadcast_object_list", lambda *_, **__: None)
    monkeypatch.setattr(Worker, "_measure_trial", measured := MagicMock())
    spec = Spec(repetitions=7, warm_up=0)
    (job,) = trials.jobs(spec, {("memory", policy) for policy in spec.policies})
    Worker(spec, MagicMock(folder=tmp_path)).run({**job, "until": 0.0})
    assert max(call.args[-1] for call in measured.call_args_list) == 3


def test_the_set_up_prints_the_time_left_from_its_first_line(tmp_path: Path) -> None:
    """Stand-ins take the place of Python, of which each part takes 12 s, and of a second."""
    (scripts := tmp_path / "scripts").mkdir()
    shutil.copy(Path(ds_ckpt.__file__).parents[1] / "scripts" / "_setup.sh", scripts)
    for name in ("pyproject.toml", "constraints.txt", "Python.h"):
        (tmp_path / name).touch()
    python = r"""case "$*" in *sysconfig*) echo "$HOME" ;; *venv\ --*|*install*|*compileall*)
      case "$*" in *--clear*) mkdir -p "$4/bin"; cp "$0" "$4/bin/python" ;; esac
      : >"$HOME/slept"; for ((i = 0; i < 999; i++)); do
        [ "$(wc -c <"$HOME/slept")" -le 11 ] || break; /bin/sleep 0.01; done ;;
      *build_shm_op*) exit 1 ;; esac"""
    for name, text in (("python3", python), ("sleep", 'printf x >>"$HOME/slept"'), ("c++", "")):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    command = f"export HOME={tmp_path} PATH={tmp_path}:/usr/bin:/bin; after_s=100"
    command = ["bash", "-c", f"{command}; source {scripts}/_setup.sh"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, "compiling failed" in done.stderr) == (1, True), done
    found = re.findall(r"setup: (.{6}).*, about (\d+) s left in all\n", done.stdout)
    steps, left_s = [step for step, _ in found], [int(seconds) for _, seconds in found]
    assert len(steps) == done.stdout.count("\n")
    assert left_s == sorted(left_s, reverse=True)
    assert (left_s[0], len(set(steps))) == (280, 4)
    assert min(Counter(steps).values()) > 1, steps


@pytest.mark.parametrize("on_hosts", [True, False])
def test_the_demo_is_a_preset(on_hosts, tmp_path, monkeypatch) -> None:
    specs: list[Spec] = []

    def measured(spec: Spec, *_: object, **__: object) -> None:
        specs.append(spec)
        raise HostError(Problem("b", "no answer", "it has vanished", "look"))

    monkeypatch.setattr(trials, "measure", measured)
    monkeypatch.setattr(
        emulated, "emulation_obstacles", lambda: [] if on_hosts else ["no namespaces"]
    )
    monkeypatch.setattr(emulated, "EmulatedHosts", lambda *_, **__: nullcontext())
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["measure", "--demo"])
    (spec,) = specs
    assert result.output.startswith("No emulated nodes: no namespaces.") == (not on_hosts)
    names = ["none/stock", "none/dense", *(f"block/{m}" for m in ("dense", *spec.methods))]
    assert [one.name for one in spec.configurations] == names + ["block/3bit/whole"] * on_hosts
    assert spec.compared[0].method == "3bit"
    assert (spec.where, spec.processes) == ("emulated" if on_hosts else "loopback", 2)
    CliRunner().invoke(app, ["measure", "--demo", "--baselines=zero1", "--methods=4bit"])
    assert specs[1].methods == ("4bit",)
    assert "none/stock/zero1" in [one.name for one in specs[1].configurations]
    CliRunner().invoke(app, ["measure", "--demo", "--model=llama-1b"])
    assert (specs.pop(2).model, len(specs)) == ("llama-1b", 2)
    CliRunner().invoke(app, ["measure"])
    assert specs[2].methods == Spec().methods == ("topk", "powersgd", "3bit")
    assert not specs[2].demo


def test_configurations_are_the_product_of_the_axes() -> None:
    methods = ("stock", "dense", "4bit", "no_comm")
    assert [one.name for one in Spec(methods=("4bit",)).configurations] == [
        f"{policy}/{method}" for policy in ("none", "block") for method in methods
    ]
    weights = ("stock", "whole")
    spec = Spec(policies=("none",), methods=("4bit",), weights=weights, baselines=("zero1",))
    names = [f"none/{method}{where}" for where in ("", "/whole") for method in methods]
    assert [one.name for one in spec.configurations] == [*names, "none/stock/zero1"]
    assert [Configuration.of(one.name) for one in spec.configurations] == spec.configurations


def test_every_configuration_is_a_valid_file() -> None:
    baselines = ("hpz", "zero2", "zero1")
    more: dict[str, Any] = {"baselines": baselines, "slots": 2, "bf16": True, "accumulation": 4}
    policies, weights = tuple(AXES["activation"]), ("whole", "lossless")
    spec = Spec(policies=policies, methods=tuple(METHODS), weights=weights, **more)
    check_spec(spec)
    zeros = {}
    for one in spec.configurations:
        config = deepspeed_config(spec, one, parameters=1000)
        zero = config["zero_optimization"]
        zeros[one.weights] = (zero["stage"], zero.get("zero_hpz_partition_size"))
        if one.weights in baselines:
            continue
        plugin = parse(json.loads(json.dumps(config)), source=one.name)
        assert plugin.activation.active == (one.policy != "none")
        assert plugin.weights.resident == (one.weights != "stock")
        if plugin.weights.resident:
            assert plugin.weights.deltas == {"whole": "none"}.get(one.weights, "lossless")
        assert zero["reduce_bucket_size"] == 125
        if one.method in ("stock", "no_comm"):
            assert plugin.compression.method == "none"
        else:
            assert plugin.compression.exchange.when == "accumulation_boundary"
        if one.method not in ("stock", "dense", "no_comm"):
            assert plugin.compression.warmup_steps == 0
            assert not plugin.compression.exchange.autotune
    three = dict.fromkeys(("stock", "whole", "lossless"), (3, None))
    assert zeros == {**three, "hpz": (3, 2), "zero2": (2, None), "zero1": (1, None)}


@pytest.mark.parametrize("when", ["micro_step", "accumulation_boundary"])
def test_a_users_section_is_used(when: str) -> None:
    section: dict[str, Any] = {"method": "quantize", "exchange": {"when": when}}
    if when == "accumulation_boundary":  # the default of several micro-steps
        section = {"method": "dense", "rules": [{"match": "*", "method": "quantize"}]}
    spec = Spec(methods=("mine",), sections={"compression/mine": section}, accumulation=2)
    check_spec(spec)
    config = deepspeed_config(spec, Configuration("none", "mine"), parameters=10)
    added = {"exchange": {"when": when, "autotune": False}, "warmup_steps": 0}
    assert config["ds_ckpt"]["compression"] == {**section, **added}
    parse(json.loads(json.dumps(config)))


LOOPBACK: dict[str, Any] = {"where": "loopback", "hosts": 1, "slots": 2, "rates": (None,)}


@pytest.mark.parametrize(
    ("settings", "problems"),
    [
        (
            {"where": "loopback", "hosts": 1, "policies": ("block", "x"), "methods": ("zip",)},
            ["--policies", "--methods", "--policies", "--rates", "--hosts, --slots"],
        ),
        (
            {"weights": ("lossless", "half"), "baselines": ("hpz", "zero4")},
            ["--weights", "--baselines", "--weights", "--baselines"],
        ),
        ({**LOOPBACK, "weights": ("whole",)}, ["--weights"]),
        ({**LOOPBACK, "weights": ("stock",), "baselines": ("zero2",)}, []),
        ({"policies": ("none", "none")}, ["--policies"]),
        ({"model": "llama-7b", "shape": {"layers": 3}}, ["--model, --shape"]),
        ({"model": "mine:make"}, ["--model, --shape"]),
    ],
)
def test_settings_that_cannot_work_are_refused_together(settings, problems) -> None:
    if not problems:
        check_spec(Spec(**settings))
        return
    with pytest.raises(ConfigError) as caught:
        check_spec(Spec(**settings))
    assert [problem.where for problem in caught.value.problems] == problems


def _file(folder: Path, name: str, **plugin: Any) -> str:
    path = folder / name
    zero = {"zero_optimization": {"stage": 3}}
    content = {"train_micro_batch_size_per_gpu": 1, **zero, "ds_ckpt": plugin}
    path.write_text(json.dumps(content), encoding="utf-8")
    return str(path)


def test_one_file_may_have_policy_method_and_weights(tmp_path: Path) -> None:
    plugin = {"activation": {"policy": "mlp"}, "compression": {"method": "quantize"}}
    plugin |= {"weights": {"resident": True}}
    both = _file(tmp_path, "both.json", **plugin)
    names, sections = sections_of(
        activation=f"none,{both}", compression=both, weights=f"whole,{both}"
    )
    assert sections == {f"{axis}/both": section for axis, section in plugin.items()}
    spec = Spec(policies=names["activation"], methods=names["compression"], sections=sections)
    check_spec(spec)
    assert Configuration("both", "both") in spec.configurations


@pytest.mark.parametrize(
    ("axis", "name", "plugin", "found"),
    [
        ("activation", "none", {"activation": {"policy": "block"}}, "is a name already"),
        ("weights", "zero2", {"weights": {"resident": True}}, "is a name already"),
        ("compression", "x", {"activation": {"policy": "block"}}, "no ds_ckpt.compression"),
        ("activation", "x", {}, "no ds_ckpt.activation"),
    ],
)
def test_a_file_that_would_be_silently_another_configuration_is_refused(
    tmp_path: Path, axis: str, name: str, plugin: dict[str, Any], found: str
) -> None:
    with pytest.raises(ConfigError, match=found):
        sections_of(**{axis: _file(tmp_path, f"{name}.json", **plugin)})


def test_a_users_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32}
    shape |= {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    (tmp_path / "config.json").write_text(json.dumps({**shape, "vocab_size": 256}))
    monkeypatch.chdir(tmp_path)
    named = model_of("config.json")
    assert named == str(tmp_path / "config.json")
    model, again = (build_model(Spec(model=named, tokens=8)) for _ in range(2))
    assert type(model).__name__ == "LlamaForCausalLM"
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert one.dtype == torch.float32
        assert torch.equal(one, other)
    with pytest.raises(UnsupportedError, match="no_such"):
        model_of("no_such/config.json")


def test_records_come_back_and_a_half_written_one_is_measured_again(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.read() == []
    samples = known.samples()
    assert len({one.key for one in samples}) == len(samples)
    store.append(*samples)
    whole = store.path.read_bytes()
    store.path.write_bytes(whole[:-20])
    assert store.read() == samples[:-1]
    store.truncate_partial()
    store.append(samples[-1])
    assert store.path.read_bytes() == whole
    first = Memory(policy="new", peak_bytes=2)
    second = first.model_copy(update={"peak_bytes": 3})
    store.append(first, second)
    assert store.read() == [*samples, second]  # of equal keys the last counts
    store.path.write_text('{"kind": "trial"}\n')
    with pytest.raises(StateError, match="line 1"):
        store.read()


def test_each_step_is_that_of_the_slowest_process() -> None:
    fast, slow = known.step("none/stock", 400.0), known.step("none/stock", 100.0)
    assert slowest([[fast, slow, fast], [slow, fast, fast]]) == (slow, slow, fast)
