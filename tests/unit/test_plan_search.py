"""`ds-ckpt plan`: costs of a model, candidates, the choice, and the command."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ds_ckpt.activation.planning.budget import Planner
from ds_ckpt.activation.planning.costs import Rates
from ds_ckpt.cli import app
from ds_ckpt.config import parse
from ds_ckpt.config.verdicts import VerdictRecord, allows, sections_on_record
from ds_ckpt.errors import ConfigError, UnsupportedError
from ds_ckpt.lab.estimate import model as costs
from ds_ckpt.lab.estimate import search as choices
from ds_ckpt.lab.estimate.baselines import Zero1, best_zero1, zero1
from ds_ckpt.lab.estimate.memory import estimate
from ds_ckpt.lab.estimate.model import ACTIVATIONS, Model
from ds_ckpt.lab.estimate.plan_report import would_change
from ds_ckpt.lab.estimate.search import HPZ, NEEDED, ZERO3, Question, Search, deepspeed_file
from ds_ckpt.lab.estimate.ways import DENSE, RESIDENT, STOCK, Method, gradients, methods, weights
from ds_ckpt.lab.hosts.hardware import HARDWARE, Hardware
from ds_ckpt.lab.hosts.probe import Links, Pair
from ds_ckpt.lab.subject import Sizes

SIZES = Sizes(tokens=64, dtype=torch.bfloat16)
RATES = Rates(1e9, 1e9, 1e9)
TEXT = "2 nodes x 2 A100, 1 Gbit/s"
TUNED = ("1bit", "50x")
"""Methods whose verdicts are against dense training with a tuned b1."""


@pytest.fixture(scope="module")
def demo() -> Model:
    return Model("demo", SIZES)


@pytest.fixture(scope="module")
def ask(demo: Model) -> Callable[..., Search]:
    def search(text: str = TEXT, sequences: int = 16, **changed: object) -> Search:
        known = Hardware.load(None, "--cluster")
        cluster = known.cluster(text, NEEDED)
        known.done()
        assert cluster is not None
        question = Question(demo, cluster, 5e-6, sequences, "equal")
        return Search(replace(question, **changed))

    return search


def test_every_micro_batch_is_told_and_the_first_that_does_not_fit(
    ask: Callable[..., Search],
) -> None:
    search, said = ask(), list[str]()
    search.told = said.append
    search.best()
    assert said == [f"micro-batches of {n}" for n in search.micro_batches()]


def test_two_blocks_multiplied_are_the_model(demo: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "SURVEYED", 99)
    whole = Model("demo", SIZES)
    assert len(demo.blocks) == len(whole.blocks) == 6
    assert sorted(demo.parameters.counts) == sorted(whole.parameters.counts)
    assert (demo.elements, demo.trained) == (whole.elements, whole.trained)
    assert demo.parameters.largest_block == whole.parameters.largest_block
    assert demo.work == pytest.approx(whole.work)
    few, all_ = demo.at(2, RATES).planner, whole.at(2, RATES).planner
    assert few.words == all_.words
    for word in few.words:
        one, other = few.all_alike(word, ACTIVATIONS), all_.all_alike(word, ACTIVATIONS)
        assert (one.held_bytes, one.needed_bytes) == (other.held_bytes, other.needed_bytes)
        assert one.recompute_flops == other.recompute_flops
        assert (one.none_bytes, one.forward_flops) == (other.none_bytes, other.forward_flops)


def test_common_models_have_the_parameters_that_are_on_record() -> None:
    known = json.loads(HARDWARE.read_text())["models"]
    for name in ("llama-1b", "llama-7b", "llama-70b", "mixtral-8x7b", "qwen2.5-7b"):
        model = Model(name, Sizes(tokens=128, dtype=torch.bfloat16))
        assert model.elements == pytest.approx(known[name]["parameters"], rel=0.01)
        assert len(model.blocks) == known[name]["config"]["num_hidden_layers"]


def test_gradient_bytes_are_the_exchanges(demo: Model, ask: Callable[..., Search]) -> None:
    machine = ask().question.machine

    def sent(method: Method) -> float:
        how = gradients(method, demo, machine, itemsize=2, accumulation=1, bytes_per_s=1e12)
        return how.link_bytes * demo.trained

    by_name = {method.name: method for method in methods("equal")[0]}
    assert sent(by_name[STOCK]) == pytest.approx(2 * demo.trained * 3 / 4)
    assert sent(by_name[DENSE]) == pytest.approx(2 * demo.trained / 2)
    few = by_name["3bit"]
    assert few.settings is not None
    plan = demo.gradients(few.settings.choose(demo.embeddings, 2), 2, 2, 2)
    assert sent(few) == pytest.approx(plan.sent_bytes / 2)
    assert sent(few) < sent(by_name[DENSE]) / 4


@pytest.mark.parametrize("nodes", [1, 2])
def test_what_stays_in_a_host_is_compressed_where_there_is_one_level(
    demo: Model, ask: Callable[..., Search], nodes: int
) -> None:
    """Hosts of two processes each: of a host alone what it sends, of two the exact sum."""
    machine = ask(f"{nodes} nodes x 2 A100, 1 Gbit/s").question.machine
    few = {method.name: method for method in methods("equal")[0]}["3bit"]
    assert few.settings is not None
    how = gradients(few, demo, machine, itemsize=2, accumulation=1, bytes_per_s=1e12)
    plan = demo.gradients(few.settings.choose(demo.embeddings, 1), 2, 1, 2)
    inside = plan.sent_bytes / 2 / demo.trained if nodes == 1 else 2 / 2
    assert how.inside_bytes == pytest.approx(inside)
    assert (how.link_bytes == 0) == (nodes == 1)


def test_a_single_node_is_plain_json() -> None:
    code, output = plan("demo", "--tokens=64", "--cluster=1 node x 2 A100", "--json")
    assert code == 0, output
    figures = json.loads(output, parse_constant=pytest.fail)["figures"]
    assert any(f["value"] is None for f in figures)


def test_changed_weights_are_what_the_weights_page_says(ask: Callable[..., Search]) -> None:
    machine = ask().question.machine
    whole, lossless = weights("whole", machine, 2), weights("lossless", machine, 2)
    assert whole is not None
    assert lossless is not None
    assert whole.link_bytes == 2 * 1 / 2
    assert lossless.link_bytes < whole.link_bytes / 4
    assert weights("ZeRO-3's", machine, 2) is None


def test_a_cluster_in_words() -> None:
    known = Hardware.load(None, "--cluster")

    def named(text: str) -> tuple[int, int, float, float, float]:
        found = known.cluster(text, NEEDED)
        known.done()
        assert found is not None
        device = found.device["memory_bytes"]
        return found.nodes, found.local, device, found.rate.value, found.latency.value

    default_s = known.entry("links", "between nodes")["latency_s"]
    assert named("4 nodes x 8 A100, 100 Gbit/s") == (4, 8, 80e9, 100e9, default_s)
    assert named("4 nodes x 8 a100 40GB, 25 Gbit/s, 50 us") == pytest.approx(
        (4, 8, 40e9, 25e9, 50e-6)
    )
    assert named("2 nodes x 1 RTX-3090, 100 Mbit/s, 20 ms") == (2, 1, 24e9, 1e8, 0.02)
    assert named("1 node x 8 H200")[:3] == (1, 8, 141e9)


def test_figures_say_how_far_they_can_be_trusted() -> None:
    known = Hardware.load(None, "--cluster")
    kinds = {f.what: f.kind for f in known.entry("accelerators", "L40S").figures()}
    assert kinds["L40S 48 GB: memory_bytes"] == "data sheet"
    assert kinds["L40S 48 GB: share_of_peak"] == "guess"
    named = known.cluster(TEXT, NEEDED)
    assert named is not None
    assert (named.rate.kind, named.latency.kind) == ("named", "guess")


def test_the_best_is_the_best_of_all(ask: Callable[..., Search]) -> None:
    for text in (TEXT, "2 nodes x 2 A100, 100 Gbit/s", "4 nodes x 1 RTX 4090, 100 Mbit/s, 20 ms"):
        search = ask(text)
        best, least_s = search.best(), min(one.step.seconds for one in search.all)
        assert best.step.seconds <= 1.01 * least_s
        ties = [one for one in search.all if one.step.seconds <= 1.01 * least_s]
        assert best.setting.departures == min(one.setting.departures for one in ties)
        assert all(one.bound_s <= one.step.seconds * (1 + 1e-9) for one in search.all)
        assert all(one.fits for one in search.all)


@pytest.mark.parametrize(
    "name", ["llama-70b", pytest.param("mixtral-8x7b", marks=pytest.mark.slow)]
)
def test_a_large_model_is_planned_with_few_simulated_steps(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What planning takes, counted in simulated steps and plans of memory: no clock."""
    simulated, planned = list[object](), list[object]()
    step, solve = choices.simulate, Planner.plan
    monkeypatch.setattr(choices, "simulate", lambda *a: (simulated.append(a), step(*a))[1])
    monkeypatch.setattr(Planner, "plan", lambda *a: (planned.append(a), solve(*a))[1])
    known = Hardware.load(None, "--cluster")
    cluster = known.cluster("16 nodes x 8 A100, 100 Gbit/s", NEEDED)
    assert cluster is not None
    model = Model(name, Sizes(tokens=512, dtype=torch.bfloat16))
    search = Search(Question(model, cluster, 5e-6, 1024, "equal"))
    best = search.best()
    assert 0 < len(simulated) <= 64 < len(search.all)
    assert 0 < len(planned) <= 64
    assert best.step.seconds <= 1.01 * min(one.step.seconds for one in search.all[::5])


