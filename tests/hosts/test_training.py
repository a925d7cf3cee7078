"""The real `deepspeed --hostfile` on two hosts, over pdsh, with the plugin, and `measure` so."""

import contextlib
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ds_ckpt.engine.tuner import MAX_CYCLES
from ds_ckpt.lab.hosts.backends import MASTER_PORT, Backend, Loopback, Prepared
from ds_ckpt.lab.hosts.emulated import namespace
from ds_ckpt.lab.hosts.launcher import LaunchError, remove_shared_buffers, supervise
from tests.distributed import exec_train
from tests.distributed.test_exec import BLOCK, HF, LAYER, launch, results
from tests.hosts.conftest import COMMAND, LARGER, are_idle, far_bytes, trials

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
_CHOICE = r"(.+?): (\w+) \(ms per step: ([^;)]+)(; no significant difference)?\)"
Trained = list[dict[str, dict[str, Any]]]
"""Results that `train.py` has written: by rank, then by configuration."""


def _train(backend: Backend, folder: Path, *launcher: str) -> Trained:
    sections = {"stock": None, "plugin": PLUGIN, "resident": RESIDENT}
    said = _launch(backend, folder, sections, *launcher)
    assert "the ds_ckpt section is missing" in said  # of the configuration "stock"
    return [json.loads((folder / f"trained_{i}.json").read_text()) for i in range(2)]


def _launch(backend, folder, sections, *launcher: str, steps=STEPS, width=128) -> str:
    """Run all trainings in one launch by `ds-ckpt exec`; its output."""
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
    for name, section in sections.items():
        own = {} if section is None else {"ds_ckpt": section}
        (folder / f"{name}.json").write_text(json.dumps({**config, **own}))
    argv = ["deepspeed", *launcher, str(SCRIPT), f"--steps={steps}", f"--folder={folder}"]
    argv.append(f"--width={width}")
    plain = backend.prepare(argv, folder)
    prepared = Prepared([*COMMAND, "exec", "--", *plain.command], plain.environment)
    said = supervise(prepared, folder, limit_s=max(240, 2 * steps), backend=backend)
    remove_shared_buffers(backend.port)
    assert "no process on this node" not in said
    return said


@pytest.mark.timeout(500)
@pytest.mark.parametrize("hosts", ["pdsh_hosts", pytest.param("two_hosts", marks=pytest.mark.slow)])
def test_two_hosts_train_as_one_machine_does_and_send_less(hosts, tmp_path, request) -> None:
    """Over pdsh and without a launcher."""
    backend = request.getfixturevalue(hosts)
    alone = _train(Loopback(2), tmp_path / "alone")
    both = _train(backend, tmp_path / "both")
    assert are_idle(backend)
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
@pytest.mark.timeout(900)
@pytest.mark.parametrize("nodes", [1, 2])
def test_auto_chooses_by_whole_steps_and_says_what(tmp_path, nodes, request) -> None:
    """Both parts over a link that bytes fill; on one node weights are never resident."""
    backend = request.getfixturevalue("own_hosts") if nodes == 2 else Loopback(2)
    backend.set_rate(5)
    # dense for 100 steps; then as many as a comparison takes at most, or two of two cycles
    steps, width = (100 + 18 * MAX_CYCLES + 2, 16) if nodes == 1 else (100 + 2 * 36 + 2, 48)
    said = _launch(backend, tmp_path / "run", {"auto": "auto"}, steps=steps, width=width)
    chosen = {}
    for line in said.split("ds_ckpt: autotune: ")[1:]:
        subject, choice, times, verdict = re.match(_CHOICE, line).groups()
        ms = {name: float(t) for name, t in (one.split() for one in times.split(", "))}
        assert choice == ([*ms][-1] if verdict else min(ms, key=ms.get))
        chosen[subject] = choice
    assert chosen.keys() == {"gradients", *["resident weights"] * (nodes == 2)}
    if nodes == 2:
        assert chosen == {"gradients": "compressed", "resident weights": "uncompressed"}
    assert ("weights not resident: all ranks share one node" in said) == (nodes == 1)
    assert ("weights resident on each of" in said) == (nodes == 2)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_openmpi_starts_the_plugin_on_both_hosts(own_pdsh_hosts, tmp_path, monkeypatch) -> None:
    """Ranks are found by mpi4py."""
    if os.environ.get("CI") != "true" and shutil.which("mpirun") is None:
        pytest.skip("no mpirun (Debian package openmpi-bin)")
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT", "1")
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    for process in _train(own_pdsh_hosts, tmp_path / "mpi", "--launcher=openmpi"):
        assert process["plugin"]["losses"] != process["stock"]["losses"]
        assert process["resident"]["losses"] == process["stock"]["losses"]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["script", "trainer", "accelerate"])
