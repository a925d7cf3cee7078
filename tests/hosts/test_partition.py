"""The mission in one launch: partition, CPU offload and Top-K from a JSON file, on two hosts."""

import json
from pathlib import Path
from typing import Any

import pytest

from ds_ckpt.lab.hosts.backends import Prepared
from ds_ckpt.lab.hosts.emulated import EmulatedHosts
from ds_ckpt.lab.hosts.launcher import remove_shared_buffers, supervise
from tests.hosts.conftest import COMMAND

SCRIPT = Path(__file__).with_name("tensor_parallel_train.py")
PASTED: dict[str, Any] = {
    "partition_activations": True,
    "cpu_checkpointing": True,
    "contiguous_memory_optimization": False,
    "number_checkpoints": None,
    "synchronize_checkpoint_boundary": False,
    "profile": False,
}
"""Every key of DeepSpeed's documentation of `activation_checkpointing`."""


def _train(hosts: EmulatedHosts, folder: Path, **sections: Any) -> tuple[str, list[Any], list[Any]]:
    """Return the output, the losses and the telemetry, by rank."""
    folder.mkdir()
    activation = {"offload_min_bytes": 0, "partition_min_bytes": 0}
    compression = {
        "method": "topk",
        "topk": {"density": 0.01},
        "warmup_steps": 2,
        "exchange": {"autotune": False},
    }
    telemetry = {"enabled": True, "every_n_steps": 1, "path": str(folder / "log.jsonl")}
    section: dict[str, Any] = {"compression": compression, "telemetry": telemetry}
    if "activation_checkpointing" in sections:
        section["activation"] = activation
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "tensor_parallel": {"autotp_size": 2},
        "ds_ckpt": section,
        **sections,
    }
    (folder / "zero3.json").write_text(json.dumps(config))
    argv = ["deepspeed", str(SCRIPT), f"--losses={folder / 'losses'}"]
    argv += ["--deepspeed", f"--deepspeed_config={folder / 'zero3.json'}"]
    plain = hosts.prepare(argv, folder)
    prepared = Prepared([*COMMAND, "exec", "--", *plain.command], plain.environment)
    said = supervise(prepared, folder, limit_s=240, backend=hosts)
    remove_shared_buffers(hosts.port)
    losses = [json.loads((folder / f"losses.{rank}").read_text()) for rank in range(4)]
    logs = [(folder / f"log.{rank}.jsonl").read_text().splitlines() for rank in range(4)]
    return said, losses, [[json.loads(line) for line in log] for log in logs]


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_partition_offload_and_topk_from_a_json_file(two_hosts, tmp_path, monkeypatch) -> None:
    """Partition and offload change no loss; bytes are those of the plan."""
    monkeypatch.setattr(two_hosts, "slots", 2)
    said, losses, logs = _train(two_hosts, tmp_path / "all", activation_checkpointing=PASTED)
    plain_said, plain_losses, plain_logs = _train(two_hosts, tmp_path / "topk")
    assert "no process" not in said
    assert "inputs in host memory" in said
    assert "split over the tensor-parallel group" in said
    assert "% of the recomputation" in said  # the line of each step
    assert "inputs in host memory" not in plain_said
    assert losses == plain_losses
    assert losses[0] == losses[1] != losses[2] == losses[3]  # neighbours have the same batches
    for log, plain_log in zip(logs, plain_logs, strict=True):
        plan = next(record["plan"] for record in log if "plan" in record)
        planned = sum(tensor["sent_bytes"] for tensor in plan) / 2  # half of a tensor is one's own
        sent = [record["sent_bytes"] for record in log if "step" in record]
        assert [s["reduce"] for s in sent[2:]] == pytest.approx([planned] * 4, rel=0.06)  # headers
        assert sent[0]["reduce"] > 100 * planned
        assert all(s["partition"] > 0 for s in sent)
        assert all(r["sent_bytes"]["partition"] == 0 for r in plain_log if "step" in r)
