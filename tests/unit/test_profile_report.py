"""Records, findings, tables and the plot, from profiles that were measured."""

from __future__ import annotations

import dataclasses
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from rich.console import Console

from ds_ckpt.config import parse
from ds_ckpt.lab.estimate import profiles as records
from ds_ckpt.lab.estimate.findings import Settings, _spans, best_of, findings_of
from ds_ckpt.lab.estimate.profile import Options, make_profile
from ds_ckpt.lab.estimate.profile_report import document, picture
from ds_ckpt.lab.estimate.profiles import (
    BlockCompiled,
    Break,
    Compiled,
    Finding,
    Footprint,
    Peak,
    Profile,
    Times,
    Work,
)
from ds_ckpt.lab.report import charts
from ds_ckpt.lab.report.document import Table
from ds_ckpt.lab.subject import Sizes
from ds_ckpt.telemetry.units import size

COMPILED = Compiled(
    graphs=2,
    breaks=(Break("print", "model.py:3 in forward"),),
    captured_flops=90,
    flops=100,
    captured_operators=40,
    operators=50,
    eager_held_bytes=900,
    min_cut_bytes=600,
    blocks=tuple(
        BlockCompiled(f"model.layers.{i}", 5, 10, 100, 90, 10, i in (0, 1, 4)) for i in range(6)
    ),
)


@pytest.fixture(scope="module")
def measured() -> Profile:
    """Two batches of the demo's model, attention eager, real steps of one of them."""
    return make_profile(
        Options(
            "demo",
            batches=(1, 2),
            sizes=Sizes(tokens=32, attention="eager"),
            policies=("block", "attention", "selective"),
            real=True,
            repeats=1,
            limit_bytes=2**40,
        )
    )


@pytest.fixture(scope="module")
def full(measured: Profile) -> Profile:
    return replace(measured, compiled=COMPILED)


def test_json_is_read_back_as_it_was(full: Profile) -> None:
    assert Profile.from_json(full.to_json()) == full


def test_json_of_something_else_is_refused(full: Profile) -> None:
    data = json.loads(full.to_json())
    with pytest.raises(ValidationError, match="schema"):
        Profile.from_json(json.dumps({**data, "schema": 1}))
    del data["states"]["world"]
    with pytest.raises(ValidationError, match="world"):
        Profile.from_json(json.dumps(data))


def test_every_number_has_its_unit_in_its_name() -> None:
    units = ("_bytes", "_s", "_per_s", "_count", "_share", "flops", "launches", "operators")
    bare = {
        "batch",
        "tokens",
        "repeats",
        "world",
        "hosts",
        "zero_stage",
        "graphs",
        "kernels",
        "schema",
    }
    for kind in vars(records).values():
        if not dataclasses.is_dataclass(kind):
            continue
        for field in dataclasses.fields(kind):
            if field.type in ("int", "float", "int | None", "float | None"):
                assert field.name.endswith(units) or field.name in bare, (kind, field.name)


def test_the_names_in_the_file_stay(full: Profile) -> None:
    data = json.loads(full.to_json())
    assert data["schema"] == 2
    assert set(data) >= {"model", "states", "footprints", "findings", "best", "not_measured"}
    assert set(data["footprints"][0]) >= {
        "policy",
        "batch",
        "held_bytes",
        "peak",
        "blocks",
        "forward",
        "recompute",
        "backward",
        "times",
        "real_held_bytes",
    }
    assert set(data["footprints"][0]["forward"]) == {"launches", "flops", "moved_bytes"}


def _findings(profile: Profile, modules: Any = None) -> list[Finding]:
    sections = {
        f.policy: None if f.policy == "none" else {"policy": f.policy} for f in profile.footprints
    }
    return list(findings_of(profile, Settings(sections, trainable_count=4, modules=modules)))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"compiled": COMPILED},
        {"compiled": COMPILED, "modules": ["Block", "layers.*"]},
        {"limit_bytes": 1},
        {"limit_bytes": 2**34},
        {"limit_bytes": "less than no policy"},
    ],
)
def test_the_line_of_every_finding_is_a_valid_configuration(
    measured: Profile, changes: dict[str, Any]
) -> None:
    if changes.get("limit_bytes") == "less than no policy":
        changes = {"limit_bytes": measured.total_bytes(measured.first) - 1}
    modules = changes.pop("modules", None)
    found = _findings(replace(measured, **changes), modules)
    with_line = [f for f in found if f.config is not None]
    assert len(with_line) >= 5
    for finding in (*with_line, *(f for f in measured.findings if f.config is not None)):
        assert finding.config is not None
        parse({"zero_optimization": {"stage": 3}, **finding.config}, source=finding.text)
        assert json.loads("{" + str(finding.line) + "}") == finding.config


