"""Every preset is read by all who will read it: us, DeepSpeed, HF's config class, accelerate.

And DeepSpeed's launcher reads the hostfiles. All in this process, without a process group.
"""

import copy
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ds_ckpt.config import load_file, parse

ROOT = Path(__file__).parents[2]
PRESETS = sorted((ROOT / "ds_configs").glob("*.json"))
_NUMBERS = {"learning_rate": 3e-4, "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_epsilon": 1e-8}
_NUMBERS |= {"world_size": 1, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
_NUMBERS |= {"max_grad_norm": 1.0, "weight_decay": 0.1}
_SWITCHES = dict.fromkeys(("fp16", "fp16_full_eval", "bf16_full_eval", "save_on_each_node"), False)
TRAINER_ARGUMENTS = SimpleNamespace(
    **_NUMBERS, **_SWITCHES, bf16=True, get_warmup_steps=lambda steps: steps // 10
)
MODEL = SimpleNamespace(config=SimpleNamespace(hidden_size=64))


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    yield
    if hf := sys.modules.get("transformers.integrations.deepspeed"):
        hf.unset_hf_deepspeed_config()


each_preset = pytest.mark.parametrize("preset", PRESETS, ids=lambda p: p.stem)


def _filled_by_the_trainer(config: dict[str, Any]) -> dict[str, Any]:
    """The preset after `TrainingArguments` and the Trainer have filled in "auto"."""
    hf = pytest.importorskip("transformers.integrations.deepspeed")
    filled = hf.HfTrainerDeepSpeedConfig(copy.deepcopy(config))
    arguments = copy.copy(TRAINER_ARGUMENTS)
    betas = config["optimizer"]["params"]["betas"]
    if betas != "auto":  # they must be those of the arguments
        arguments.adam_beta1, arguments.adam_beta2 = betas
    filled.trainer_config_process(arguments)
    filled.trainer_config_finalize(arguments, MODEL, num_training_steps=100)
    result: dict[str, Any] = filled.config
    return result


def test_the_readme_describes_each_preset() -> None:
    readme = (ROOT / "ds_configs" / "README.md").read_text()
    assert [p.name for p in PRESETS if f"`{p.name}`" not in readme] == []


@each_preset
def test_we_read_it(preset: Path) -> None:
    config = parse(load_file(preset))
    assert config.active
    name, method = preset.stem, config.compression.method
    policies = {"block": "block", "selective": "selective", "partition": "block"}
    assert config.activation.policy == next((p for w, p in policies.items() if w in name), "none")
    assert config.activation.offload == ("offload" in name or "partition" in name)
    assert config.activation.partition == ("partition" in name)
    words = {"topk": "topk", "dense": "dense", "powersgd": "powersgd", "1bit": "entropy_coded"}
    words |= {"50x": "entropy_coded", "bit": "quantize"}
    assert method == next((m for word, m in words.items() if word in name), "none")
    assert config.compression.error_feedback.enabled == ("no_feedback" not in name)


@each_preset
def test_deepspeed_reads_it(preset: Path) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    config = load_file(preset)
    if '"auto"' in preset.read_text():
        config = _filled_by_the_trainer(config)
    else:
        assert DeepSpeedConfig(str(preset))._param_dict == config  # from the file itself
    parsed = DeepSpeedConfig(config)
    assert parsed.zero_optimization_stage == 3
    assert parsed.train_micro_batch_size_per_gpu == 4
    assert parsed._param_dict["ds_ckpt"] == config["ds_ckpt"]  # what attach(engine) reads
    parse(parsed._param_dict)


@each_preset
def test_hugging_face_reads_it_and_fills_it_in(preset: Path) -> None:
    hf = pytest.importorskip("transformers.integrations.deepspeed")
    config = hf.HfDeepSpeedConfig(str(preset))
    assert config.is_zero3()
    assert config.config == json.loads(preset.read_text())
    filled = _filled_by_the_trainer(load_file(preset))
    assert '"auto"' not in json.dumps(filled)
    parse(filled)


@each_preset
def test_accelerate_reads_it(preset: Path) -> None:
    accelerate = pytest.importorskip("accelerate.utils")
    plugin = accelerate.DeepSpeedPlugin(hf_ds_config=str(preset))
    assert plugin.zero_stage == 3
    config = plugin.deepspeed_config
    assert config["ds_ckpt"] == load_file(preset)["ds_ckpt"]
    sections = {
        "optimizer.params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
        "scheduler.params": {"total_num_steps": 100, "warmup_num_steps": 10}
        | {"warmup_min_lr": 0, "warmup_max_lr": 3e-4},
        "zero_optimization": {"reduce_bucket_size": 4096, "stage3_prefetch_bucket_size": 4096}
        | {"stage3_param_persistence_threshold": 640},
    }
    arguments = {f"{at}.{key}": v for at, section in sections.items() for key, v in section.items()}
    arguments |= {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 4, "bf16.enabled": True}
    arguments |= {"gradient_accumulation_steps": 1, "gradient_clipping": 1.0, "fp16.enabled": False}
    plugin.deepspeed_config_process(must_match=False, **arguments)  # as Accelerator.prepare does
    assert '"auto"' not in json.dumps(config)
    parse(config)


@pytest.mark.parametrize(
    ("name", "hosts"), [("one_machine", {"localhost": 2}), ("two_hosts", {"node1": 2, "node2": 2})]
)
def test_deepspeeds_launcher_reads_the_hostfile(name: str, hosts: dict[str, int]) -> None:
    from deepspeed.launcher.runner import fetch_hostfile

    path = ROOT / "hostfiles" / name
    assert path.read_text().startswith("# ")
    assert dict(fetch_hostfile(str(path))) == hosts
