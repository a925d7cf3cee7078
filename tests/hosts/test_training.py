"""The real `deepspeed --hostfile` on two hosts, over pdsh, with the plugin, and `measure` so."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ds_ckpt.lab.hosts.backends import MASTER_PORT, Backend, Loopback, Prepared
from ds_ckpt.lab.hosts.emulated import namespace
from ds_ckpt.lab.hosts.launcher import remove_shared_buffers, run
from tests.hosts.conftest import COMMAND, LARGER, far_bytes, processes, trials

SCRIPT = Path(__file__).with_name("train.py")
STEPS = 4
PLUGIN: dict[str, Any] = {
    "activation": {"policy": "block"},
    "compression": {
        "method": "topk",
        "topk": {"density": 0.01},
        "warmup_steps": 0,
        "exchange": {"autotune": False},  # it would try both ways for longer than these steps
    },
}
RESIDENT = {"weights": {"resident": True}}
Trained = list[dict[str, dict[str, Any]]]
"""Results that `train.py` has written: by rank, then by configuration."""


def _train(backend: Backend, folder: Path, *launcher: str) -> Trained:
    """Run all trainings in one launch by `ds-ckpt exec`."""
    folder.mkdir()
    zero = {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_reuse_distance": 0,  # as for large models: backward gathers again
        "stage3_prefetch_bucket_size": 0,
    }
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }
    (folder / "stock.json").write_text(json.dumps(config))
    (folder / "plugin.json").write_text(json.dumps({**config, "ds_ckpt": PLUGIN}))
    (folder / "resident.json").write_text(json.dumps({**config, "ds_ckpt": RESIDENT}))
    argv = ["deepspeed", *launcher, str(SCRIPT), f"--steps={STEPS}", f"--folder={folder}"]
    plain = backend.prepare(argv, folder)
    prepared = Prepared([*COMMAND, "exec", "--", *plain.command], plain.environment)
    said = run(prepared, folder, limit_s=240, backend=backend)
    remove_shared_buffers(backend.port)
    assert "no process on this node" not in said
    assert "the ds_ckpt section is missing" in said  # of the first configuration
    return [json.loads((folder / f"trained_{i}.json").read_text()) for i in range(2)]


def _losses(trained: Trained) -> list[list[Any]]:
    return [[one["losses"] for one in process.values()] for process in trained]


@pytest.mark.timeout(500)
def test_two_hosts_train_as_one_machine_does_and_send_less(pdsh_hosts, two_hosts, tmp_path) -> None:
    """Over pdsh as without a launcher."""
    alone = _train(Loopback(2), tmp_path / "alone")
    both = _train(pdsh_hosts, tmp_path / "both")
    assert _losses(_train(two_hosts, tmp_path / "direct")) == _losses(both)
    assert not any(processes(host) for host in (*pdsh_hosts.hosts, *two_hosts.hosts))
    for process, same in zip(both, alone, strict=True):
        baseline, plugin = process["stock"], process["plugin"]
        assert len(baseline["losses"]) == len(plugin["losses"]) == STEPS + 1
        assert baseline["losses"][0] == plugin["losses"][0]  # the first forward is before any step
        assert baseline["losses"] != plugin["losses"]
        assert plugin["sent_bytes"] < 0.6 * baseline["sent_bytes"]
        # of two gathers a step one message is left, and an evaluation sends nothing
        resident, gather = process["resident"], baseline["evaluation_bytes"]
        assert resident["losses"] == baseline["losses"]
        assert gather > 1_000_000
        assert resident["evaluation_bytes"] < 0.01 * gather
        assert resident["sent_bytes"] < baseline["sent_bytes"] - 0.9 * STEPS * gather
        for name, trained in process.items():
            assert trained["losses"] == same[name]["losses"]


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_openmpi_starts_the_plugin_on_both_hosts(own_hosts, tmp_path, monkeypatch) -> None:
    """Ranks are found by mpi4py."""
    if os.environ.get("CI") != "true" and shutil.which("mpirun") is None:
        pytest.skip("no mpirun (Debian package openmpi-bin)")
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT", "1")
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    for process in _train(own_hosts, tmp_path / "mpi", "--launcher=openmpi"):
        assert process["plugin"]["losses"] != process["stock"]["losses"]
        assert process["resident"]["losses"] == process["stock"]["losses"]


@pytest.mark.timeout(400)
def test_a_hostfile_of_machines(pdsh_hosts, tmp_path, monkeypatch) -> None:
    """The hosts are emulated, the way to them is that to real machines; two processes on each."""
    folder = tmp_path / "run"
    options = [f"--output={folder}", "--interface=eth0", *LARGER]
    options += [f"--hostfile={pdsh_hosts.folder}/hostfile", "--ssh-port=2222"]
    options += ["--policies=none", "--methods=", f"--port={MASTER_PORT + 1}"]
    options += ["--baselines=hpz"]
    command = [*COMMAND, "measure", *options]
    monkeypatch.setattr(pdsh_hosts, "slots", 2)
    prepared = pdsh_hosts.prepare(command, tmp_path)
    subprocess.run(prepared.command, env=prepared.environment, check=True)
    found = {trial.configuration: trial for trial in trials(folder)}
    assert set(found) == {"none/stock", "none/dense", "none/no_comm", "none/stock/hpz"}
    gathers = {name: far_bytes(one, "gather") for name, one in found.items()}
    # hpZ's second gather stays inside the host
    assert gathers["none/stock/hpz"] == pytest.approx(gathers["none/stock"] / 2, rel=0.01)
    for trial in found.values():
        counted = sum(trial.purpose_bytes.values())
        assert trial.interface_bytes == pytest.approx(counted, rel=0.03)
        assert sum(trial.link_bytes) < 0.9 * trial.interface_bytes  # two processes meet on loopback
        assert far_bytes(trial) == pytest.approx(max(trial.link_bytes), rel=0.03), trial.key
    data = json.loads((folder / "report.json").read_text())
    assert data["spec"]["where"] == "hostfile"
    assert not any(processes(host) for host in pdsh_hosts.hosts)
    assert all(namespace(host.pid) for host in pdsh_hosts.hosts)