def test_hpz_is_priced_as_its_bytes(ask: Callable[..., Search]) -> None:
    """Half of ZeRO-3's gathers with one micro-step, and the host's copy in memory."""
    by_kind = {
        one.setting.weights: one
        for one in ask().all
        if one.setting.sequences == 4 and one.setting.method.name == STOCK
    }
    hpz, zero3 = by_kind[HPZ], by_kind[ZERO3]
    gathers = {kind: n for kind, n in hpz.step.sent_bytes.items() if kind.startswith("gather")}
    assert gathers == {"gather in forward": zero3.step.sent_bytes["gather in forward"]}
    assert hpz.memory == by_kind["whole"].memory
    assert hpz.needed_bytes > zero3.needed_bytes


def test_zero_1_is_told_beside_the_candidates(ask: Callable[..., Search], demo: Model) -> None:
    """It sends the same however many micro-steps there are, and waits for what has changed."""
    search = ask("2 nodes x 1 A100, 100 Mbit/s", sequences=8)
    tried = Zero1(search.question).all
    assert len({one.setting.micro_steps for one in tried}) == 3
    for one in tried:
        step = zero1(one).step
        assert step.link_bytes == pytest.approx(2 * 2 * demo.trained / 2)
        assert step.parts_s["update"] >= 2 * demo.trained / 2 / (100e6 / 8)
        assert one.memory["weights, gradients, optimizer"] >= (2 + 2 + 12 / 2) * demo.elements
    rival = best_zero1(search.question)
    assert rival is not None
    (fast,) = (m for m in search.methods if m.name == STOCK)
    stock = search.mixture(1, ZERO3, fast, False)
    assert stock is not None
    assert stock.step.seconds > rival.step.seconds
    *_, said = would_change(search, stock)
    assert said.startswith("ZeRO-1, no candidate, is faster: ")
    *_, said = would_change(search, search.best())
    assert said.startswith("ZeRO-1, no candidate, is not faster: ")
    assert best_zero1(replace(search.question, memory=0.001)) is None


