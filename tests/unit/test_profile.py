"""`ds-ckpt profile`: traced steps against real ones, findings, the report, and the command."""

from __future__ import annotations

import io
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner, Result

from ds_ckpt.activation.planning.trace import Work, survey
from ds_ckpt.cli import app
from ds_ckpt.config import parse
from ds_ckpt.errors import ConfigError, UnsupportedError
from ds_ckpt.lab.estimate.profile import (
    ComparedPolicy,
    Footprint,
    Options,
    Profile,
    Times,
    compared,
    footprints,
    make_profile,
)
from ds_ckpt.lab.estimate.profile_report import document, findings
from ds_ckpt.lab.report.document import Table
from ds_ckpt.lab.subject import Sizes, Subject, find_subject
from ds_ckpt.telemetry.memory import OUTSIDE
from ds_ckpt.telemetry.units import size
from ds_ckpt.zero3.resident import HOST_COPY
from tests import architectures
from tests.unit.estimate_models import WIDTH

CPU = torch.device("cpu")
MODELS = "tests.unit.estimate_models"
GOLDEN = Path(__file__).with_name("golden") / "profile.txt"
"""Write it again with REWRITE_GOLDEN=1."""


def _subject(kind: str, **options: object) -> Subject:
    def build(count: int) -> tuple[torch.nn.Module, object]:
        return architectures.build(kind, layers=2, **options), architectures.batch(kind)

    return Subject(kind, build)


# Traced steps.


@pytest.mark.parametrize("kind", ["llama", "bart", "t5", "vit", "mixtral"])
def test_real_tensors_hold_and_compute_the_same(kind: str) -> None:
    wanted = compared(("block", "selective"), None, None)
    fake = footprints(_subject(kind), 2, wanted, None)
    real = footprints(_subject(kind), 2, wanted, None, CPU)
    for one, other in zip(fake, real, strict=True):
        assert one.held_bytes == pytest.approx(other.held_bytes, rel=0.03)
        assert (one.step.flops, one.step.launches) == (other.step.flops, other.step.launches)
        assert sum(b.total_bytes for b in one.blocks) == one.held_bytes
        assert (one.fake, other.fake) == (True, False)


def test_the_peak_is_that_of_the_allocator() -> None:
    subject = find_subject("demo", Sizes(tokens=192))
    wanted = compared(("block", "mlp", "selective"), None, None)
    real = footprints(subject, 1, wanted, None, CPU, repeats=1)
    for fake, timed in zip(footprints(subject, 1, wanted, None), real, strict=True):
        # beyond the tensors, the allocator sees what operators take inside
        assert timed.real_peak_bytes is not None
        assert 0.97 * timed.real_peak_bytes <= fake.peak_bytes <= timed.real_peak_bytes
        assert timed.times is not None
        assert (timed.times.recompute_s > 0) == (timed.policy != "none")


def test_the_survey_of_a_budget_counts_the_same() -> None:
    (footprint,) = footprints(_subject("llama"), 2, compared((), None, None), None)
    found = survey(architectures.build("llama", layers=2), (), architectures.batch("llama"))
    assert found.saved_bytes == footprint.held_bytes
    assert found.flops == footprint.forward.flops
    held = [b.total_bytes for b in footprint.blocks if b.name != OUTSIDE]
    assert [b.saved_bytes for b in found.blocks] == held


@pytest.fixture(scope="module")
def plain() -> dict[str, Footprint]:
    subject = find_subject(f"{MODELS}:stack", Sizes())
    found = footprints(subject, 2, compared(("block",), ["Mixer"], None), ["Mixer"])
    return {f.policy: f for f in found}


def test_work_of_a_step_by_hand(plain: dict[str, Footprint]) -> None:
    none, block = plain["none"], plain["block"]
    # two products a block on 2 x 8 rows; the recompute ends before the second one's result
    product = 2 * 16 * WIDTH * 4 * WIDTH
    assert none.forward.flops == 4 * 2 * product
    assert none.recompute == Work()
    assert block.recompute.flops == 4 * product
    assert block.recompute.launches == 4 * 2  # addmm, gelu
    assert block.step.launches - none.step.launches == block.recompute.launches
    assert block.backward.flops == none.backward.flops == 4 * 4 * product


