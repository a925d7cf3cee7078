"""`ds-ckpt profile` as people call it: exit codes, files, and words for every mistake."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from ds_ckpt.cli import app
from ds_ckpt.lab.estimate.profiles import Profile
from ds_ckpt.telemetry.units import size
from ds_ckpt.zero3.resident import HOST_COPY

MODELS = "tests.unit.profile_models"
LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
}


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["profile", *arguments])


@pytest.fixture
def config_json(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return path


def test_a_configuration_file_a_json_and_a_plot(config_json: Path, tmp_path: Path) -> None:
    target, plot = tmp_path / "out.json", tmp_path / "out.svg"
    result = _run(
        str(config_json),
        *("--fake", "--batches", "1,2", "--dtype", "bf16", "--limit-gib", "8"),
        *("--json", str(target), "--plot", str(plot), "--policies", "block"),
    )
    assert result.exit_code == 0, result.output
    profile = Profile.from_json(target.read_text())
    assert (profile.class_name, profile.dtype) == ("LlamaForCausalLM", "bfloat16")
    assert [(f.policy, f.batch) for f in profile.footprints] == [
        ("none", 1),
        ("block", 1),
        ("none", 2),
        ("block", 2),
    ]
    assert profile.footprints[0].tokens == 64
    assert profile.best is not None
    assert profile.states.assumed
    assert all(f.times is None for f in profile.footprints)
    assert any("--fake" in text for text in profile.not_measured)
    assert "LlamaForCausalLM" in result.output
    assert plot.read_text().startswith("<?xml")


def test_a_directory_and_a_deepspeed_file(config_json: Path, tmp_path: Path) -> None:
    ds = tmp_path / "ds.json"
    ds.write_text(
        json.dumps(
            {
                "bf16": {"enabled": True},
                "optimizer": {"type": "SGD"},
                "zero_optimization": {"stage": 3, "reduce_bucket_size": 1000},
                "ds_ckpt": {"activation": {"policy": "every_n", "every_n": 2}},
            }
        )
    )
    target = tmp_path / "out.json"
    result = _run(
        *(str(config_json.parent), "--config", str(ds), "--world", "4", "--fake"),
        *("--tokens", "16", "--json", str(target), "--policies", "block"),
    )
    assert result.exit_code == 0, result.output
    profile = Profile.from_json(target.read_text())
    assert [f.policy for f in profile.footprints] == ["none", "configured", "block"]
    assert profile.dtype == "bfloat16"
    assert (profile.states.world, profile.states.optimizer) == (4, "SGD")
    assert profile.states.reduce_bucket_bytes == 2000
    held = {f.policy: f.held_bytes for f in profile.footprints}
    assert held["block"] < held["configured"] < held["none"]


def test_resident_weights_on_hosts(config_json: Path, tmp_path: Path) -> None:
    ds, target = tmp_path / "ds.json", tmp_path / "out.json"
    zero: dict[str, Any] = {"stage": 3}

    def run(ours: dict[str, Any], *options: str) -> Result:
        settings = {"bf16": {"enabled": True}, "zero_optimization": zero, "ds_ckpt": ours}
        ds.write_text(json.dumps(settings))
        always = ("--fake", "--policies", "block", "--json", str(target), "--world", "8")
        return _run(str(config_json), "--config", str(ds), *always, *options)

    def profile(ours: dict[str, Any], *options: str) -> tuple[Profile, str]:
        result = run(ours, *options)
        assert result.exit_code == 0, result.output
        return Profile.from_json(target.read_text()), " ".join(result.output.split())

    resident, on_4 = {"weights": {"resident": True}}, ("--hosts", "4")
    kept, said = profile(resident, *on_4)
    half = kept.states.parameters_count  # of 2 bytes each; no parameter is padded
    assert kept.states.host_copy_bytes == half
    assert "A process of 8 on 4 hosts" in said
    assert f"host's copy of the weights {size(half)}" in said
    assert f"Resident weights take {size(half)} a process" in said

    without, said = profile({}, *on_4)
    assert without.states.resident_bytes == kept.states.resident_bytes - half
    assert "host's copy" not in said
    assert f"resident weights would keep gathers inside each, for {size(half)} a process" in said
    assert "esident weights" not in profile({})[1]  # hosts are not known

    budget = without.states.resident_bytes / 2**30  # leaves nothing for activations
    section = {"policy": "budget", "budget_gib": budget, "budget_of": "accelerator"}
    refused = run({**resident, "activation": section}, *on_4)
    assert refused.exit_code == 1
    assert f"without {HOST_COPY}" in " ".join(refused.stderr.split())

    zero["offload_param"] = {"device": "cpu"}  # refused with resident weights
    assert "esident weights" not in profile({}, *on_4)[1]


def test_hosts_that_do_not_divide_the_processes() -> None:
    result = _run(f"{MODELS}:stack", "--fake", "--world", "8", "--hosts", "3")
    assert result.exit_code == 1
    assert "--hosts: found 3" in result.stderr


def test_a_function_real_steps_and_the_compiler(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    result = _run(
        f"{MODELS}:stack_with_a_break",
        *("--real", "--repeats", "1", "--compile", "--policies", "block", "--json", str(target)),
    )
    assert result.exit_code == 0, result.output
    profile = Profile.from_json(target.read_text())
    first = profile.footprints[0]
    assert first.times is not None
    assert first.real_held_bytes == first.held_bytes
    assert profile.compiled is not None
    assert profile.compiled.breaks
    lines = [f.config for f in profile.findings if f.config and "ds_ckpt" in f.config]
    assert lines
    assert all(line["ds_ckpt"]["activation"]["modules"] == ["Mixer"] for line in lines)


def test_a_batch_that_was_asked_for_is_among_the_others() -> None:
    options = ["--fake", "--batches", "2,4", "--tokens", "8", "--policies", "block"]
    without, with_it = (_run("demo", *options, *more) for more in ([], ["--batch", "1"]))
    rows = [re.findall(r"^ none +(\d+) +\d", r.output, re.M) for r in (without, with_it)]
    assert rows == [["2", "4"], ["1", "2", "4"]]


def test_other_batches_of_a_function_that_takes_none() -> None:
    result = _run(f"{MODELS}:fixed", "--fake", "--batches", "1,2", "--policies", "block")
    assert result.exit_code == 0, result.output
    assert "takes no argument named batch" in " ".join(result.output.split())


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
    assert "check the name" in result.stderr


def test_a_batch_that_is_too_big(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_ckpt.lab.estimate.profile.free_on", lambda device: 1000)
    result = _run(f"{MODELS}:stack", "--real", "--batch", "3", "--policies", "block")
    assert result.exit_code == 1
    assert "--batch" in result.stderr
    assert "at 3" in result.stderr
    assert "too big" in result.stderr
    assert "GiB where" in result.stderr
    unasked = _run(f"{MODELS}:stack", "--policies", "block")
    assert unasked.exit_code == 0
    assert "not measured: times at batch 1" in " ".join(unasked.output.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--policies", "blocks"], "no policy has this name"),
        (["--plot", "p.gif"], "end the name in .png or .svg"),
        (["--attention", "magic", "--fake"], "magic"),
        (["--config", "no-such.json"], "no-such.json"),
    ],
)
def test_options_that_cannot_be_served(arguments: list[str], words: str) -> None:
    result = _run("demo", *arguments)
    assert result.exit_code == 1
    assert words in result.stderr
    assert "fix:" in result.stderr


def test_more_tokens_than_the_model_has_positions(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gpt2", "n_embd": 16, "n_head": 2, "n_layer": 1}))
    result = _run(str(path), "--tokens", "2000", "--fake")
    assert result.exit_code == 1
    assert "1024 positions" in result.stderr


@pytest.mark.parametrize(
    "arguments", [["--batches", "1,x"], ["--batches", "0"], ["--dtype", "int8"], ["--batch", "0"]]
)
def test_options_that_are_none(arguments: list[str]) -> None:
    result = _run("demo", *arguments)
    assert result.exit_code == 2


def test_a_wrong_deepspeed_file(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"ds_ckpt": {"activation": {"polcy": "block"}}}')
    result = _run("demo", "--config", str(path))
    assert result.exit_code == 1
    assert "$.ds_ckpt.activation.polcy" in result.stderr


def test_a_file_without_sections_is_plain_deepspeed(tmp_path: Path) -> None:
    path, target = tmp_path / "ds.json", tmp_path / "out.json"
    path.write_text("{}")
    result = _run(
        *(f"{MODELS}:stack", "--config", str(path), "--fake", "--policies", "block"),
        *("--json", str(target)),
    )
    assert result.exit_code == 0, result.output
    profile = Profile.from_json(target.read_text())
    assert (profile.states.zero_stage, profile.states.assumed) == (0, False)
    assert any("AdamW is assumed" in text for text in profile.not_measured)


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    target = tmp_path / "no" / "out.json"
    result = _run(f"{MODELS}:stack", "--fake", "--policies", "block", "--json", str(target))
    assert result.exit_code == 1
    assert "cannot be written" in result.stderr