def test_eager_attention_is_told_with_what_sdpa_saves(measured: Profile) -> None:
    (finding,) = [f for f in measured.findings if f.text.startswith("Attention is eager")]
    assert 'attn_implementation="sdpa"' in finding.text
    assert measured.attention == "eager"
    assert finding.config == {"ds_ckpt": {"activation": {"policy": "attention"}}}


def test_blocks_that_the_compiler_leaves_get_rules(measured: Profile) -> None:
    found = _findings(replace(measured, compiled=COMPILED))
    (finding,) = [f for f in found if f.text.startswith("torch.compile")]
    assert "90%" in finding.text
    assert "print (model.py:3 in forward)" in finding.text
    assert finding.config is not None
    rules = finding.config["ds_ckpt"]["activation"]["rules"]
    assert [rule["match"] for rule in rules] == ["0-1", "4"]
    assert _spans([3]) == ["3"]


def test_a_smaller_micro_batch_leaves_the_step_as_it_is(measured: Profile) -> None:
    """Where most is saved outside the blocks: with 8 micro-steps of 5 and of 6 sequences."""
    small = measured.at_first["block"]
    outside = replace(small.blocks[-1], name="head") if small.blocks else None
    assert outside is not None
    for batch, smaller in ((5, 1), (6, 3)):
        first = [
            replace(f, batch=batch, held_bytes=max(1, f.part_bytes("outside")))
            for f in measured.footprints
            if f in measured.at_first.values()
        ]
        profile = replace(measured, footprints=tuple(first))
        sections = {f.policy: {"policy": f.policy} for f in first}
        found = findings_of(profile, Settings(sections, accumulation=8))
        config = next(f.config for f in found if f.text.startswith("The peak"))
        assert config == {
            "train_micro_batch_size_per_gpu": smaller,
            "gradient_accumulation_steps": 8 * batch // smaller,
        }


def _weights(profile: Profile, **settings: Any) -> Finding | None:
    sections = {f.policy: {"policy": f.policy} for f in profile.footprints}
    profile = replace(profile, states=replace(profile.states, hosts=2))
    found = findings_of(profile, Settings(sections, **settings))
    return next((f for f in found if "esident weights" in f.text), None)


