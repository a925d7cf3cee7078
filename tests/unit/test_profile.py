"""`ds-ckpt profile`: fake steps compared with real ones, findings, the report, and the command."""

import io
import itertools
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.profiler import ProfilerActivity
from typer.testing import CliRunner, Result

from ds_ckpt.activation import CheckpointedBlocks
from ds_ckpt.activation.planning.budget import AUTO_SHARE
from ds_ckpt.activation.planning.fake import Forward
from ds_ckpt.activation.planning.trace import StepTrace, Work, gradients_dropped, survey
from ds_ckpt.cli import app
from ds_ckpt.config import parse
from ds_ckpt.lab.estimate import profile as profiling
from ds_ckpt.lab.estimate.profile_report import findings, profile_document
from ds_ckpt.lab.subject import Sizes, Subject, find_subject, run_forward
from ds_ckpt.telemetry.memory import OUTSIDE
from ds_ckpt.telemetry.units import size
from tests import architectures
from tests.unit.estimate_models import WIDTH

MODELS = "tests.unit.estimate_models"


def _subject(kind: str, **options: object) -> Subject:
    def build(count: int) -> tuple[torch.nn.Module, object]:
        return architectures.build(kind, layers=2, **options), architectures.batch(kind)

    return Subject(kind, build)


@pytest.mark.parametrize("kind", ["llama", "bart", "t5", "vit", "mixtral"])
@pytest.mark.sampled(2)
def test_real_tensors_hold_and_compute_the_same(kind: str) -> None:
    subject, wanted = _subject(kind), profiling.compared(("block", "selective"), None, None)
    model, batch = subject.build(2)
    for fake in profiling.footprints(subject, 2, wanted, None):
        units = profiling.units_of(fake.policy, wanted[fake.policy], model)
        real = StepTrace(model, profiling.blocks_of(model, None)[0])
        real.run(lambda: run_forward(model, batch), units)
        assert fake.held_bytes == pytest.approx(real.saved.bytes, rel=0.03)
        total = sum(real.work.values(), Work())
        assert (fake.step.flops, fake.step.launches) == (total.flops, total.launches)
        assert sum(sum(parts.values()) for parts in fake.blocks.values()) == fake.held_bytes


def test_the_peak_is_that_of_the_allocator() -> None:
    subject = find_subject("demo", Sizes(tokens=192))
    wanted = profiling.compared(("block", "mlp", "selective"), None, None)
    model, batch = subject.build(1)
    for fake in profiling.footprints(subject, 1, wanted, None):
        units = profiling.units_of(fake.policy, wanted[fake.policy], model)
        put = None if units is None else CheckpointedBlocks(model, units=units)
        seen = torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        with gradients_dropped(model), seen:
            run_forward(model, batch).backward()
        if put is not None:
            put.remove()
        events = seen.profiler.kineto_results.events()
        changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
        real = max(itertools.accumulate(nbytes for _, nbytes in changes))
        # beyond the tensors, the allocator sees what operators take inside
        assert 0.97 * real <= fake.peak_bytes <= real


def test_the_survey_of_a_budget_counts_the_same() -> None:
    (one,) = profiling.footprints(_subject("llama"), 2, profiling.compared((), None, None), None)
    found = survey(
        Forward(architectures.build("llama", layers=2), (), architectures.batch("llama"))
    )
    assert found.saved_bytes == one.held_bytes
    held = [sum(parts.values()) for name, parts in one.blocks.items() if name != OUTSIDE]
    assert [b.saved_bytes for b in found.blocks] == held


def test_work_and_bytes_of_a_step_by_hand() -> None:
    subject = find_subject(f"{MODELS}:stack", Sizes())
    none, block = profiling.footprints(
        subject, 2, profiling.compared(("block",), ["Mixer"], None), ["Mixer"]
    )
    # two products a block on 2 x 8 rows; the recompute ends before the second one's result
    product = 2 * 16 * WIDTH * 4 * WIDTH
    assert none.forward.flops == 4 * 2 * product
    assert none.recompute == Work()
    assert block.recompute.flops == 4 * product
    assert block.recompute.launches == 4 * 2  # addmm, gelu
    assert block.step.launches - none.step.launches == block.recompute.launches
    assert block.backward.flops == none.backward.flops == 4 * 4 * product
    rows = 2 * 8 * WIDTH * 4
    assert list(none.blocks) == [*(f"layers.{i}" for i in range(4)), OUTSIDE]
    # the input, GELU's input and result; `square` keeps the last result
    assert sum(none.blocks["layers.2"].values()) == rows + 2 * 4 * rows
    assert sum(none.blocks[OUTSIDE].values()) == rows
    assert sum(block.blocks["layers.2"].values()) == rows
    assert block.peak_bytes < none.peak_bytes