def test_bytes_belong_to_the_block_that_saves_them(plain: dict[str, Footprint]) -> None:
    rows = 2 * 8 * WIDTH * 4
    none = {b.name: b for b in plain["none"].blocks}
    assert list(none) == [*(f"layers.{i}" for i in range(4)), OUTSIDE]
    # the input, GELU's input and result; `square` keeps the last result
    assert none["layers.2"].total_bytes == rows + 2 * 4 * rows
    assert none[OUTSIDE].total_bytes == rows
    block = {b.name: b for b in plain["block"].blocks}
    assert block["layers.2"].parts["checkpointed"] == block["layers.2"].total_bytes == rows
    assert plain["none"].peak_in == "backward of layers.3"
    assert plain["block"].peak_bytes < plain["none"].peak_bytes


def test_parts_of_a_transformer_are_told_apart() -> None:
    none, kept = footprints(_subject("llama"), 2, compared(("attention",), None, None), None)
    first, second = none.blocks[0].parts, kept.blocks[0].parts
    assert min(first["attention"], first["mlp"], first["norm"]) > 0
    assert first["checkpointed"] == second["attention"] == 0
    assert second["mlp"] == first["mlp"]
    assert second["checkpointed"] > 0


# Budgets.


def test_auto_goes_on_with_the_least_plan_below_its_limit() -> None:
    subject = find_subject("demo", Sizes(tokens=64))
    section = {"policy": "auto", "budget_gib": 2**-16}
    with pytest.raises(UnsupportedError) as caught:
        footprints(subject, 1, compared((), None, section), None)
    needed = re.search(r"write at least ([\d.]+) GiB", str(caught.value))
    assert needed is not None
    assert "found 1.52588e-05 GiB" in str(caught.value)  # as it was written
    section["budget_gib"] = float(needed[1])  # planned for is less
    _, found = footprints(subject, 1, compared((), None, section), None)
    assert found.recompute.launches > 0


def test_a_budget_is_profiled_with_its_plan() -> None:
    subject = find_subject("demo", Sizes(tokens=64))
    (plain,) = footprints(subject, 1, compared((), None, None), None)
    section = {"policy": "budget", "budget_gib": 0.6 * plain.held_bytes / 2**30}
    for device in (None, CPU):
        _, planned = footprints(subject, 1, compared((), None, section), None, device)
        assert planned.recompute.launches > 0
        assert 0 < planned.held_bytes <= 0.6 * plain.held_bytes
    with pytest.raises(ConfigError, match="--limit-gib"):
        footprints(subject, 1, compared((), None, {"policy": "auto"}), None)


def test_a_budget_of_the_accelerator_leaves_room_for_the_states() -> None:
    subject = find_subject("demo", Sizes(tokens=64))
    (plain,) = footprints(subject, 1, compared((), None, None), None)
    section = {"policy": "budget", "budget_gib": 1.0, "budget_of": "accelerator"}
    wanted = compared((), None, section)
    assert footprints(subject, 1, wanted, None)[1].recompute.launches == 0
    full = 2**30 - int(0.8 * plain.peak_bytes)
    wanted = [replace(c, resident={"states": full}) for c in wanted]
    planned = footprints(subject, 1, wanted, None)[1]
    assert planned.recompute.launches > 0
    assert planned.peak_bytes <= 0.8 * plain.peak_bytes


# Findings and the report.


@pytest.fixture(scope="module")
def measured() -> Profile:
    """Two batches of the demo model."""
    return make_profile(
        Options(
            "demo",
            batches=(1, 2),
            sizes=Sizes(tokens=32),
            policies=("block", "attention", "selective"),
            world=4,
            hosts=2,
            limit_bytes=2**40,
        )
    )


def _timed(profile: Profile) -> Profile:
    times = {f.policy: Times("CPU", 1, 1.0, 2.0, 0.5) for f in profile.footprints}
    found = [replace(f, times=times[f.policy], real_peak_bytes=1) for f in profile.footprints]
    return replace(profile, footprints=tuple(found))


