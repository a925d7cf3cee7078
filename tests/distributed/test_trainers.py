"""The real axolotl, ms-swift and Lightning (./scripts/trainers.sh) load the plugin, and train."""

import contextlib
import io
import json
import os
import re
import site
import sys
from pathlib import Path

import deepspeed
import pytest
import torch

from ds_ckpt.lab.hosts.backends import Loopback
from ds_ckpt.lab.hosts.launcher import supervise
from tests.distributed import exec_train
from tests.distributed.pool import Pool
from tests.unit.test_validation_tasks import save_checkpoint

BLOCK = {"ds_ckpt": {"activation": {"policy": "block"}}}
BITS = {"ds_ckpt": {**BLOCK["ds_ckpt"], "compression": {"method": "quantize", "warmup_steps": 0}}}
ZERO3 = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
ZERO3 |= {"zero_allow_untested_optimizer": True}
LOADERS = {
    "axolotl": "import axolotl.cli; from axolotl.utils.config import prepare_plugins as load;"
    "load({'plugins': ['ds_ckpt.integrations.axolotl.Plugin']})",
    "ms-swift": "from swift.utils import import_external_file as load; load('FOLDER/plugin.py')",
}


def _installed(name: str, option: str = "") -> Path:
    folder = Path(sys.prefix, "trainers", name)
    if os.environ.get("CI") != "true" and not folder.exists():  # in CI it is an error
        pytest.skip(f"no {folder}: ./scripts/trainers.sh{option} makes it")
    return folder


def _run(world, case, given):
    """Run a case in a pool of its own, which imports the packages."""
    packages, own = _installed("packages"), Pool(world)
    try:
        own.run(site.addsitedir, str(packages))
        return own.run(case, given)
    finally:
        own.stop()


def _loaded(loader: str) -> str:
    """Return what is printed by the loading and by an engine that is built next."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        exec(loader)
        deepspeed.initialize(model=exec_train.llama(), config=exec_train.PLAIN | BLOCK)
    return said.getvalue()


@pytest.mark.parametrize("trainer", LOADERS)
def test_a_trainers_own_loader_installs_the_plugin(trainer: str, tmp_path: Path) -> None:
    (tmp_path / "plugin.py").write_text("import ds_ckpt.auto\n")
    (said,) = _run(1, _loaded, LOADERS[trainer].replace("FOLDER", str(tmp_path)))
    assert said.count("ds_ckpt: checkpointing block on 2 blocks (LlamaDecoderLayer)\n") == 1


def _lightning(folder: str) -> dict[str, tuple[list[float], str]]:
    """Return losses and session of plain ZeRO-3, of the name in the registry, and of 3 bits."""
    import lightning
    from lightning.pytorch.accelerators import CUDAAccelerator
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment

    from ds_ckpt.integrations.lightning import LightningStrategy

    class Cpu(CUDAAccelerator):  # Lightning refuses DeepSpeed on any other accelerator
        setup = setup_device = teardown = lambda *_: None
        is_available = staticmethod(lambda: True)
        parse_devices = staticmethod(lambda count: count)
        get_parallel_devices = staticmethod(lambda n: [torch.device("cpu", i) for i in range(n)])

    class Model(lightning.LightningModule):
        def configure_model(self) -> None:
            if not hasattr(self, "llama"):  # each stage calls it
                self.llama, self.losses = exec_train.llama(), list[float]()

        def training_step(self, rows: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            loss = self.llama(**rows).loss
            self.losses.append(loss.item())
            return loss

        validation_step = training_step

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    options = {"devices": 2, "accelerator": Cpu(), "plugins": TorchElasticEnvironment()}
    options |= dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar"], False)
    options |= {"limit_val_batches": 1, "accumulate_grad_batches": 2, "gradient_clip_val": 1.0}
    found = {}
    for name in ("deepspeed_stage_3", "ds_ckpt", "own"):
        losses, saved = [], None
        for steps in (2, 3):  # the second one resumes the first one's checkpoint
            model, rows = Model(), torch.utils.data.DataLoader(exec_train.Rows())
            strategy = LightningStrategy(config=ZERO3 | BITS) if name == "own" else name
            trainer = lightning.Trainer(strategy=strategy, max_steps=steps, **options)
            trainer.fit(model, rows, rows, ckpt_path=saved, weights_only=False)
            found[name] = losses, exec_train.found(trainer.strategy.model)
            trainer.save_checkpoint(saved := f"{folder}/saved.ckpt")
            trainer.validate(model, rows, verbose=False)
            losses += model.losses
    return found


def test_lightning_trains_evaluates_and_resumes_as_without(tmp_path: Path) -> None:
    """3-bit gradients begin after 100 steps of `auto`, and at once in a configuration."""
    for rank in _run(2, _lightning, str(tmp_path)):
        (plain, none), (auto, session), (bits, compressed) = rank.values()
        assert (auto, none) == (plain, "none")
        assert re.search("checkpointing block on 2 blocks .*dense for 100 steps", session)
        assert plain != bits == pytest.approx(plain, rel=0.05)
        assert "dense for 0 steps" in compressed


COMMANDS = {
    "axolotl": "env AXOLOTL_DO_NOT_TRACK=1 axolotl train config.yaml --launcher torchrun --"
    " --standalone --nproc_per_node=2",
    "ms-swift": "env NPROC_PER_NODE=2 swift sft --model model --model_type llama --template default"
    " --dataset rows.jsonl --tuner_type full --torch_dtype float32 --fp16 false --bf16 false"
    " --max_steps 4 --logging_steps 1 --per_device_train_batch_size 1 --learning_rate 1e-3"
    " --gradient_accumulation_steps 1 --save_strategy no --output_dir out --deepspeed zero3.json",
}
CONFIG = """
{base_model: model, datasets: [{path: rows.jsonl, type: completion}], sequence_len: 16,
 deepspeed: zero3.json, optimizer: adamw_torch, lr_scheduler: constant, learning_rate: 0.001,
 micro_batch_size: 1, gradient_accumulation_steps: 1, max_steps: 4, logging_steps: 1, bf16: false,
 save_strategy: "no", output_dir: out, plugins: [cpu.Plugin, PLUGIN]}
