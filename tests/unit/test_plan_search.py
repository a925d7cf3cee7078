"""`ds-ckpt plan`: costs of a model, candidates, the choice, and the command."""

import functools
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

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
from ds_ckpt.lab.estimate.profile import Options, make_profile
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
    default_batch,
)
from ds_ckpt.lab.estimate.simulate import simulate
from ds_ckpt.lab.hosts.hardware import HARDWARE, Hardware
from ds_ckpt.lab.hosts.probe import Pair, save
from ds_ckpt.lab.subject import Sizes

SIZES = Sizes(tokens=64, dtype=torch.bfloat16)
RATES = Rates(1e9, 1e9, 1e9)
TEXT = "2 nodes x 2 A100, 1 Gbit/s"


@functools.cache
def demo(name: str = "demo", tokens: int = 64) -> Model:
    return Model(name, replace(SIZES, tokens=tokens))


def ask(
    text: str = TEXT, sequences: int = 16, memory: float = 1.0, loss: str = "equal", model=None
) -> Search:
    cluster = Hardware.load(None, "--cluster").cluster(text, NEEDED)
    assert cluster is not None
    device = cluster.device
    values = {**device.values, "memory_bytes": memory * device["memory_bytes"]}
    cluster = replace(cluster, device=replace(device, values=values))
    return Search(Question(model or demo(), cluster, 5e-6, sequences, loss))


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
        assert (one.recompute_s, one.none_bytes) == (other.recompute_s, other.none_bytes)


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
    machine = replace(ask("4 nodes x 2 A100, 1 Gbit/s").question.machine, bus_bytes_per_s=1.0)
    machines = (replace(machine, streams=streams) for streams in (True, False))
    on_gpu, on_cpu = (gradient_methods.weights(name, one, 2, 1e12) for one in machines)
    assert on_gpu.link_bytes == on_cpu.link_bytes == pytest.approx(bits / 8 * 3 / 4)
    assert on_gpu.encode_s < 1e-11
    assert on_gpu.decode_s == pytest.approx(3 * on_gpu.encode_s)
    assert (on_cpu.encode_s > 1e-9) == (name == "lossless")
    assert gradient_methods.weights(ZERO3, machine, 2, 1e12) is None


def test_a_cluster_is_read_from_its_text() -> None:
    known = Hardware.load(None, "--cluster")

    def named(text: str) -> tuple[float, ...]:
        c = known.cluster(text, NEEDED)
        return c.nodes, c.local, c.device["memory_bytes"], c.rate.value, c.latency.value

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
        theirs_s = min(one.step.seconds for one in search.all if not one.setting.sections)
        if best.setting.sections:  # what it saves is not overstated
            assert search.other(best).step.seconds <= 1.01 * theirs_s
        assert all(one.fits for one in search.all)

    def option(seconds: float, sections: int) -> SimpleNamespace:
        setting = SimpleNamespace(sections=sections, distance=(sections,))
        return SimpleNamespace(
            at_least_s=0.0, step=SimpleNamespace(seconds=seconds), setting=setting
        )

    search = Search.__new__(Search)
    search.all = [option(1.0, 2), option(1.05, 1), option(1.07, 0)]
    assert search.best() is search.all[0]  # the second one ties with DeepSpeed alone


