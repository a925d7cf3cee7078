"""examples/: each runs in a few steps, as its first lines say; hostfiles are for `tests/hosts`."""

import ast
import json
import math
import re
from pathlib import Path

import pytest

from ds_ckpt.config import load_file, parse
from ds_ckpt.lab.hosts.backends import Loopback
from ds_ckpt.lab.hosts.launcher import deepspeed

pytestmark = pytest.mark.timeout(540)
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPTS = sorted(p for p in EXAMPLES.glob("*.py") if p.stem != "corpus")


def _run(script: str, folder: Path, *options: str) -> str:
    """Return the output of two ranks, started by the real `deepspeed`, which compiles operators if
    no earlier run has."""
    return deepspeed(Loopback(2), [str(EXAMPLES / script), *options], folder, limit_s=500)


def _losses(output: str) -> list[float]:
    found = [float(x) for x in re.findall(r"loss (\d+\.\d+)", output)]
    assert found, output
    assert all(map(math.isfinite, found))
    return found


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.stem)
def test_it_is_short_and_valid_and_names_its_command(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    assert 40 <= len(text.splitlines()) <= 85
    assert f"examples/{script.name}" in (ast.get_docstring(ast.parse(text)) or "")
    parse(load_file(script.with_suffix(".json")))


@pytest.mark.slow
@pytest.mark.distributed
def test_a_plain_script(tmp_path: Path) -> None:
    output = _run("train.py", tmp_path, "--steps", "12")
    losses = _losses(output)
    assert losses[-1] < losses[0]
    assert "MiB without the policy (computed)\nds_ckpt: gradients sent per rank" in output


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("script", "limit", "package"),
    [("lora.py", 6, "peft"), ("trainer.py", 2, "accelerate"), ("dpo.py", 0.7, "trl")],
)
def test_trainers(script: str, limit: float, package: str, tmp_path: Path) -> None:
    pytest.importorskip(package, reason="pip install -e .[hf,trainers]")
    output = _run(script, tmp_path, "--steps", "12")
    (loss,) = (float(x) for x in re.findall(r"mean loss of 12 steps: (\d+\.\d+)", output))
    assert 0 < loss < limit
    assert " on 4 blocks (" in output


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("method", ["topk", "powersgd"])
def test_presets_of_tensor_parallelism(method: str, tmp_path: Path) -> None:
    """The plain script on two by two ranks; here compression begins in the third step, in fp32."""
    preset = load_file(EXAMPLES.parent / "ds_configs" / f"zero3_partition_{method}.json")
    preset["bf16"]["enabled"] = False
    preset["optimizer"]["params"]["torch_adam"] = True
    preset["ds_ckpt"]["compression"] |= {"warmup_steps": 2, "exchange": {"autotune": False}}
    config = tmp_path / "preset.json"
    config.write_text(json.dumps(preset))
    argv = [str(EXAMPLES / "train.py"), "--steps", "6", "--config", str(config)]
    said = deepspeed(Loopback(4), argv, tmp_path, limit_s=500)
    assert _losses(said)[-1] < _losses(said)[0]
    assert "split over the tensor-parallel group" in said
    assert re.search(r"(Top-K|rank 16).* tensors: [\d.]+% of uncompressed gradient bytes", said)


@pytest.mark.slow
@pytest.mark.distributed
def test_an_unchanged_script_through_ds_ckpt(tmp_path: Path) -> None:
    """The script of two nodes, on one node; `tests/hosts/test_training.py` uses a hostfile."""
    config = str(EXAMPLES / "two_hosts.json")
    argv = ["--module", "ds_ckpt.run", str(EXAMPLES / "two_hosts.py")]
    argv += ["--deepspeed_config", config, "--steps", "12"]
    output = deepspeed(Loopback(2), argv, tmp_path)
    losses = _losses(output)
    assert losses[-1] < losses[0]
    assert "processes on:" in output