def test_memory_is_that_of_the_profile(ask: Callable[..., Search], demo: Model) -> None:
    search = ask()
    for one in search.all[:: len(search.all) // 7]:
        file = deepspeed_file(search.question, one.setting, one.plan)
        states, _ = estimate(demo.parameters, file, 4, 2)
        beside = {"activations", "gradients of activations, temporaries"}
        kept = sum(n for what, n in one.memory.items() if what not in beside)
        assert kept == states.resident_bytes


def test_every_candidates_file_can_be_used(ask: Callable[..., Search]) -> None:
    search = ask(loss="any")
    for one in search.all:
        file = deepspeed_file(search.question, one.setting, one.plan)
        plugin = parse(json.loads(json.dumps(file)))
        assert file["train_micro_batch_size_per_gpu"] * file["gradient_accumulation_steps"] == 4
        assert plugin.weights.resident == (one.setting.weights in RESIDENT)
        betas = file["optimizer"]["params"]["betas"]
        assert betas == ([0.7, 0.95] if one.setting.method.name.startswith(TUNED) else [0.9, 0.95])
        hpz = file["zero_optimization"].get("zero_hpz_partition_size")
        assert hpz == (2 if one.setting.weights == HPZ else None)
    assert {one.setting.weights for one in search.all} == {ZERO3, HPZ, *RESIDENT}


def test_less_memory_recomputes_more_and_none_is_refused(
    ask: Callable[..., Search], demo: Model
) -> None:
    search = ask(sequences=512)
    at = search.all[0].setting
    most = search.mixture(128, at.weights, at.method, False)
    assert most is not None
    assert not most.plan.recompute_flops
    room = most.needed_bytes - most.plan.needed_bytes // 2
    device = search.question.cluster.device["memory_bytes"]
    tight = ask(sequences=512, memory=room / 0.9 / device)
    less = tight.mixture(128, at.weights, at.method, False)
    assert less is None or less.plan.recompute_s > 0
    with pytest.raises(UnsupportedError, match="no plan fits") as told:
        ask(memory=1e-4).best()
    assert "--tokens" in str(told.value)


def test_a_batch_that_cannot_be_divided_is_refused(ask: Callable[..., Search]) -> None:
    with pytest.raises(ConfigError, match="write 16"):
        ask(sequences=15)


def test_verdicts_decide_what_may_be_lost() -> None:
    known = sections_on_record()
    record = known["3bit"][1][0]

    def said(verdict: str, metric: str, high: float) -> VerdictRecord:
        found = {"verdict": verdict, "metric": metric, "interval": (-high, high)}
        return record.model_copy(update=found)

    good, worse = said("equivalent", "loss", 0.004), said("worse", "accuracy", 0.05)
    unsure = said("inconclusive", "loss", 0.006)
    assert allows([good], "equal")
    assert not allows([], "equal")
    assert not allows([good, worse], "equal")
    assert not allows([good, unsure], "equal")
    assert allows([good, unsure], 0.006)
    assert not allows([good, unsure], 0.005)
    assert not allows([good, worse], 0.5)
    assert allows([worse], "any")
    assert {"3bit", "4bit"} <= known.keys()
    for section, _ in known.values():
        parse({"zero_optimization": {"stage": 3}, "ds_ckpt": {"compression": section}})
    refused = {method.name for method in methods("equal")[1]}
    assert "topk_1pct" in refused


def test_without_feedback_no_more_may_round_than_verdicts_are_of(
    ask: Callable[..., Search],
) -> None:
    """Verdicts on it are of four workers, and of eight, with which it is open at half a percent."""
    rounds = "2bit_no_feedback"

    def names(text: str, **changed: object) -> set[str]:
        search = ask(text, sequences=64, **changed)
        assert {m.name for m in search.refused}.isdisjoint(m.name for m in search.methods)
        return {m.name for m in search.methods}

    assert rounds in names("4 nodes x 8 A100, 1 Gbit/s")  # hosts' sums are exact
    assert rounds in names("4 nodes x 1 A100, 1 Gbit/s")
    assert rounds not in names("8 nodes x 1 A100, 1 Gbit/s")
    assert rounds in names("8 nodes x 8 A100, 1 Gbit/s", loss=0.006)
    assert rounds not in names("16 nodes x 4 A100, 1 Gbit/s", loss=0.006)
    assert rounds in names("8 nodes x 1 A100, 1 Gbit/s", loss="any")
    assert "3bit" in names("8 nodes x 8 A100, 1 Gbit/s")


def test_a_plan_says_which_betas_its_verdicts_are_of(tmp_path: Path) -> None:
    """1 bit was held against dense training with AdamW's b1 at 0.7, and nothing else."""
    path = tmp_path / "plan.json"
    slow = "2 nodes x 1 A100 80 GB, 0.05 Gbit/s"
    code, said = plan("demo", "--cluster", slow, "--batch=16", "--tokens=64", f"--output={path}")
    assert code == 0, said
    assert "gradients 1bit" in said
    assert "with AdamW's betas 0.7 and 0.95, as its verdicts have them" in said
    assert json.loads(path.read_text())["optimizer"]["params"]["betas"] == [0.7, 0.95]


def plan(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "200"})
    return result.exit_code, result.output