def test_settings_behind_a_colon_and_bytes_in_host_memory() -> None:
    subject = find_subject(f"{MODELS}:stack", Sizes())
    names = ("segments:2", "segments:sqrt", "every_n:4", "offload")
    wanted = profiling.compared(names, ["Mixer"], None)
    assert wanted["segments:sqrt"]["segment_size"] == "sqrt"  # type: ignore[index]
    wanted["offload"] = {**wanted["offload"], "offload_min_bytes": 0}  # type: ignore[dict-item]
    none, two, root, fourth, offload = profiling.footprints(subject, 2, wanted, ["Mixer"])
    assert two.recompute == root.recompute  # both are two of two blocks
    assert fourth.held_bytes > two.held_bytes
    block = sum(none.blocks["layers.2"].values())
    assert offload.host_bytes == 3 * block
    rows = 2 * 8 * WIDTH * 4  # the batch, which its owner keeps
    assert offload.held_bytes == none.held_bytes - 3 * block + rows
    assert offload.step.flops == none.step.flops
    assert offload.step.launches == none.step.launches
    # in backward the tensors of two of four blocks, as in the forward
    assert offload.peak_bytes == none.peak_bytes - 2 * block + rows


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
    wanted = {"block": {"policy": "block", "modules": ["Wide"]}}
    (footprint,) = profiling.footprints(subject, 1, wanted, ["Wide"])
    assert footprint.peak_bytes > 20 * 4000


@pytest.fixture(scope="module")
def measured() -> profiling.Profile:
    options = profiling.Options("demo", batches=(1, 2), world=4, hosts=2, limit_bytes=2**40)
    policies = ("block", "attention", "selective")
    return profiling.make_profile(replace(options, sizes=Sizes(tokens=32), policies=policies))


def test_the_report_is_as_on_record(measured, is_golden) -> None:
    target = io.StringIO()
    profile_document(measured).print(Console(file=target, width=80))
    text = "\n".join(line.rstrip() for line in target.getvalue().splitlines()) + "\n"
    assert is_golden("profile.txt", text)


@pytest.mark.parametrize(
    ("limit", "found"),
    [
        (2**40, "full reduce bucket"),
        (2**40, "In 922 GiB, 90% of the memory, the largest batch is 2"),
        (2, "of the memory, nothing fits: the least is 1.9"),
    ],
)
def test_findings_and_their_configuration(measured, limit, found) -> None:
    profile = replace(measured, limit_bytes=limit)
    (config,) = [config for text, config in findings(profile) if found in text]
    parse({"zero_optimization": {"stage": 3}, **config}, source=found)


def test_the_best_is_the_largest_batch_that_fits(measured: profiling.Profile) -> None:
    def step(policy: str, batch: int, peak: int) -> profiling.Footprint:
        work = [Work(1, 10 * batch + (policy == "block"), 1)] * 3
        return profiling.Footprint(policy, None, batch, 10, peak, {}, peak, *work)

    steps = (step("none", 1, 100), step("none", 4, 400), step("block", 4, 40), step("block", 8, 80))
    base = measured.states.resident_bytes

    def best(more: int, count: int = 4) -> Any:
        limit_bytes = math.ceil((base + more) / AUTO_SHARE)
        return replace(measured, footprints=steps[:count], limit_bytes=limit_bytes).best

    assert [best(100), best(400, 3), best(10)] == [steps[3], steps[1], None]
    assert replace(measured, limit_bytes=None).best is None


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["profile", *arguments])


@pytest.fixture
def config_json(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    llama = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 80}
    shape = {"num_attention_heads": 2, "num_hidden_layers": 2, "max_position_embeddings": 64}
    path.write_text(json.dumps(llama | shape))
    return path