def test_the_report_is_as_on_record_and_no_cell_is_cut(measured: Profile) -> None:
    target = io.StringIO()
    full = document(_timed(measured))
    full.print(Console(file=target, width=80))
    text = "\n".join(line.rstrip() for line in target.getvalue().splitlines()) + "\n"
    if os.environ.get("REWRITE_GOLDEN"):
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text(text, encoding="utf-8")
    assert text == GOLDEN.read_text(encoding="utf-8")
    tables = [b for s in full.sections for b in s.blocks if isinstance(b, Table)]
    assert len(tables) == 5
    words = " ".join(text.split())
    for cell in (cell for table in tables for row in table.rows for cell in row[1:]):
        assert cell in words, cell


@pytest.mark.parametrize(
    ("changes", "found", "config"),
    [
        ({}, '"block" saves least', {"activation": {"policy": "block"}}),
        ({}, "full reduce bucket", None),
        ({}, "Under 1024 GiB the best is batch 2", {}),
        ({"limit_bytes": 1}, "Nothing fits into 0.0010 KiB", {}),
        ({"copy": 2**24}, "Without the host's copy", {"weights": {"resident": False}}),
        ({"room": -1, "modules": ("M",)}, "A budget", {"activation": {"modules": ["M"]}}),
        ({"room": -1}, "A budget recomputes", {"activation": {"budget_of": "accelerator"}}),
        ({"room": -1, "stage": 2}, "A budget", {"activation": {"budget_of": "activations"}}),
    ],
)
def test_findings_and_their_configuration(
    measured: Profile, changes: dict[str, Any], found: str, config: dict[str, Any] | None
) -> None:
    changes = dict(changes)
    copy, stage = changes.pop("copy", 0), changes.pop("stage", 3)
    least = min(map(measured.total_bytes, measured.footprints))
    if copy:
        changes["limit_bytes"] = least
    if "room" in changes:
        changes["limit_bytes"] = measured.total_bytes(measured.first) + changes.pop("room")
    states = replace(measured.states, host_copy_bytes=copy, zero_stage=stage)
    profile = replace(measured, states=states, **changes)
    (finding,) = [f for f in findings(profile) if found in f.text]
    for other in findings(profile):
        if other.config is not None:
            parse({"zero_optimization": {"stage": 3}, **other.config}, source=other.text)
    for section, keys in (config or {}).items():
        assert finding.config is not None
        assert keys.items() <= finding.config["ds_ckpt"][section].items()


def _step(policy: str, batch: int, peak: int, step_s: float | None) -> Footprint:
    work = Work(1, 10, 1)
    times = None if step_s is None else Times("CPU", 1, step_s / 2, step_s / 2, 0.0)
    return Footprint(
        policy, None, batch, 10, True, peak, (), peak, "forward", "a", work, work, work, times
    )


def test_the_best_batch_is_the_fastest_that_fits(measured: Profile) -> None:
    base = measured.states.resident_bytes
    steps = (
        _step("none", 1, 100, 1.0),
        _step("none", 4, 400, 2.0),
        _step("block", 4, 40, 3.0),
        _step("block", 8, 80, 5.0),
    )
    profile = replace(measured, footprints=steps, limit_bytes=base + 100)
    assert profile.best is steps[3]
    assert replace(profile, limit_bytes=base + 400).best is steps[1]
    assert replace(profile, limit_bytes=base + 10).best is None
    untimed = tuple(replace(s, times=None) for s in steps)
    assert replace(profile, footprints=untimed).best is untimed[3]
    assert replace(profile, footprints=untimed, limit_bytes=None).best is None


# The command.


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["profile", *arguments])


@pytest.fixture
def config_json(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    llama = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 80}
    shape = {"num_attention_heads": 2, "num_hidden_layers": 2, "max_position_embeddings": 64}
    path.write_text(json.dumps(llama | shape))
    return path