def test_ways_to_build_an_engine_over_pdsh(own_pdsh_hosts, tmp_path, kind) -> None:
    """Sections in code and by --section; accelerate starts DeepSpeed's launcher itself."""
    words, config = ["deepspeed"], exec_train.PLAIN if kind == "script" else HF
    if kind == "accelerate":
        words = ["accelerate", "launch", "--use_deepspeed", "--num_processes=2", "--num_machines=2"]
        words += [f"--deepspeed_hostfile={own_pdsh_hosts.folder}/hostfile", "--dynamo_backend=no"]
        words += ["--machine_rank=0", f"--deepspeed_config_file={tmp_path}/config.json"]
        words += [f"--main_process_ip={own_pdsh_hosts.hosts[0].address}"]
    with pytest.raises(LaunchError) if kind == "script" else contextlib.nullcontext():
        section = BLOCK if kind == "script" else LAYER
        launch(tmp_path, kind, words, section, config, own_pdsh_hosts)
    first, second = results(tmp_path, kind)
    assert [one for one, _ in first] == [one for one, _ in second]
    names = ["block", "segments", "block"] if kind == "script" else ["block"]
    for name, (session, _) in zip(names, first, strict=True):
        assert f"checkpointing {name}" in session


@pytest.mark.timeout(400)
@pytest.mark.parametrize("slots", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_hostfile_of_machines(slots, pdsh_hosts, tmp_path, monkeypatch) -> None:
    """The hosts are emulated, the way to them is that to real machines; hpZ takes two slots."""
    folder = tmp_path / "run"
    options = [f"--output={folder}", "--interface=eth0", *LARGER]
    options += [f"--hostfile={pdsh_hosts.folder}/hostfile", "--ssh-port=2222"]
    options += ["--policies=none", "--methods=", f"--port={MASTER_PORT + 1}"]
    options += ["--baselines=hpz"] * (slots > 1)
    command = [*COMMAND, "measure", *options]
    monkeypatch.setattr(pdsh_hosts, "slots", slots)
    prepared = pdsh_hosts.prepare(command, tmp_path)
    subprocess.run(prepared.command, env=prepared.environment, check=True)
    found = {trial.configuration: trial for trial in trials(folder)}
    assert {*found} == {
        f"none/{n}" for n in ("stock", "dense", "no_comm", "stock/hpz")[: 2 + slots]
    }
    if slots > 1:  # hpZ's second gather stays inside the host
        gathers = {name: far_bytes(one, "gather") for name, one in found.items()}
        assert gathers["none/stock/hpz"] == pytest.approx(gathers["none/stock"] / 2, rel=0.01)
    for trial in found.values():
        assert far_bytes(trial) == pytest.approx(max(trial.interface_bytes), rel=0.03), trial.key
    data = json.loads((folder / "report.json").read_text())
    assert data["spec"]["where"] == "hostfile"
    assert are_idle(pdsh_hosts)
    assert all(namespace(host.pid) for host in pdsh_hosts.hosts)