def test_a_directory_and_a_deepspeed_file(config_json: Path, tmp_path: Path) -> None:
    ds, target = tmp_path / "ds.json", tmp_path / "out.json"
    activation = {"policy": "every_n", "every_n": 2, "offload": True}
    file = {"bf16": {"enabled": True}, "optimizer": {"type": "SGD"}}
    file |= {"zero_optimization": {"stage": 3, "reduce_bucket_size": 1000}}
    file |= {"ds_ckpt": {"activation": activation}, "train_micro_batch_size_per_gpu": 2}
    ds.write_text(json.dumps(file))
    result = _run(
        *(str(config_json.parent), "--config", str(ds), "--world", "4", "--batches", "1,2"),
        *("--json", str(target), "--policies", "block", "--limit-gib", "8"),
    )
    assert result.exit_code == 0, result.output
    assert " best " in result.output
    profile = json.loads(target.read_text())
    assert (profile["class_name"], profile["dtype"]) == ("LlamaForCausalLM", "bfloat16")
    steps = [(f["policy"], f["batch"]) for f in profile["footprints"]]
    assert steps == [(name, n) for n in (1, 2) for name in ("none", "configured", "block")]
    assert profile["footprints"][0]["tokens"] == 64
    states = profile["states"]
    assert (states["world"], states["optimizer"], states["reduce_bucket_bytes"]) == (4, "SGD", 2000)
    none, configured, block = (f["held_bytes"] for f in profile["footprints"][:3])
    assert block < configured < none
    assert profile["footprints"][1]["host_bytes"] == 0, "one input, the last, stays"
    result = _run(str(config_json.parent), "--config", str(ds), "--policies", "none")
    assert "batch 2 of 64 tokens" in " ".join(result.output.split())


def test_resident_weights_on_hosts(config_json: Path, tmp_path: Path) -> None:
    ds, target = tmp_path / "ds.json", tmp_path / "out.json"

    def run(ours: dict[str, Any]) -> Result:
        zero = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
        ds.write_text(json.dumps({**zero, "ds_ckpt": ours}))
        options = ("--policies", "block", "--json", str(target), "--world", "8", "--hosts", "4")
        return _run(str(config_json), "--config", str(ds), *options)

    result = run({"weights": {"resident": True}})
    assert result.exit_code == 0, result.output
    kept = json.loads(target.read_text())["states"]
    half = kept["parameters_count"]  # of 2 bytes each; no parameter is padded
    assert kept["host_copy_bytes"] == half
    shown = " ".join(result.output.split())
    assert "One rank of 8 on 4 nodes" in shown
    assert f"node's copy of the weights {size(half)}" in shown
    planned = " ".join(run({"activation": {"policy": "auto"}}).output.split())
    assert "configured - - - - - - -" in planned
    assert 'configured: not computed here, policy "auto" is planned at the first batch' in planned


def test_functions_and_their_batches(tmp_path: Path) -> None:
    result = _run(f"{MODELS}:stack", "--batches", "2,4", "--policies", "block")
    assert re.findall(r"^ none +(\d+ x \d+) +\d", result.output, re.M) == ["1 x 2", "1 x 4"]
    fixed = _run(f"{MODELS}:fixed", "--batches", "1,2", "--policies", "block")
    assert fixed.exit_code == 0, fixed.output
    assert "takes no argument named batch" in " ".join(fixed.output.split())


def test_a_trace_of_a_real_step(config_json: Path, tmp_path: Path) -> None:
    target = tmp_path / "trace.json"
    result = _run(str(config_json), "--policies", "block", "--trace", str(target))
    assert result.exit_code == 0, result.output
    none, block = map(int, re.findall(r"operators: none (\d+) .*block (\d+)", result.stdout)[0])
    assert block > none > 0
    names = [event.get("name") for event in json.loads(target.read_text())["traceEvents"]]
    assert names.count("ds_ckpt/recompute") == 2  # blocks
    assert {"ds_ckpt/forward", "ds_ckpt/backward"} <= {*names}


def test_a_trace_without_room_or_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("demo", "--tokens", "16", "--policies", "block", "--trace")
    missing = _run(*arguments, str(tmp_path / "none" / "trace.json"))
    assert missing.exit_code == 1
    assert "trace.json: found No such file" in missing.stderr
    kind = torch.profiler.profile
    monkeypatch.setattr(kind, "export_chrome_trace", lambda _, path: Path(path).write_text("{"))
    cut = _run(*arguments, str(tmp_path / "cut.json"))
    assert (cut.exit_code, "cut.json: found a file that was not" in cut.stderr) == (1, True)
    monkeypatch.setattr("ds_ckpt.lab.estimate.profile.free_on", lambda device: 1000)
    result = _run(*arguments, str(tmp_path / "trace.json"))
    assert result.exit_code == 1
    assert "fix: use fewer --tokens" in result.stderr
    assert not (tmp_path / "trace.json").exists()