def test_resident_weights_against_what_checkpointing_frees(measured: Profile) -> None:
    profile = replace(measured, limit_bytes=None)
    small = min(profile.at_first.values(), key=lambda f: f.peak.live_bytes)
    freed = profile.first.peak.live_bytes - small.peak.live_bytes
    section = {"activation": {"policy": small.policy}, "weights": {"resident": True}}
    on = {"ds_ckpt": section}
    assert _weights(profile) is None  # hosts are not known
    half = _weights(profile, resident_bytes=freed // 2)
    assert half is not None
    assert half.config == on
    assert f'50% of the {size(freed)} that "{small.policy}" frees' in half.text
    assert f"{size(freed // 2)} a process" in half.text
    double = _weights(profile, resident_bytes=2 * freed)
    assert double is not None
    assert "does not pay for them" in double.text
    assert double.config is None
    none = _weights(profile, resident_bytes=0)
    assert none is not None
    assert "that hpZ takes already" in none.text
    assert none.config == on
    configured = _weights(profile, resident_bytes=freed // 2, resident=True)
    assert configured is not None
    assert configured.text.startswith(f"Resident weights take {size(freed // 2)} a process")

    least = profile.total_bytes(small)
    for room, config in ((freed // 2, on), (freed // 2 - 1, None)):
        limited = _weights(replace(profile, limit_bytes=least + room), resident_bytes=freed // 2)
        assert limited is not None
        assert limited.config == config
        assert ("in all are more than" in limited.text) is (config is None)


def test_a_copy_of_the_weights_without_which_it_fits_is_named(measured: Profile) -> None:
    copied = replace(measured, states=replace(measured.states, hosts=2, host_copy_bytes=2**24))
    least = min(map(copied.total_bytes, copied.footprints))
    assert least == min(map(measured.total_bytes, measured.footprints)) + 2**24

    def last(limit: int) -> Finding:
        return _findings(replace(copied, limit_bytes=limit))[-1]

    fits = last(least - 2**24)
    assert f"(16.0 MiB) {size(least - 2**24)} fit" in fits.text
    assert fits.config is not None
    assert fits.config["ds_ckpt"] == {"weights": {"resident": False}}
    assert fits.config["zero_optimization"]["zero_hpz_partition_size"] == 1
    parse(fits.config)
    assert "Without a host's copy" not in last(least - 2**24 - 1).text


def _step(policy: str, batch: int, peak: int, step_s: float | None) -> Footprint:
    work = Work(1, 10, 1)
    times = None if step_s is None else Times("CPU", 1, step_s / 2, step_s / 2, 0.0)
    top = Peak(peak, "forward", "a")
    return Footprint(policy, batch, 10, True, peak, (), top, work, work, work, 0, times=times)


def test_the_best_batch_is_the_fastest_that_fits(measured: Profile) -> None:
    base = measured.states.resident_bytes
    steps = (
        _step("none", 1, 100, 1.0),
        _step("none", 4, 400, 2.0),
        _step("block", 4, 40, 3.0),
        _step("block", 8, 80, 5.0),
    )
    profile = replace(measured, footprints=steps, limit_bytes=base + 100)
    best = best_of(profile)
    assert best is not None
    assert (best.policy, best.batch, best.tokens_per_s) == ("block", 8, 16.0)
    assert best.total_bytes == base + 80
    roomy = best_of(replace(profile, limit_bytes=base + 400))
    assert roomy is not None
    assert (roomy.policy, roomy.batch) == ("none", 4)
    assert best_of(replace(profile, limit_bytes=base + 10)) is None


def test_without_times_the_best_is_the_largest_batch(measured: Profile) -> None:
    steps = (_step("none", 1, 100, None), _step("block", 4, 40, None))
    base = measured.states.resident_bytes
    best = best_of(replace(measured, footprints=steps, limit_bytes=base + 100))
    assert best is not None
    assert (best.policy, best.batch, best.tokens_per_s) == ("block", 4, None)


def test_the_tables_say_all_of_it(full: Profile) -> None:
    target = io.StringIO()
    document(full).print(Console(file=target, width=100))
    text = target.getvalue()
    for words in ("saved activations", "launches", "real steps", "against the batch", "captured"):
        assert words in text.lower()
    assert "<- best" in text
    for finding in full.findings:
        assert finding.line is None or finding.line.split(":")[0] in text


def test_no_number_is_cut_in_eighty_columns(full: Profile) -> None:
    target = io.StringIO()
    document(full).print(Console(file=target, width=80))
    tables = [b for s in document(full).sections for b in s.blocks if isinstance(b, Table)]
    assert len(tables) == 6
    whole = " ".join(target.getvalue().split())
    for cell in (cell for table in tables for row in table.rows for cell in row[1:]):
        assert cell in whole, cell


def test_the_plot_tells_policies_and_kinds_by_words_and_hatches(
    full: Profile, tmp_path: Path
) -> None:
    charts.save(picture(full), tmp_path / "p.svg")
    svg = (tmp_path / "p.svg").read_text()
    for words in ("attention", "MLP", "kept for recompute", "block", "launches", "tokens/s"):
        assert words in svg
    assert svg.count("<pattern") >= 4  # hatches
    assert "stroke-dasharray" in svg
    charts.save(picture(full), tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_a_limit_that_no_policy_exceeds_proposes_a_budget(measured: Profile) -> None:
    plain = measured.total_bytes(measured.first)
    least = min(map(measured.total_bytes, measured.at_first.values()))
    assert least < plain - 2**20

    def proposed(limit: int, **changes: Any) -> dict[str, Any] | None:
        found = _findings(replace(measured, limit_bytes=limit, **changes))
        sections = [
            f.config["ds_ckpt"]["activation"] for f in found if f.config and "budget" in f.text
        ]
        return sections[0] if sections else None

    assert proposed(plain) is None
    assert proposed(least - 1) is None
    section = proposed(plain - 1)
    assert section is not None
    assert (section["policy"], section["budget_of"]) == ("budget", "accelerator")
    assert 0 <= (plain - 1) / 2**30 - section["budget_gib"] < 0.0011
    stage2 = replace(measured.states, zero_stage=2)
    other = proposed(plain - 1, states=stage2)
    assert other is not None
    assert other["budget_of"] == "activations"
    left = (plain - 1 - measured.states.resident_bytes) / 2**30
    assert 0 <= left - other["budget_gib"] < 0.0011


def test_what_is_kept_elsewhere_is_said_not_to_be_counted() -> None:
    section = {"policy": "block", "offload": True, "partition": True}
    config = {"zero_optimization": {"stage": 3}, "ds_ckpt": {"activation": section}}
    options = Options("demo", config, sizes=Sizes(tokens=8), policies=(), real=False)
    said = make_profile(options).not_measured
    assert [s.split(":")[0] for s in said if "counts as saved" in s] == ["offload", "partition"]
