"""What is planned, and what a run keeps: configurations, files, trials, records."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_ckpt.cli.measure_arguments import deepspeed_of, model_of, sections_of
from ds_ckpt.config import parse
from ds_ckpt.config.paths import precision
from ds_ckpt.errors import ConfigError, StateError, UnsupportedError
from ds_ckpt.lab.hosts import Launcher, backends
from ds_ckpt.lab.hosts.backends import Hostfile, read_hostfile
from ds_ckpt.lab.measure.samples import Memory, Store, Trial
from ds_ckpt.lab.measure.spec import (
    BASELINES,
    METHODS,
    POLICIES,
    Configuration,
    Spec,
    check,
    deepspeed_config,
)
from ds_ckpt.lab.measure.worker import built, check_batch, slowest
from ds_ckpt.lab.subject import run_forward
from tests.unit import measure_samples as known


def test_the_default_is_two_by_two_with_the_dense_baselines_and_the_ceiling() -> None:
    assert [one.name for one in Spec().configurations] == [
        f"{policy}/{method}"
        for policy in ("none", "block")
        for method in ("stock", "dense", "4bit", "silent")
    ]


def test_every_cell_is_a_file_that_the_plugin_accepts() -> None:
    spec = Spec(policies=tuple(POLICIES), methods=tuple(m for m in METHODS if m != "stock"))
    for one in spec.configurations:
        config = deepspeed_config(spec, one, parameters=1000, start_step=3)
        plugin = parse(json.loads(json.dumps(config)), source=one.name)
        assert plugin.activation.active == (one.policy != "none")
        assert config["zero_optimization"]["reduce_bucket_size"] == 125
        if one.method in ("stock", "silent"):
            assert plugin.compression.method == "none"
        elif one.method != "dense":
            assert plugin.compression.warmup_steps == 3
            assert not plugin.compression.exchange.autotune


def test_weights_are_an_axis_and_baselines_are_stock_deepspeed() -> None:
    spec = Spec(policies=("none",), weights=("stock", "whole"), baselines=("zero1",), ceiling=False)
    names = [one.name for one in spec.configurations]
    assert names == [
        *("none/stock", "none/dense", "none/4bit"),
        *("none/stock/whole", "none/dense/whole", "none/4bit/whole"),
        "none/stock/zero1",
    ]
    assert [Configuration.of(name) for name in names] == spec.configurations
    fewer = replace(spec, left_out=("none/4bit", "none/stock/whole"))
    assert [c.name for c in fewer.configurations] == [n for n in names if n not in fewer.left_out]


def test_every_place_of_the_weights_is_a_file_that_the_plugin_accepts() -> None:
    weights = ("whole", "lossless")
    spec = Spec(weights=weights, baselines=tuple(BASELINES), slots=2, bf16=True, accumulation=4)
    check(spec)
    zeros = {}
    for one in spec.configurations:
        config = deepspeed_config(spec, one, parameters=1000)
        plugin = parse(json.loads(json.dumps(config)), source=one.name)
        assert config["gradient_accumulation_steps"] == 4
        assert config["bf16"] == {"enabled": True}
        assert plugin.weights.resident == (one.weights in weights)
        if plugin.weights.resident:
            assert plugin.weights.deltas == {"whole": "none"}.get(one.weights, "lossless")
        if one.method in ("dense", "4bit"):
            assert plugin.compression.exchange.when == "accumulation_boundary"
        zero = config["zero_optimization"]
        zeros[one.weights] = (zero["stage"], zero.get("zero_hpz_partition_size"))
    three = dict.fromkeys(("stock", "whole", "lossless"), (3, None))
    assert zeros == {**three, "hpz": (3, 2), "zero2": (2, None), "zero1": (1, None)}


def test_a_users_file_says_itself_when_accumulated_gradients_are_sent() -> None:
    section = {"method": "quantize", "exchange": {"when": "micro_step"}}
    spec = Spec(methods=("mine",), sections={"compression/mine": section}, accumulation=2)
    config = deepspeed_config(spec, Configuration("none", "mine"), parameters=10)
    assert config["ds_ckpt"]["compression"]["exchange"]["when"] == "micro_step"


def test_weights_and_baselines_that_cannot_be_measured_are_told_together() -> None:
    spec = Spec(weights=("lossless", "half"), baselines=("hpz", "zero4"), accumulation=0)
    with pytest.raises(ConfigError) as caught:
        check(spec)
    places = [problem.where for problem in caught.value.problems]
    assert places == ["--weights", "--baselines", "--weights", "--baselines", "--accumulation"]
    assert "add --bf16" in str(caught.value)
    alone = replace(Spec(weights=("whole",)), where="loopback", hosts=1, slots=2, rates=(None,))
    with pytest.raises(ConfigError, match="nothing to keep"):
        check(alone)
    check(replace(alone, weights=("stock",), baselines=("zero2",)))


def test_a_file_of_weights_is_a_value_of_the_axis(tmp_path: Path) -> None:
    mine = _file(tmp_path, "mine.json", weights={"resident": True})
    names, sections = sections_of(weights=f"whole,{mine}")
    assert names == {"weights": ("whole", "mine")}
    assert sections == {"weights/mine": {"resident": True}}
    for taken in ("lossless", "zero2"):
        with pytest.raises(ConfigError, match="is a name already"):
            sections_of(weights=_file(tmp_path, f"{taken}.json", weights={"resident": True}))


def test_a_users_deepspeed_file_is_the_base_of_every_configuration(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    content = {
        "train_batch_size": 24,
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 4,
        "bf16": {"enabled": True},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-5}},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 77},
    }
    path.write_text(json.dumps(content))
    base, batch = deepspeed_of(path)
    assert batch == {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 4}
    spec = Spec(deepspeed=base, bf16=True, batches=(2,), accumulation=5, baselines=("zero1",))
    for one in spec.configurations:
        config = deepspeed_config(spec, one, parameters=1000)
        assert config["optimizer"] == content["optimizer"]
        assert config["zero_optimization"]["reduce_bucket_size"] == 77
        assert config["zero_optimization"]["stage"] == (1 if one.weights == "zero1" else 3)
        assert "scheduler" not in config
        assert "train_batch_size" not in config
        assert config["train_micro_batch_size_per_gpu"] == 2
        assert config["gradient_accumulation_steps"] == 5
        assert config["ds_ckpt"]["telemetry"]["enabled"]
        if one.weights != "zero1":
            parse(config)
    path.write_text(json.dumps({**content, "ds_ckpt": {"activation": {"policy": "block"}}}))
    with pytest.raises(ConfigError, match=r"ds_ckpt(.|\n)*--policies"):
        deepspeed_of(path)
    path.write_text(json.dumps({"train_batch_size": 64, "fp16": {"enabled": True}}))
    with pytest.raises(ConfigError) as caught:
        deepspeed_of(path)
    assert [problem.where.partition(": ")[2] for problem in caught.value.problems] == [
        "$.zero_optimization.stage",
        "$.fp16.enabled",
        "$.train_batch_size",
    ]
    trainers = {**content, "bf16": {"enabled": "auto"}, "gradient_clipping": "auto"}
    trainers |= {"optimizer": {"type": "Adam", "params": {"lr": 1e-5, "betas": ["auto", 0.9]}}}
    path.write_text(json.dumps({**trainers, "train_batch_size": "auto"}))
    with pytest.raises(ConfigError, match="HF Trainer") as caught:
        deepspeed_of(path)
    assert [problem.where.partition(": ")[2] for problem in caught.value.problems] == [
        "$.bf16.enabled",
        "$.optimizer.params.betas[0]",
        "$.gradient_clipping",
    ]


@pytest.mark.parametrize(
    ("section", "sixteen"),
    [
        ({"bf16": {"enabled": True}}, True),
        ({"bfloat16": {"enabled": True}}, True),
        ({"bf16": None, "bfloat16": {"enabled": True}}, True),
        ({"bf16": {"enabled": False}, "bfloat16": {"enabled": True}}, False),
        ({"bf16": None}, False),
        ({"bf16": {"enabled": False}}, False),
        ({"bf16": {"enabled": "true"}}, None),
    ],
)
def test_a_users_file_says_the_precision(
    section: dict[str, Any], sixteen: bool | None, tmp_path: Path
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 3}, **section}))
    if sixteen is None:
        with pytest.raises(ConfigError, match="true or false"):
            deepspeed_of(path)
    else:
        assert (precision(deepspeed_of(path)[0]) == "bf16") == sixteen


def test_a_file_without_sections_makes_no_configuration(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 3}, "ds_ckpt": None}))
    with pytest.raises(ConfigError, match=r"no ds_ckpt\.activation section"):
        sections_of(activation=str(path))


def test_a_model_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32}
    shape |= {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    (tmp_path / "config.json").write_text(json.dumps({**shape, "vocab_size": 256}))
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def make(batch=1):\n"
        "    return torch.nn.Sequential(torch.nn.Linear(4, 3)), torch.randn(batch, 4)\n"
    )
    monkeypatch.chdir(tmp_path)
    named = model_of("config.json")
    assert named == str(tmp_path / "config.json")
    model, _ = built(Spec(model=named, tokens=8), 1)
    again, _ = built(Spec(model=named, tokens=8), 1)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.dtype == torch.float32
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    own = Spec(model=model_of("mine:make"), folder=str(tmp_path), loss_steps=0)
    check(own)
    model, batch = built(own, 5)
    assert batch.shape == (5, 4)
    check_batch(replace(own, tokens=1), batch, 5)
    with pytest.raises(ConfigError, match="--batches 5 --tokens 1"):
        check_batch(replace(own, tokens=1), batch, 4)
    ids = {"input_ids": torch.zeros(2, 64, dtype=torch.int64)}
    check_batch(replace(own, tokens=64), ids, 2)
    with pytest.raises(ConfigError, match="--batches 2 --tokens 64"):
        check_batch(own, ids, 2)
    assert run_forward(model, batch).requires_grad
    with pytest.raises(ConfigError, match="--loss-steps 0"):
        check(replace(own, loss_steps=3))
    with pytest.raises(ConfigError, match="--tokens"):
        check(Spec(tokens=1))
    with pytest.raises(ConfigError, match="built-in Llama"):
        check(Spec(model=named, shape={"layers": 3}))
    with pytest.raises(UnsupportedError, match="no_such"):
        model_of("no_such/config.json")


def test_a_users_section_stands_for_its_name() -> None:
    section = {"method": "quantize", "quantize": {"bits": 8}, "warmup_steps": 7}
    spec = Spec(methods=("mine",), sections={"compression/mine": section})
    check(spec)
    (one,) = [c for c in spec.configurations if c.name == "block/mine"]
    compression = deepspeed_config(spec, one, parameters=10)["ds_ckpt"]["compression"]
    assert compression == {**section, "warmup_steps": 0, "exchange": {"autotune": False}}


def test_dense_with_rules_compresses_from_the_first_step() -> None:
    rules = [{"match": "*", "method": "quantize"}]
    section = {"method": "dense", "rules": rules, "exchange": {"levels": 1}}
    spec = Spec(methods=("mine",), sections={"compression/mine": section})
    (one,) = [c for c in spec.configurations if c.name == "none/mine"]
    config = json.loads(json.dumps(deepspeed_config(spec, one, parameters=10)))
    compression = parse(config).compression
    assert compression.warmup_steps == 0
    assert not compression.exchange.autotune
    assert compression.exchange.levels == 1


def test_a_spec_is_what_was_saved(tmp_path: Path) -> None:
    spec = Spec(rates=(50.0, None), shape={"layers": 2}, weights=("whole",), baselines=("zero1",))
    spec.save(tmp_path)
    loaded = Spec.load(tmp_path)
    assert loaded == spec
    assert loaded != Spec()


def test_what_cannot_be_measured_is_told_together() -> None:
    spec = Spec(
        where="loopback", hosts=1, policies=("block", "blocks"), methods=("zip",), batches=(0,)
    )
    with pytest.raises(ConfigError) as caught:
        check(spec)
    places = [problem.where for problem in caught.value.problems]
    assert places == [
        "--policies",
        "--methods",
        "--policies",
        "--rates",
        "--hosts, --slots",
        "--batches",
    ]


def test_records_come_back_and_a_half_written_one_is_measured_again(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.read() == []
    samples = known.samples()
    store.append(samples[:5])
    store.append(samples[5:])
    assert store.read() == samples
    whole = store.path.read_bytes()
    store.path.write_bytes(whole[:-20])
    assert store.read() == samples[:-1]
    store.mend()
    store.append(samples[-1:])
    assert store.path.read_bytes() == whole


def test_of_equal_keys_the_last_record_counts(tmp_path: Path) -> None:
    store = Store(tmp_path)
    first = Memory(configuration="none/stock", sequences=4, held_bytes=1, peak_bytes=2)
    second = first.model_copy(update={"peak_bytes": 3})
    store.append([first, second])
    assert store.read() == [second]


def test_a_line_that_is_no_record_is_named(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.path.write_text('{"kind": "trial"}\n')
    with pytest.raises(StateError, match="line 1") as caught:
        store.read()
    assert "measured again" in str(caught.value)


def test_of_every_step_the_slowest_process_counts() -> None:
    fast, slow = known.step("none/stock", 400.0), known.step("none/stock", 100.0)
    assert slowest([[fast, slow, fast], [slow, fast, fast]]) == (slow, slow, fast)


def test_trials_are_known_by_what_they_measured() -> None:
    trials = [s for s in known.samples() if isinstance(s, Trial)]
    assert len({trial.key for trial in trials}) == len(trials)


def test_hostfiles(tmp_path: Path) -> None:
    path = tmp_path / "hostfile"
    path.write_text("# mine\nnode1 slots=8\n\nnode2 slots=8 # the other\n")
    assert read_hostfile(path) == {"node1": 8, "node2": 8}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no hosts"),
        ("node1\n", "line 1"),
        ("node1 slots=0\n", "line 1"),
        ("node1 8\n", "line 1"),
        ("node1 slots=\N{SUPERSCRIPT TWO}\n", "line 1"),
        ("a slots=2\na slots=2\n", "line 2"),
        ("a slots=2\nb slots=4\n", "different slots"),
    ],
)
def test_hostfiles_that_cannot_be_used(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "hostfile"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_hostfile(path)


def _file(folder: Path, name: str, **plugin: Any) -> str:
    path = folder / name
    zero = {"zero_optimization": {"stage": 3}}
    content = {"train_micro_batch_size_per_gpu": 1, **zero, "ds_ckpt": plugin}
    path.write_text(json.dumps(content), encoding="utf-8")
    return str(path)


def test_one_file_may_be_policy_and_method(tmp_path: Path) -> None:
    activation, compression = {"policy": "mlp"}, {"method": "quantize"}
    both = _file(tmp_path, "both.json", activation=activation, compression=compression)
    names, sections = sections_of(activation=f"none,{both}", compression=both)
    spec = Spec(policies=names["activation"], methods=names["compression"], sections=sections)
    check(spec)
    (one,) = [c for c in spec.configurations if c.name == "both/both"]
    plugin = deepspeed_config(spec, one, parameters=10)["ds_ckpt"]
    assert plugin["activation"] == activation
    assert plugin["compression"]["method"] == "quantize"


@pytest.mark.parametrize(
    ("policies", "methods", "said"),
    [
        ("none,{none}", "", "is a name already"),
        ("none", "{dense}", "is a name already"),
        ("none", "{none}", "no ds_ckpt.compression"),
        ("none,{other}", "", "no ds_ckpt.activation"),
    ],
)
def test_a_file_that_would_change_or_be_nothing_is_refused(
    tmp_path: Path, policies: str, methods: str, said: str
) -> None:
    """Of that name it would be stock DeepSpeed, or the baseline another one, silently."""
    files = {
        "none": _file(tmp_path, "none.json", activation={"policy": "block"}),
        "dense": _file(tmp_path, "dense.json", compression={"method": "topk"}),
        "other": _file(tmp_path, "other.json", compression={"method": "topk"}),
    }
    with pytest.raises(ConfigError, match=said):
        sections_of(activation=policies.format(**files), compression=methods.format(**files))


@pytest.mark.parametrize("launcher", ["pdsh", "openmpi"])
def test_sshs_port_reaches_both_launchers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: Launcher
) -> None:
    """`deepspeed --ssh_port` is for pdsh; mpirun starts its daemons with ssh of its own."""
    monkeypatch.setenv("OMPI_MCA_plm_rsh_args", "-F mine")
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("a slots=1\nb slots=1\n")
    backend = Hostfile(hostfile, "ens5", launcher, ssh_port=2222)
    one = backend.prepare(["deepspeed", "--module", "x"], tmp_path)
    by_option = "--ssh_port=2222" in one.command
    assert by_option == (launcher == "pdsh")
    assert (one.environment["OMPI_MCA_plm_rsh_args"] == "-F mine -p 2222") == (not by_option)
    interface = "--launcher_args=--mca btl_tcp_if_include ens5" in one.command
    assert interface == (launcher == "openmpi")  # and not deepspeed's eth0


def test_mpirun_must_be_told_the_interface_where_there_is_no_eth0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "_ETH0", tmp_path / "none")
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("a slots=1\nb slots=1\n")
    with pytest.raises(ConfigError, match="--interface ens5"):
        Hostfile(hostfile, launcher="openmpi")


def test_what_the_user_exports_reaches_the_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DS_ENV_FILE takes the place of the user's own file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DS_ENV_FILE", raising=False)
    (tmp_path / ".deepspeed_env").write_text("NCCL_IB_DISABLE=1\nGLOO_SOCKET_IFNAME=eth7\n\n")
    (tmp_path / "run").mkdir()
    path = backends.exported({"GLOO_SOCKET_IFNAME": "eth1"}, tmp_path / "run")
    found = dict(line.split("=", 1) for line in Path(path).read_text().splitlines())
    assert found == {"NCCL_IB_DISABLE": "1", "GLOO_SOCKET_IFNAME": "eth1"}
