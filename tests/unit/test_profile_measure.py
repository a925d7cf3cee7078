"""A step on fake tensors against real ones, and against counters that know nothing of it."""

from __future__ import annotations

import collections
import re
from dataclasses import replace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from ds_ckpt.activation.planning.survey import survey
from ds_ckpt.errors import ConfigError, UnsupportedError
from ds_ckpt.lab.estimate.observe import built_real, checkpointed, footprints, real_bytes
from ds_ckpt.lab.estimate.policies import ComparedPolicy, compared
from ds_ckpt.lab.estimate.profiles import Footprint
from ds_ckpt.lab.subject import Sizes, Subject, find_subject, run_forward
from ds_ckpt.telemetry.memory import OUTSIDE
from tests import architectures
from tests.unit.profile_models import WIDTH

CPU = torch.device("cpu")
KINDS = ("llama", "gpt2", "bert", "bart", "t5", "vit", "mixtral")
STACK = "tests.unit.profile_models:stack"


def _subject(kind: str, **options: object) -> Subject:
    def build(count: int) -> tuple[torch.nn.Module, object]:
        return architectures.build(kind, layers=2, **options), architectures.batch(kind)

    return Subject(kind, build)


@pytest.mark.parametrize("kind", KINDS)
def test_fake_tensors_hold_what_real_ones_hold(kind: str) -> None:
    wanted = compared(("block", "selective"), None, None)
    subject = _subject(kind)
    model, batch = built_real(subject, 2, CPU)
    for choice, footprint in zip(wanted, footprints(subject, 2, wanted, None), strict=True):
        held, _ = real_bytes(model, batch, choice, CPU)
        assert footprint.held_bytes == pytest.approx(held, rel=0.03)
        assert sum(b.total_bytes for b in footprint.blocks) == footprint.held_bytes


def test_the_peak_is_the_allocators() -> None:
    subject = find_subject("demo", Sizes(tokens=192))
    wanted = compared(("block", "mlp", "selective"), None, None)
    model, batch = built_real(subject, 1, CPU)
    for choice, footprint in zip(wanted, footprints(subject, 1, wanted, None), strict=True):
        held, peak = real_bytes(model, batch, choice, CPU)
        assert footprint.held_bytes == held
        # beyond the tensors, the allocator sees what operators take inside
        assert footprint.peak.live_bytes == pytest.approx(peak, rel=0.03)
        assert footprint.peak.live_bytes <= peak


def test_real_tensors_under_observation_do_the_same_work() -> None:
    wanted = compared(("block",), None, None)
    fake = footprints(_subject("llama"), 2, wanted, None)
    real = footprints(_subject("llama"), 2, wanted, None, CPU)
    for one, other in zip(fake, real, strict=True):
        assert (one.flops, one.launches) == (other.flops, other.launches)
        assert (one.fake, other.fake) == (True, False)


def test_the_planners_survey_says_the_same() -> None:
    (footprint,) = footprints(_subject("llama"), 2, compared((), None, None), None)
    found = survey(architectures.build("llama", layers=2), (), architectures.batch("llama"))
    assert found.saved_bytes == footprint.held_bytes
    assert found.flops == footprint.forward.flops
    held = [b.total_bytes for b in footprint.blocks if b.name != OUTSIDE]
    assert [b.saved_bytes for b in found.blocks] == held


@pytest.fixture(scope="module")
def plain() -> dict[str, Footprint]:
    subject = find_subject(STACK, Sizes())
    found = footprints(subject, 2, compared(("block",), ["Mixer"], None), ["Mixer"])
    return {f.policy: f for f in found}


def test_launches_are_those_that_torchs_profiler_sees(plain: dict[str, Footprint]) -> None:
    subject = find_subject(STACK, Sizes())
    for choice in compared(("block",), ["Mixer"], None):
        model, batch = built_real(subject, 2, CPU)
        with checkpointed(model, choice), profile(activities=[ProfilerActivity.CPU]) as seen:
            run_forward(model, batch).backward()
        # the product that the early stop ends is entered and never gets to copy its bias
        events = collections.Counter(
            e.name
            for e in seen.events()
            if e.name != "aten::addmm" or any(c.name == "aten::copy_" for c in e.cpu_children)
        )
        counted: collections.Counter[str] = collections.Counter()
        for name, number in plain[choice.name].operators:
            counted[name.rsplit(".", 1)[0]] += number
        assert sum(counted.values()) == plain[choice.name].launches
        for operator in ("mm", "addmm", "gelu", "gelu_backward"):
            assert counted[f"aten.{operator}"] == events[f"aten::{operator}"] > 0


def test_the_ratio_of_launches_and_flops_is_the_recompute(plain: dict[str, Footprint]) -> None:
    none, block = plain["none"], plain["block"]
    # products of a block on 2 x 8 rows: two; the recompute ends before the second one's result
    product = 2 * 16 * WIDTH * 4 * WIDTH
    assert none.forward.flops == 4 * 2 * product
    assert none.recompute.flops == none.recompute.launches == 0
    assert block.recompute.flops == 4 * product
    assert block.recompute.launches == 4 * 2  # addmm, gelu
    assert block.launches - none.launches == block.recompute.launches
    assert block.backward.flops == none.backward.flops == 4 * 4 * product