"""
CPU = """
import accelerate, deepspeed
from axolotl.integrations.base import BasePlugin as Plugin
deepspeed.init_distributed("gloo")
accelerate.PartialState(cpu=True)  # else it counts one rank without a GPU
"""
TURNS = [{"role": "user", "content": "sky word"}, {"role": "assistant", "content": "ground"}]
ROW = json.dumps({"text": "sky ground word ground", "messages": TURNS}) + "\n"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("trainer", ["axolotl", "ms-swift"])
def test_a_whole_training(trainer: str, tmp_path: Path) -> None:
    """Without the plugin, with its line and `block`, and with 3 bits through `ds-ckpt exec`."""
    bin = _installed(trainer, " --slow") / "bin"
    paths = {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"}
    paths |= {"PATH": f"{bin}:{Path(sys.executable).parent}:{os.environ['PATH']}"}
    save_checkpoint(tmp_path / "model", width=64)
    (tmp_path / "rows.jsonl").write_text(ROW * 20)
    (tmp_path / "plugin.py").write_text("import ds_ckpt.auto\n")
    (tmp_path / "cpu.py").write_text(CPU)
    losses, said = {}, {}
    for way, section in (("plain", {}), ("line", BLOCK), ("exec", BITS)):
        (tmp_path / "zero3.json").write_text(json.dumps(ZERO3 | section))
        plugin = "ds_ckpt.integrations.axolotl.Plugin" * (way == "line")
        (tmp_path / "config.yaml").write_text(CONFIG.replace("PLUGIN", plugin))
        command = COMMANDS[trainer].split()
        if way == "exec":  # without its plugin axolotl prints nothing below a warning
            command = [*f"env LOG_LEVEL=INFO {bin}/python -m ds_ckpt.cli exec --".split(), *command]
        elif (way, trainer) == ("line", "ms-swift"):
            command += ["--external_plugins", "plugin.py"]
        prepared = Loopback(2).prepare(command, tmp_path)
        prepared.environment.update(paths)
        said[way] = supervise(prepared, tmp_path, limit_s=280)
        found = re.findall(r"'loss': '?([\d.]+)'?, 'grad_norm': '?([\d.]+)", said[way])
        losses[way] = list(dict.fromkeys(found))  # some are printed twice
        assert len(losses[way]) == 4, said[way]
    assert losses["line"] == losses["plain"] != losses["exec"]
    assert "ds_ckpt: checkpointing block on 1 " in said["line"]
    assert "dense for 0 steps" in said["exec"]
    assert "ds_ckpt: " not in said["plain"]