def test_a_configuration_file_and_json(config_json: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    result = _run(
        str(config_json),
        *("--fake", "--batches", "1,2", "--dtype", "bf16", "--limit-gib", "8"),
        *("--json", str(target), "--policies", "block"),
    )
    assert result.exit_code == 0, result.output
    profile = json.loads(target.read_text())
    assert (profile["class_name"], profile["dtype"]) == ("LlamaForCausalLM", "bfloat16")
    steps = [(f["policy"], f["batch"]) for f in profile["footprints"]]
    assert steps == [("none", 1), ("block", 1), ("none", 2), ("block", 2)]
    assert profile["footprints"][0]["tokens"] == 64
    assert profile["states"]["assumed"]
    assert all(f["times"] is None for f in profile["footprints"])
    assert any("--real" in text for text in profile["not_measured"])
    assert "<- best" in result.output


def test_a_directory_and_a_deepspeed_file(config_json: Path, tmp_path: Path) -> None:
    ds, target = tmp_path / "ds.json", tmp_path / "out.json"
    activation = {"policy": "every_n", "every_n": 2, "offload": True}
    file = {
        "bf16": {"enabled": True},
        "optimizer": {"type": "SGD"},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 1000},
        "ds_ckpt": {"activation": activation},
    }
    ds.write_text(json.dumps(file))
    result = _run(
        *(str(config_json.parent), "--config", str(ds), "--world", "4", "--fake"),
        *("--tokens", "16", "--json", str(target), "--policies", "block"),
    )
    assert result.exit_code == 0, result.output
    profile = json.loads(target.read_text())
    assert [f["policy"] for f in profile["footprints"]] == ["none", "configured", "block"]
    states = profile["states"]
    assert (states["world"], states["optimizer"], states["reduce_bucket_bytes"]) == (4, "SGD", 2000)
    held = {f["policy"]: f["held_bytes"] for f in profile["footprints"]}
    assert held["block"] < held["configured"] < held["none"]
    assert any(text.startswith("offload: ") for text in profile["not_measured"])
    ds.write_text("{}")
    result = _run(str(config_json), "--config", str(ds), "--fake", "--json", str(target))
    profile = json.loads(target.read_text())
    assert (profile["states"]["zero_stage"], profile["states"]["assumed"]) == (0, False)
    assert any("AdamW is assumed" in text for text in profile["not_measured"])


def test_resident_weights_on_hosts(config_json: Path, tmp_path: Path) -> None:
    ds, target = tmp_path / "ds.json", tmp_path / "out.json"
    zero: dict[str, Any] = {"stage": 3}

    def run(ours: dict[str, Any], *options: str) -> Result:
        settings = {"bf16": {"enabled": True}, "zero_optimization": zero, "ds_ckpt": ours}
        ds.write_text(json.dumps(settings))
        always = ("--fake", "--policies", "block", "--json", str(target), "--world", "8")
        return _run(str(config_json), "--config", str(ds), *always, *options)

    def profile(ours: dict[str, Any], *options: str) -> tuple[dict[str, Any], str]:
        result = run(ours, *options)
        assert result.exit_code == 0, result.output
        return json.loads(target.read_text())["states"], " ".join(result.output.split())

    resident, on_4 = {"weights": {"resident": True}}, ("--hosts", "4")
    kept, said = profile(resident, *on_4)
    half = kept["parameters_count"]  # of 2 bytes each; no parameter is padded
    assert kept["host_copy_bytes"] == half
    assert "One rank of 8 on 4 hosts" in said
    assert f"host's copy of the weights {size(half)}" in said
    without, said = profile({}, *on_4)
    assert without["host_copy_bytes"] == 0

    section = {"policy": "budget", "budget_gib": 0.001, "budget_of": "accelerator"}
    refused = run({**resident, "activation": section}, *on_4)
    assert refused.exit_code == 1
    assert f"without {HOST_COPY}" in " ".join(refused.stderr.split())


