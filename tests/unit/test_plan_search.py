"""`ds-ckpt plan`: costs of a model, candidates, the choice, and the command."""

import functools
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ds_ckpt.activation.planning import budget
from ds_ckpt.activation.planning.costs import Rates
from ds_ckpt.activation.planning.solve import Front
from ds_ckpt.activation.planning.trace import survey
from ds_ckpt.cli import app
from ds_ckpt.config import parse
from ds_ckpt.config.verdicts import allows, sections_on_record
from ds_ckpt.errors import ConfigError, UnsupportedError
from ds_ckpt.lab.estimate import methods as gradient_methods
from ds_ckpt.lab.estimate import model as costs
from ds_ckpt.lab.estimate import search as search_module
from ds_ckpt.lab.estimate.memory_model import assigned, estimate
from ds_ckpt.lab.estimate.model import ACTIVATIONS, Model
from ds_ckpt.lab.estimate.search import (
    BUDGET,
    HPZ,
    NEEDED,
    TIE,
    ZERO1,
    ZERO2,
    ZERO3,
    ZERO_KINDS,
    Question,
    Search,
    Setting,
    deepspeed_file,
)
from ds_ckpt.lab.estimate.simulate import simulate
from ds_ckpt.lab.hosts.hardware import HARDWARE, Hardware
from ds_ckpt.lab.hosts.probe import Pair, save
from ds_ckpt.lab.subject import Sizes

SIZES = Sizes(tokens=64, dtype=torch.bfloat16)
RATES = Rates(1e9, 1e9, 1e9)
TEXT = "2 nodes x 2 A100, 1 Gbit/s"
TUNED = ("1bit", "50x")
"""Methods whose verdicts are against dense training with a tuned b1."""


@functools.cache
def demo() -> Model:
    return Model("demo", SIZES)


def ask(text: str = TEXT, sequences: int = 16, memory: float = 1.0, loss: str = "equal") -> Search:
    known = Hardware.load(None, "--cluster")
    cluster = known.cluster(text, NEEDED)
    known.raise_problems()
    assert cluster is not None
    device = cluster.device
    values = {**device.values, "memory_bytes": memory * device["memory_bytes"]}
    cluster = replace(cluster, device=replace(device, values=values))
    return Search(Question(demo(), cluster, 5e-6, sequences, loss))


def test_two_blocks_multiplied_are_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "SURVEYED", 99)
    whole = Model("demo", SIZES)
    assert len(demo().blocks) == len(whole.blocks) == 6
    assert sorted(demo().parameters.counts) == sorted(whole.parameters.counts)
    assert (demo().elements, demo().trained) == (whole.elements, whole.trained)
    assert demo().parameters.largest_block == whole.parameters.largest_block
    assert demo().work == pytest.approx(whole.work)
    few, all_ = demo().planner(2, RATES), whole.planner(2, RATES)
    assert few.way_names == all_.way_names
    for word in few.way_names:
        one, other = few.uniform_plan(word, ACTIVATIONS), all_.uniform_plan(word, ACTIVATIONS)
        assert (one.held_bytes, one.needed_bytes) == (other.held_bytes, other.needed_bytes)
        assert one.recompute_s == other.recompute_s
        assert one.none_bytes == other.none_bytes


def test_common_models_have_the_parameters_that_are_on_record() -> None:
    known = json.loads(HARDWARE.read_text())["models"]
    for name in ("llama-1b", "llama-7b", "llama-70b", "mixtral-8x7b", "qwen2.5-7b"):
        model = Model(name, Sizes(tokens=128, dtype=torch.bfloat16))
        assert model.elements == pytest.approx(known[name]["parameters"], rel=0.01)
        assert len(model.blocks) == known[name]["config"]["num_hidden_layers"]


def test_gradient_bytes_are_those_of_the_exchange() -> None:
    machine = ask().question.machine

    def sent(method: gradient_methods.PlanMethod) -> float:
        how = gradient_methods.gradients(method, demo(), machine, 2, 1, 1e12)
        return how.link_bytes * demo().trained

    by_name = {method.name: method for method in gradient_methods.plan_methods("equal")[0]}
    assert sent(by_name[gradient_methods.STOCK]) == pytest.approx(2 * demo().trained * 3 / 4)
    assert sent(by_name[gradient_methods.DENSE]) == pytest.approx(2 * demo().trained / 2)
    few = by_name["3bit"]
    assert few.settings is not None
    plan = few.assignment(demo(), machine.ranks, machine.hosts)
    assert sent(few) == pytest.approx(plan.sent_bytes / 2)
    assert sent(few) < sent(by_name[gradient_methods.DENSE]) / 4
    # gradients inside a node are compressed with one level only
    one_level = assigned(demo().parameters, few.settings, 2, 1)
    for nodes, inside in ((1, one_level.sent_bytes / 2), (2, 2 * demo().trained / 2)):
        machine = ask(f"{nodes} nodes x 2 A100, 1 Gbit/s").question.machine
        how = gradient_methods.gradients(few, demo(), machine, 2, 1, 1e12)
        assert how.inside_bytes * demo().trained == pytest.approx(inside)