def test_nothing_costly_is_done_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each method is assigned once; each micro-batch has one survey, its solved plans few."""
    calls, surveys, fronts = list[object](), list[object](), list[object]()
    monkeypatch.setattr(gradient_methods, "assigned", lambda *a: calls.append(a) or assigned(*a))
    monkeypatch.setattr(costs, "survey", lambda *a, **k: surveys.append(a) or survey(*a, **k))
    monkeypatch.setattr(budget, "Front", lambda *a: fronts.append(a) or Front(*a))
    monkeypatch.setattr(search_module, "STEP", 1 << 12)
    search = ask(memory=6e-4, model=Model("demo", SIZES))
    assert len(search.all) > len(search.methods)
    assert len(calls) == len(search.methods) - 1  # DeepSpeed's own has none
    assert len(surveys) == len(search.micro_batches())
    assert 0 < len(fronts) <= 7 * len(surveys)  # offloaded or not, and by what stays on the device


def test_hpz_is_priced_as_its_bytes() -> None:
    """Half of ZeRO-3's gathers with one micro-step, and the node's copy in memory."""
    found = [one for one in ask().all if one.setting.method.name == gradient_methods.STOCK]
    by_kind = {one.setting.weights: one for one in found if one.setting.sequences == 4}
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
        tuned = one.setting.method.name.startswith(("1bit", "50x"))  # as their verdicts
        assert file["optimizer"]["params"]["betas"] == [0.7 if tuned else 0.9, 0.95]
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


@pytest.mark.parametrize(
    ("local", "memory", "length", "count"),
    [(2, 5e-4, 512, 5), (1, 5e-4, 512, 4), (2, 2.5e-4, 64, 4)],
)
def test_remedies_if_nothing_fits_are_true(local, memory, length, count, monkeypatch) -> None:
    """Each one is followed: planned again, or profiled, as no plan offloads an optimizer."""
    monkeypatch.setattr(search_module, "STEP", 1)

    def search(nodes: int, memory=memory, name: str = "demo", tokens: int = length) -> Search:
        text, model = f"{nodes} nodes x {local} A100, 1 Gbit/s", demo(name, tokens)
        return ask(text, nodes * local, memory, model=model)

    nodes, stuck = 2, search(2)
    with pytest.raises(UnsupportedError, match="no plan fits") as caught:
        stuck.best()
    found = caught.value.problems[0].remedy.split("; or ")
    assert len(found) == count
    for remedy in found:
        n = max(map(int, re.findall(r"\d+(?= nodes| GB)|(?<=tokens )\d+", remedy)), default=0)
        if "offload_optimizer" in remedy:
            stock = Setting(1, 1, "block", True, ZERO3, stuck.methods[0], 16)
            file = deepspeed_file(stuck.question, stock)
            file["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
            sizes, limit = replace(SIZES, tokens=length), round(8e10 * memory)
            given = Options("demo", file, sizes=sizes, world=nodes * local, hosts=nodes)
            assert make_profile(replace(given, limit_bytes=limit)).best
        elif "LoRA" in remedy:
            assert search(nodes, name="tests.unit.estimate_models:low_rank").all
        elif "GB or" in remedy:
            assert search(nodes, n / 80).all
        elif "nodes" in remedy:
            assert [bool(search(few).all) for few in (n - 1, n)] == [False, True]
        else:
            assert [bool(search(nodes, tokens=few).all) for few in (n, 2 * n)] == [True, False]


def test_whatever_is_left_out_does_not_fit() -> None:
    """By as many bytes as the reason names."""

    def search(memory: float) -> tuple[Search, set[tuple[str, str]]]:
        found = ask("2 nodes x 1 A100, 1 Gbit/s", 4, memory)
        return found, {(one.setting.weights, one.setting.method.name) for one in found.all}

    found, used = search(0.0119)
    left = [pair for pair in found.pairs() if (pair[0], pair[1].name) not in used]
    assert 0 < len(used) < len(used) + len(left)
    for kind, method in left[::6]:
        needed = found.least(kind, method).rounded_bytes
        assert needed > found.question.capacity_bytes
        for more, fits in ((1e3, True), (-1e3, False)):
            assert ((kind, method.name) in search((needed + more) / 0.9 / 8e10)[1]) == fits


def test_where_memory_is_short_smaller_buckets_are_tried() -> None:
    """Few bytes fit only then beside llama-1b, resident on two nodes of 24 GB."""
    model = Model("llama-1b", Sizes(2048, torch.bfloat16))
    search = ask("2 nodes x 1 RTX 4090, 1 Gbit/s, 20 ms", 8, model=model)
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
    given = ("equivalent", "loss"), ("worse", "accuracy"), ("inconclusive", "loss")
    changes = [{"verdict": verdict, "metric": metric} for verdict, metric in given]
    good, worse, unsure = (record.model_copy(update=change) for change in changes)
    assert allows([good], "equal")
    for records in ([], [good, worse], [good, unsure]):
        assert not allows(records, "equal")
    assert allows([worse], "any")
    for section, _ in known.values():
        parse({"zero_optimization": {"stage": 3}, "ds_ckpt": {"compression": section}})
    assert "topk_1pct" in {method.name for method in gradient_methods.plan_methods("equal")[1]}
    # a record may name settings that are gone; their constant value makes no difference
    assert {record.workers for record in known["2bit_no_feedback"][1]} == {4, 8}


@pytest.mark.parametrize("row", ["4 8 equal True", "4 1 equal True", "8 1 equal ", "8 1 any True"])
def test_without_feedback_no_more_may_round_than_in_the_verdicts(row) -> None:
    """Verdicts on it have four workers, and eight, with which it is open at half a percent.

    Sums of a node are exact.
    """
    nodes, local, loss, allowed = row.split(" ")
    search = ask(f"{nodes} nodes x {local} A100, 1 Gbit/s", sequences=64, loss=loss)
    names = {m.name for m in search.methods}
    assert ("2bit_no_feedback" in names) == bool(allowed)
    assert "3bit" in names
    assert names.isdisjoint(m.name for m in search.refused)


def plan(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "200"})
    return result.exit_code, result.output


def test_the_command_answers_and_writes_valid_files(tmp_path, is_golden) -> None:
    """1 bit, chosen over the slow link, was compared with training with AdamW's b1 at 0.7."""
    found = list[str]()
    slow = "2 nodes x 1 A100 80 GB, 0.05 Gbit/s"
    path, ours = tmp_path / "plan.json", tmp_path / "ours.json"
    for cluster, size, b1 in (("1 node x 2 A100", (), 0.9), (slow, ("--batch=16",), 0.7)):
        given = ["demo", "--cluster", cluster, f"--tokens={64 if size else 2048}", *size]
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
    """The default batch grows with the GPUs."""
    sizes = [(2048, 2), (2048, 128), (3000, 4), (131072, 8), (1, 4)]
    found = [default_batch(SimpleNamespace(tokens=t), devices) for t, devices in sizes]
    assert found == [16, 1024, 16, 8, 32]
    links = tmp_path / "links.json"
    save([Pair("one", "two", 1e-4, 5e8)], links)
    stack = ["tests.unit.estimate_models:stack", "--modules=Mixer"]
    code, text = plan(*stack, "--cluster=2 nodes x 2 L40S", f"--links={links}", "--details")
    assert code == 0, text
    for part in ("32 sequences", "measured", "links.json"):
        assert part in text
    assert ask(sequences=4 << 14).micro_batches()[-1] == 1 << 13  # more ids are not surveyed
