"""The real `deepspeed --hostfile` on two hosts, over pdsh and over Open MPI, with the plugin."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ds_ckpt.hosts import EmulatedHosts
from ds_ckpt.hosts.launcher import on_hosts, on_this_machine

SCRIPT = Path(__file__).with_name("train.py")
STEPS = 4
PLUGIN: dict[str, Any] = {
    "activation": {"policy": "block"},
    "compression": {
        "method": "topk",
        "topk": {"density": 0.01},
        "start_step": 0,
        "exchange": {"gate": False},  # it would try both ways for longer than these steps
    },
}


def _arguments(folder: Path, section: dict[str, Any] | None) -> list[str]:
    """What follows the launcher's own options; `section` None runs the script by itself."""
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
        **({} if section is None else {"ds_ckpt": section}),
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    plugin = [] if section is None else ["--module", "ds_ckpt.run"]
    script = [str(SCRIPT), f"--steps={STEPS}", f"--out={folder}"]
    return [*plugin, *script, "--deepspeed_config", str(folder / "config.json")]


def _losses(folder: Path) -> list[list[float]]:
    return [json.loads((folder / f"losses_{i}.json").read_text()) for i in range(2)]


@pytest.mark.timeout(500)
def test_two_hosts_train_as_one_machine_does_and_topk_sends_less(
    two_hosts: EmulatedHosts, tmp_path: Path
) -> None:
    sent, losses = {}, {}
    for name, section in (("stock", None), ("plugin", PLUGIN)):
        before = [host.tx_bytes() for host in two_hosts.hosts]
        folder = tmp_path / name
        on_hosts(two_hosts, _arguments(folder, section), folder=folder)
        sent[name] = [host.tx_bytes() - b for host, b in zip(two_hosts.hosts, before, strict=True)]
        losses[name] = _losses(folder)
        assert not any(host.processes() for host in two_hosts.hosts)

        alone = tmp_path / f"{name}-alone"
        on_this_machine(_arguments(alone, section), folder=alone)
        assert _losses(alone) == losses[name]

    assert all(len(process) == STEPS for process in losses["stock"] + losses["plugin"])
    assert losses["stock"][0][0] == losses["plugin"][0][0]  # the first forward is before any step
    assert losses["stock"] != losses["plugin"]
    for stock, plugin in zip(sent["stock"], sent["plugin"], strict=True):
        assert plugin < 0.6 * stock, sent


@pytest.mark.timeout(300)
def test_open_mpi_launches_the_same_training(two_hosts: EmulatedHosts, tmp_path: Path) -> None:
    """mpi4py finds the processes; the losses are those of a launch on one machine."""
    over_mpi, alone = tmp_path / "mpi", tmp_path / "alone"
    output = on_hosts(two_hosts, _arguments(over_mpi, PLUGIN), folder=over_mpi, launcher="openmpi")
    assert "mpirun -n 2" in output
    on_this_machine(_arguments(alone, PLUGIN), folder=alone)
    assert _losses(over_mpi) == _losses(alone)
    assert not any(host.processes() for host in two_hosts.hosts)