@pytest.mark.parametrize(("name", "bits"), [("whole", 16), ("lossless", 2.93)])
def test_changes_of_resident_weights_have_bytes_and_seconds(name: str, bits: float) -> None:
    """They are coded in the GPU's memory, or on a CPU core, and never go over the bus."""
    machine = ask("4 nodes x 2 A100, 1 Gbit/s").question.machine
    slow_bus = replace(machine, bus_bytes_per_s=1.0)
    on_gpu, on_cpu = (
        gradient_methods.weights(name, replace(slow_bus, streams=streams), 2, 1e12)
        for streams in (True, False)
    )
    assert on_gpu.link_bytes == on_cpu.link_bytes == pytest.approx(bits / 8 * 3 / 4)
    assert on_gpu.encode_s < 1e-11
    assert on_gpu.decode_s == pytest.approx(3 * on_gpu.encode_s)
    assert (on_cpu.encode_s > 1e-9) == (name == "lossless")
    assert gradient_methods.weights(ZERO3, machine, 2, 1e12) is None


def test_a_cluster_is_read_from_its_text() -> None:
    known = Hardware.load(None, "--cluster")

    def named(text: str) -> tuple[float, ...]:
        found = known.cluster(text, NEEDED)
        assert found is not None
        device = found.device["memory_bytes"]
        return found.nodes, found.local, device, found.rate.value, found.latency.value

    default_s = known.entry("links", "between nodes")["latency_s"]
    assert named("4 nodes x 8 A100, 100 Gbit/s") == (4, 8, 80e9, 100e9, default_s)
    assert named("4 nodes x 8 a100 40GB, 25 Gbps, 5 us")[2:4] == (40e9, 25e9)
    assert named("2 nodes x 1 3090, 100 Mb/s, 20 ms") == (2, 1, 24e9, 1e8, 0.02)
    assert named("1 node x 8 H200")[:3] == (1, 8, 141e9)
    assert known.cluster("4 nodes x 8 A100, 100 GB/s", NEEDED) is None  # bytes
    kinds = {f.what: f.kind for f in known.entry("accelerators", "L40S").figures()}
    assert kinds["L40S 48 GB: memory_bytes"] == "data sheet"
    assert kinds["L40S 48 GB: share_of_peak"] == "guess"


def test_the_best_is_the_shortest_step_or_the_plainest_of_a_tie(monkeypatch) -> None:
    """All are simulated here, by the search few of those whose bytes or computing last longer."""
    calls = list[object]()
    monkeypatch.setattr(search_module, "simulate", lambda *a: calls.append(a) or simulate(*a))
    for text in (TEXT, "2 nodes x 2 A100, 100 Gbit/s", "4 nodes x 1 RTX 4090, 100 Mbit/s, 20 ms"):
        calls.clear()
        search = ask(text)
        best = search.best()
        assert text != TEXT or len(calls) <= 0.4 * len(search.all)
        enough_s = (1 + TIE) * min(one.step.seconds for one in search.all)
        assert best.step.seconds <= enough_s
        ties = [one for one in search.all if one.step.seconds <= enough_s]
        assert best.setting.distance == min(one.setting.distance for one in ties)
        assert all(one.fits for one in search.all)