def test_a_function_and_real_steps(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    result = _run(
        *(f"{MODELS}:stack", "--real", "--repeats", "1", "--policies", "block"),
        *("--json", str(target)),
    )
    assert result.exit_code == 0, result.output
    profile = json.loads(target.read_text())
    first = profile["footprints"][0]
    assert first["times"]["forward_s"] > 0
    assert first["real_peak_bytes"] >= first["peak_bytes"]
    assert profile["modules"] == ["Mixer"]


def test_batches() -> None:
    result = _run("demo", "--batches", "2,4", "--tokens", "8", "--policies", "block")
    assert re.findall(r"^ none +(\d+) +\d", result.output, re.M) == ["2", "4"]
    fixed = _run(f"{MODELS}:fixed", "--batches", "1,2", "--policies", "block")
    assert fixed.exit_code == 0, fixed.output
    assert "takes no argument named batch" in " ".join(fixed.output.split())


def test_values_that_fake_tensors_lack_need_real_steps() -> None:
    result = _run(f"{MODELS}:needs_values", "--policies", "block")
    assert result.exit_code == 1
    assert "fake tensors hold none" in result.stderr
    assert "--real" in result.stderr
    real = _run(f"{MODELS}:needs_values", "--policies", "block", "--real", "--repeats", "1")
    assert real.exit_code == 0, real.output
    assert "real tensors" in real.output


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("", ["it is empty", '"demo"']),
        ("no.such.module:make", ["importing no.such.module fails"]),
        (f"{MODELS}:no_such", ["has no no_such", "callables there", "stack"]),
        (f"{MODELS}:NUMBER", ["NUMBER is a int"]),
        (f"{MODELS}:breaks_down", ["ZeroDivisionError: no model today"]),
        (f"{MODELS}:only_a_model", ["returned Stack", "return (model, batch)"]),
        (f"{MODELS}:nothing_to_train", ["no tensor in it needs a gradient"]),
        (f"{MODELS}:wrong_batch", ["the forward of Stack fails on its batch", "model(batch) run"]),
        ("missing/config.json", ["there is no such file"]),
        ("/", ["holds no config.json"]),
    ],
)
def test_a_model_that_is_none(model: str, words: list[str]) -> None:
    result = _run(model, "--fake")
    assert result.exit_code == 1
    for text in (*words, "found", "why:", "fix:"):
        assert text in result.stderr, result.stderr
    assert "Traceback" not in result.stderr


def test_a_name_that_no_hub_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    def missing(name: str) -> Any:
        raise OSError(f"{name} is not a local folder and is not a valid model identifier")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", missing)
    result = _run("nobody/no-such-model", "--fake")
    assert result.exit_code == 1
    assert "transformers finds no configuration" in result.stderr


def test_a_batch_that_is_too_big(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    monkeypatch.setattr("ds_ckpt.lab.estimate.profile.run_forward", exhausted)
    result = _run(f"{MODELS}:stack", "--real", "--batches", "3", "--policies", "block")
    assert result.exit_code == 1
    assert "--batches 3" in result.stderr
    assert "too big" in result.stderr
    assert "Tried to allocate" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--policies", "blocks"], 1, "no policy has this name"),
        (["--attention", "magic", "--fake"], 1, "magic"),
        (["--config", "no-such.json"], 1, "no-such.json"),
        (["--fake", "--world", "8", "--hosts", "3"], 1, "--hosts: found 3"),
        (["--batches", "1,x"], 2, "whole numbers"),
        (["--batches", "0"], 2, "at least one"),
        (["--dtype", "int8"], 2, ""),
    ],
)
def test_options_that_are_refused(arguments: list[str], code: int, words: str) -> None:
    result = _run("demo", *arguments)
    assert result.exit_code == code
    assert words in result.stderr
    assert ("fix:" in result.stderr) == (code == 1)


def test_files_that_are_refused(tmp_path: Path) -> None:
    config, ds = tmp_path / "config.json", tmp_path / "ds.json"
    config.write_text(json.dumps({"model_type": "gpt2", "n_embd": 16, "n_head": 2, "n_layer": 1}))
    result = _run(str(config), "--tokens", "2000", "--fake")
    assert result.exit_code == 1
    assert "1024 positions" in result.stderr
    ds.write_text('{"ds_ckpt": {"activation": {"polcy": "block"}}}')
    result = _run("demo", "--config", str(ds))
    assert result.exit_code == 1
    assert "$.ds_ckpt.activation.polcy" in result.stderr


def test_a_recompute_can_be_the_peak() -> None:
    class Wide(torch.nn.Module):
        """Its forward frees at once what a recompute must hold together."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(20):
                x = (x * self.weight).sin()
            return x

    subject = Subject("wide", lambda _: (torch.nn.Sequential(Wide(), Wide()), torch.randn(1000)))
    wanted = [ComparedPolicy("block", {"policy": "block", "modules": ["Wide"]})]
    (footprint,) = footprints(subject, 1, wanted, ["Wide"])
    assert footprint.peak_phase in ("recompute", "backward")
    assert footprint.peak_bytes > 20 * 4000