def test_the_command_answers_and_writes_a_file_that_validates(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    code, said = plan("demo", "--cluster", TEXT, "--batch=16", "--tokens=64", f"--output={path}")
    assert code == 0, said
    for part in ("Best:", "tokens/s", "one thing changed", "What would change it", "data sheet"):
        assert part in said
    assert "guess" in said
    result = CliRunner().invoke(app, ["validate", str(path)])
    assert result.exit_code == 0, result.output
    assert json.loads(path.read_text())["bf16"] == {"enabled": True}


def test_json_has_the_whole_answer(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    picture = tmp_path / "step.svg"
    asked = ["demo", "--cluster", TEXT, "--batch=16", "--tokens=64", "--json", f"--plot={picture}"]
    result = CliRunner().invoke(app, ["plan", *asked, f"--output={path}"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    best = found["best"]
    assert found["deepspeed"] == json.loads(path.read_text())
    assert best["tokens_per_s"] * best["step_s"] == pytest.approx(16 * 64)
    assert sum(best["parts_s"].values()) == pytest.approx(best["step_s"])
    assert sum(best["memory_bytes"].values()) == best["needed_bytes"] <= best["capacity_bytes"]
    assert best["micro_batch"] * best["micro_steps"] * 4 == found["sequences"] == 16
    least_s = min(one["step_s"] for one in found["beaten"] if one["fits"])
    assert best["step_s"] <= 1.01 * least_s
    assert all(figure["source"] for figure in found["figures"])
    assert "topk_1pct" in found["not_tried"]
    assert all(one["why"] for one in found["beaten"])
    links = [line for line in found["would_change"] if line.startswith("Links of")]
    assert [line.partition(":")[0] for line in found["would_change"]] == [
        *("Links of 0.25 Gbit/s", "Links of 4 Gbit/s"),
        "160 GB of memory",
        "ZeRO-1, no candidate, is not faster",
    ]
    assert all("tokens/s" in line for line in links)
    drawn = picture.read_text()
    assert all(word in drawn for word in (">compute<", ">network<", ">forward<", ">backward<"))


def test_a_function_that_cannot_be_told_how_many(tmp_path: Path) -> None:
    """Its batch is one micro-batch, and has no token ids: one of it a process without --batch."""
    path = tmp_path / "plan.json"
    fixed = ["tests.unit.estimate_models:fixed", "--modules=Mixer", f"--cluster={TEXT}"]
    code, said = plan(*fixed, f"--output={path}")
    assert code == 0, said
    assert "12 sequences" in said
    file = json.loads(path.read_text())
    assert file["train_micro_batch_size_per_gpu"] == 3
    assert file["gradient_accumulation_steps"] == 1
    code, said = plan(*fixed, "--batch=24", f"--output={path}")
    assert code == 0, said
    assert "micro-batch 3 x 2" in said
    code, said = plan(*fixed, "--batch=16")
    assert code == 1
    assert "write 12" in said


def test_a_function_that_can_be_told_must_be_told_where_nothing_counts_tokens() -> None:
    stack = ["tests.unit.estimate_models:stack", "--modules=Mixer", f"--cluster={TEXT}"]
    code, said = plan(*stack)
    assert code == 1
    assert "--batch 32" in said
    code, said = plan(*stack, "--batch=32")
    assert code == 0, said
    assert "32 sequences" in said


def test_a_hostfile_with_probed_links(tmp_path: Path) -> None:
    hosts, links = tmp_path / "hosts", tmp_path / "links.json"
    hosts.write_text("one slots=2\ntwo slots=2\n")
    Links(("one", "two"), (Pair("one", "two", 1e-4, 9e8, 9e8, 5e8, 6e8),)).save(links)
    code, said = plan("demo", f"--hostfile={hosts}", "--batch=16", "--tokens=64")
    assert code == 1
    assert "--device" in said
    assert "ds-ckpt probe" in said
    more = ("--device=L40S", f"--links={links}", "--batch=16", "--tokens=64")
    code, said = plan("demo", f"--hostfile={hosts}", *more)
    assert code == 0, said
    assert "measured" in said
    assert "links.json" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--cluster"),
        (["--cluster=many GPUs"], "4 nodes x 8 A100"),
        (["--cluster=2 nodes x 2 Z80, 1 Gbit/s"], "Z80"),
        (["--cluster=2 nodes x 2 A100, 0 Gbit/s"], "no rate"),
        (["--cluster=0 nodes x 2 A100, 1 Gbit/s"], "it must name nodes"),
        (["--cluster=2 nodes x 0 A100, 1 Gbit/s"], "it must name nodes"),
        (["--cluster=2 nodes x 2 A100, 1.2.3 Gbit/s"], "it must name nodes"),
        (["--cluster=2 nodes x 2 A100, 1 Gbit/s, . ms"], "it must name nodes"),
        ([f"--cluster={TEXT}", "--device=H100"], "leave it out"),
        ([f"--cluster={TEXT}", "--batch=3"], "write 4"),
        ([f"--cluster={TEXT}", "--loss=some"], "0.5%"),
        ([f"--cluster={TEXT}", "--loss=0.5"], "0.5%"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_words(arguments: list[str], said: str) -> None:
    code, output = plan("demo", "--tokens=64", *arguments)
    assert code != 0
    assert said in output


def test_help_has_an_example() -> None:
    assert "ds-ckpt plan llama-7b --cluster" in plan("--help")[1]