def test_nothing_costly_is_done_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each method is assigned once; each micro-batch has one survey, its solved plans few."""
    calls = list[object]()
    monkeypatch.setattr(gradient_methods, "assigned", lambda *a: calls.append(a) or assigned(*a))
    surveys, fronts = list[object](), list[object]()
    monkeypatch.setattr(costs, "survey", lambda *a, **k: surveys.append(a) or survey(*a, **k))
    monkeypatch.setattr(budget, "Front", lambda *a: fronts.append(a) or Front(*a))
    monkeypatch.setattr(search_module, "STEP", 1 << 12)
    search = Search(replace(ask(memory=6e-4).question, model=Model("demo", SIZES)))
    assert len(search.all) > len(search.methods)
    assert len(calls) == len(search.methods) - 1  # DeepSpeed's own has none
    assert len(surveys) == len(search.micro_batches())
    assert 0 < len(fronts) <= 7 * len(surveys)  # offloaded or not, and by what stays on the device


def test_hpz_is_priced_as_its_bytes() -> None:
    """Half of ZeRO-3's gathers with one micro-step, and the node's copy in memory."""
    by_kind = {
        one.setting.weights: one
        for one in ask().all
        if one.setting.sequences == 4 and one.setting.method.name == gradient_methods.STOCK
    }
    hpz, zero3 = by_kind[HPZ], by_kind[ZERO3]
    gathers = {kind: n for kind, n in hpz.step.sent_bytes.items() if kind.startswith("gather")}
    assert gathers == {"gather in forward": zero3.step.sent_bytes["gather in forward"]}
    ours = {"NCCL's buffers": 470_000_000 + (512 << 20)}  # of the group for changes of weights
    assert hpz.memory | ours == by_kind["whole"].memory
    assert hpz.needed_bytes > zero3.needed_bytes


def test_zero_1_is_a_baseline() -> None:
    """It sends the same for any number of micro-steps, and waits for changed weights."""
    search = ask("2 nodes x 1 A100, 100 Mbit/s", sequences=8)
    zero1 = [one for one in search.all if one.setting.weights == ZERO1]
    assert len({one.setting.micro_steps for one in zero1}) == 3
    for one in zero1:
        sent = one.step.sent_bytes
        assert sent["gradients"] == pytest.approx(2 * 2 * demo().trained / 2)
        assert sent["gather after update"] == pytest.approx(2 * demo().trained / 2)
        assert one.step.waits_s >= 2 * demo().trained / 2 / (100e6 / 8)
        assert one.memory["weights, gradients, optimizer"] >= (2 + 2 + 12 / 2) * demo().elements
    (plain,) = (m for m in search.methods if m.name == gradient_methods.STOCK)
    zero3 = search.mixture(Setting(1, 4, BUDGET, False, ZERO3, plain))
    assert zero3 is not None
    rival_s = min(one.step.seconds for one in zero1)
    assert zero3.step.seconds > rival_s > search.best().step.seconds
    assert {one.setting.weights for one in ask(memory=6e-4).all} == {ZERO2, ZERO3, HPZ}


def test_every_candidates_file_can_be_used_and_has_its_memory() -> None:
    search = ask(loss="any")
    for one in search.all:
        file = deepspeed_file(search.question, one.setting, one.plan)
        plugin = parse(json.loads(json.dumps(file)))
        assert file["train_micro_batch_size_per_gpu"] * file["gradient_accumulation_steps"] == 4
        assert plugin.weights.resident == (one.setting.weights in gradient_methods.RESIDENT)
        betas = file["optimizer"]["params"]["betas"]
        assert betas == ([0.7, 0.95] if one.setting.method.name.startswith(TUNED) else [0.9, 0.95])
        hpz = file["zero_optimization"].get("zero_hpz_partition_size")
        assert hpz == (2 if one.setting.weights == HPZ else None)
        states, _ = estimate(demo().parameters, file, 4, 2)
        beside = {"activations", "gradients of activations, temporaries"}
        kept = sum(n for what, n in one.memory.items() if what not in beside)
        assert kept == states.resident_bytes
        assert bool(one.setting.sections) == ("ds_ckpt" in file)
    assert {one.setting.weights for one in search.all} == {*ZERO_KINDS, *gradient_methods.RESIDENT}


def test_less_memory_recomputes_more_and_none_is_refused() -> None:
    search = ask(sequences=512)
    at = Setting(128, 1, BUDGET, False, ZERO3, search.methods[0])
    most = search.mixture(at)
    assert most is not None
    assert not most.plan.recompute_s
    room = most.needed_bytes - most.plan.needed_bytes // 2
    device = search.question.cluster.device["memory_bytes"]
    less = ask(sequences=512, memory=room / 0.9 / device).mixture(at)
    assert less is None or less.plan.recompute_s > 0
    with pytest.raises(ConfigError, match="write 16"):
        ask(sequences=15)


def test_remedies_if_nothing_fits_are_true(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_module, "STEP", 1)
    with pytest.raises(UnsupportedError, match="no plan fits") as caught:
        ask(memory=4e-4).best()
    remedy = caught.value.problems[0].remedy
    assert "offload_optimizer" in remedy
    assert "LoRA" in remedy
    (nodes,) = map(int, re.findall(r"use (\d+) nodes", remedy))
    ask(f"{nodes} nodes x 2 A100, 1 Gbit/s", 48, memory=4e-4).best()
    with pytest.raises(UnsupportedError):
        ask(f"{nodes - 1} nodes x 2 A100, 1 Gbit/s", 48, memory=4e-4).best()
    with pytest.raises(UnsupportedError) as caught:  # activations alone are too large
        ask(memory=1e-4).best()
    assert caught.value.problems[0].remedy.startswith("use accelerators of")


def test_where_memory_is_short_smaller_buckets_are_tried() -> None:
    """Few bytes fit only then beside llama-1b, resident on two nodes of 24 GB."""
    known = Hardware.load(None, "--cluster")
    cluster = known.cluster("2 nodes x 1 RTX 4090, 1 Gbit/s, 20 ms", NEEDED)
    assert cluster is not None
    model = Model("llama-1b", Sizes(2048, torch.bfloat16))
    search = Search(Question(model, cluster, 5e-6, 8, "equal"))
    ours = [one for one in search.all if one.setting.weights in gradient_methods.RESIDENT]
    few = [one for one in ours if one.setting.method.name.startswith("1bit")]
    assert few
    for one in few:
        assert one.setting.divisor > 1
        file = deepspeed_file(search.question, one.setting, one.plan)
        usual = deepspeed_file(search.question, replace(one.setting, divisor=1), one.plan)
        bucket, larger = (f["zero_optimization"]["reduce_bucket_size"] for f in (file, usual))
        assert bucket == -(-larger // one.setting.divisor)
        assert one.strategy.bucket == bucket


def test_verdicts_decide_what_may_be_lost() -> None:
    known = sections_on_record()
    record = known["3bit"][1][0]
    good, worse, unsure = (
        record.model_copy(update={"verdict": verdict, "metric": metric})
        for verdict, metric in (
            ("equivalent", "loss"),
            ("worse", "accuracy"),
            ("inconclusive", "loss"),
        )
    )
    assert allows([good], "equal")
    for records in ([], [good, worse], [good, unsure]):
        assert not allows(records, "equal")
    assert allows([worse], "any")
    for section, _ in known.values():
        parse({"zero_optimization": {"stage": 3}, "ds_ckpt": {"compression": section}})
    assert "topk_1pct" in {method.name for method in gradient_methods.plan_methods("equal")[1]}
    # a record may name settings that are gone; their constant value makes no difference
    assert {record.workers for record in known["2bit_no_feedback"][1]} == {4, 8}


@pytest.mark.parametrize(
    ("text", "loss", "allowed"),
    [
        ("4 nodes x 8 A100, 1 Gbit/s", "equal", True),  # nodes' sums are exact
        ("4 nodes x 1 A100, 1 Gbit/s", "equal", True),
        ("8 nodes x 1 A100, 1 Gbit/s", "equal", False),
        ("8 nodes x 1 A100, 1 Gbit/s", "any", True),
    ],
)
def test_without_feedback_no_more_may_round_than_in_the_verdicts(text, loss, allowed) -> None:
    """Verdicts on it have four workers, and eight, with which it is open at half a percent."""
    search = ask(text, sequences=64, loss=loss)
    names = {m.name for m in search.methods}
    assert ("2bit_no_feedback" in names) == allowed
    assert "3bit" in names
    assert names.isdisjoint(m.name for m in search.refused)


def plan(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "200"})
    return result.exit_code, result.output


def test_the_command_answers_and_writes_valid_files(tmp_path, is_golden) -> None:
    """1 bit, chosen over the slow link, was compared with training with AdamW's b1 at 0.7."""
    found = list[str]()
    for cluster, b1 in (("1 node x 2 A100", 0.9), ("2 nodes x 1 A100 80 GB, 0.05 Gbit/s", 0.7)):
        path, ours = tmp_path / "plan.json", tmp_path / "ours.json"
        given = ["demo", "--cluster", cluster, "--batch=16", "--tokens=64"]
        code, few = plan(*given)
        assert (code, len(few.splitlines())) == (0, 5), few
        code, text = plan(*given, "--details", f"-o{path}", f"--other-output={ours}")
        assert code == 0, text
        assert text.startswith(few)
        result = CliRunner().invoke(app, ["validate", str(path), str(ours)])
        assert result.exit_code == 0, result.output
        file, other = (json.loads(one.read_text()) for one in (path, ours))
        assert ("ds_ckpt" in file) != ("ds_ckpt" in other)
        assert (file["bf16"]["enabled"], *file["optimizer"]["params"]["betas"]) == (True, b1, 0.95)
        found += [few, text.replace(str(tmp_path), "FOLDER")]
    assert is_golden("plan.txt", "\n".join([found[0], found[-1]]))


def test_a_function_without_tokens_and_probed_links(tmp_path: Path) -> None:
    links = tmp_path / "links.json"
    save([Pair("one", "two", 1e-4, 5e8)], links)
    stack = ["tests.unit.estimate_models:stack", "--modules=Mixer"]
    code, text = plan(*stack, "--cluster=2 nodes x 2 L40S", f"--links={links}", "--details")
    assert code == 0, text
    for part in ("32 sequences", "measured", "links.json"):
        assert part in text