def test_bytes_belong_to_the_block_that_saves_them(plain: dict[str, Footprint]) -> None:
    rows = 2 * 8 * WIDTH * 4
    none = {b.name: b for b in plain["none"].blocks}
    assert list(none) == [*(f"layers.{i}" for i in range(4)), OUTSIDE]
    # what goes in, what GELU gets, what it gives; `square` keeps the last result
    assert none["layers.2"].total_bytes == rows + 2 * 4 * rows
    assert none[OUTSIDE].total_bytes == rows
    block = {b.name: b for b in plain["block"].blocks}
    assert block["layers.2"].checkpointed_bytes == block["layers.2"].total_bytes == rows


def test_parts_of_a_transformer_are_told_apart() -> None:
    (none, kept) = footprints(_subject("llama"), 2, compared(("attention",), None, None), None)
    first = none.blocks[0]
    assert min(first.attention_bytes, first.mlp_bytes, first.norm_bytes) > 0
    assert first.checkpointed_bytes == 0
    assert kept.blocks[0].attention_bytes == 0
    assert kept.blocks[0].mlp_bytes == first.mlp_bytes
    assert kept.blocks[0].checkpointed_bytes > 0


def test_the_peak_names_its_phase_and_block(plain: dict[str, Footprint]) -> None:
    assert plain["none"].peak.kind == "backward"
    assert plain["none"].peak.block == "layers.3"
    assert plain["block"].peak.block.startswith("layers.")
    assert plain["block"].peak.live_bytes < plain["none"].peak.live_bytes


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

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(Wide() for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.sum()

    subject = Subject("wide", lambda _: (Model(), torch.randn(1000)))
    wanted = [ComparedPolicy("block", {"policy": "block", "modules": ["Wide"]})]
    (footprint,) = footprints(subject, 1, wanted, ["Wide"])
    assert footprint.peak.kind in ("recompute", "backward")
    assert footprint.peak.live_bytes > 20 * 4000
    assert footprint.peak.words() == f"{footprint.peak.kind} of {footprint.peak.block}"


def test_eager_attention_is_seen_and_a_core_too() -> None:
    wanted = compared((), None, None)
    (eager,) = footprints(_subject("llama", attn_implementation="eager"), 2, wanted, None)
    (core,) = footprints(_subject("llama", attn_implementation="sdpa"), 2, wanted, None)
    # weights of 2 sequences, 2 heads, 11 x 11 positions in 32 bits, of 2 blocks: 2 storages each
    weights = 2 * 2 * 11 * 11 * 4
    assert eager.score_bytes >= 2 * weights
    assert eager.core_avoided_bytes == 0
    assert (core.score_bytes, core.core_avoided_bytes) == (0, 2 * weights)
    assert eager.held_bytes > core.held_bytes


def test_attention_weights_are_no_hidden_states_of_their_size() -> None:
    # as many tokens as entries of a head: both have batch x heads x tokens x 32 entries
    subject = find_subject("demo", Sizes(tokens=32, attention="eager"))
    (found,) = footprints(subject, 1, compared((), None, None), None)
    (wide,) = footprints(
        find_subject("demo", Sizes(tokens=64, attention="eager")), 1, compared((), None, None), None
    )
    assert 0 < found.score_bytes < found.part_bytes("attention")
    assert wide.score_bytes == 4 * found.score_bytes


def test_auto_goes_on_with_the_plan_that_needs_least_below_its_limit() -> None:
    subject = find_subject("demo", Sizes(tokens=64))
    section = {"policy": "auto", "budget_gib": 2**-16}
    with pytest.raises(UnsupportedError) as caught:
        footprints(subject, 1, compared((), None, section), None)
    needed = re.search(r"write at least ([\d.]+) GiB", str(caught.value))
    assert needed is not None
    assert "found 1.52588e-05 GiB" in str(caught.value)  # what was written
    section["budget_gib"] = float(needed[1])  # planned for is less
    _, found = footprints(subject, 1, compared((), None, section), None)
    assert found.recompute.launches > 0


@pytest.mark.parametrize("policy", ["budget", "auto"])
def test_a_budget_is_profiled_with_the_plan_that_it_leads_to(policy: str) -> None:
    subject = find_subject("demo", Sizes(tokens=64))
    (plain,) = footprints(subject, 1, compared((), None, None), None)
    section = {"policy": policy, "budget_gib": 0.6 * plain.held_bytes / 2**30}
    wanted = compared((), None, section)
    _, planned = footprints(subject, 1, wanted, None)
    assert planned.recompute.launches > 0
    assert 0 < planned.held_bytes <= 0.6 * plain.held_bytes
    _, real = footprints(subject, 1, wanted, None, CPU)
    assert real.held_bytes <= 0.6 * plain.held_bytes
    assert real.recompute.launches > 0


def test_a_plan_without_a_limit_is_refused_and_says_which_option() -> None:
    subject = find_subject("demo", Sizes(tokens=16))
    with pytest.raises(ConfigError, match="--limit-gib"):
        footprints(subject, 1, compared((), None, {"policy": "auto"}), None)


def test_a_budget_of_the_accelerator_takes_off_what_zero_keeps() -> None:
    subject = find_subject("demo", Sizes(tokens=64))
    (plain,) = footprints(subject, 1, compared((), None, None), None)
    section = {"policy": "budget", "budget_gib": 1.0, "budget_of": "accelerator"}
    wanted = compared((), None, section)
    assert footprints(subject, 1, wanted, None)[1].recompute.launches == 0
    full = 2**30 - int(0.8 * plain.held_bytes)
    wanted = [replace(c, resident={"states": full}) for c in wanted]
    assert footprints(subject, 1, wanted, None)[1].recompute.launches > 0
