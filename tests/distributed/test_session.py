"""Every way in, on real engines, with the HF Trainer and accelerate among them."""

import json
import time
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import stage3

import ds_ckpt
from ds_ckpt import environment
from ds_ckpt.compression import wire
from ds_ckpt.engine import entry
from ds_ckpt.zero3 import collectives
from tests.distributed import models
from tests.distributed.models import topk_section
from tests.distributed.pool import fresh, once, ranks
from tests.distributed.training import captured_log, refused, running

PASTED: dict[str, Any] = {"activation_checkpointing": {"partition_activations": False}}
BLOCK = {"ds_ckpt": {"activation": {"policy": "block"}}}
BOTH = {"ds_ckpt": {"activation": {"policy": "block"}, **topk_section(topk={"density": 0.05})}}


@once(when=lambda way, sections, *_: way == "stock")
def _ways_in(way: str, sections: dict[str, Any], folder: Path | None = None) -> Any:
    """Train three steps through one way in; what the session looks like, and the losses."""
    fresh()
    config, model = models.zero3_config(**sections), models.build("llama")
    given = {"model": model, "model_parameters": model.parameters(), "config": config}
    if way == "install":
        ds_ckpt.install()
        ds_ckpt.install()  # idempotent
    try:
        if way == "initialize":
            engine, *_ = ds_ckpt.initialize(None, **given)
        elif way == "file":
            path = folder / f"{dist.get_rank()}.json"
            path.write_text(json.dumps(config))
            engine, *_ = ds_ckpt.initialize(**{**given, "config": str(path)})
        else:
            engine, *_ = deepspeed.initialize(**given)
        if way == "attach":
            assert ds_ckpt.session_of(engine) is None
            ds_ckpt.attach(engine)
        session = ds_ckpt.session_of(engine)
        engine.train()
        found = {"losses": models.train(engine, "llama", 3)}
        if session is not None:
            found["summary"] = session.summary
            found["blocks"] = [b.name for b in session._blocks.blocks]
            found["method"] = session.config.compression.method
        engine.destroy()
        return found
    finally:
        ds_ckpt.uninstall()
        assert not hasattr(deepspeed.initialize, "__wrapped__")


@ranks(2)
def test_all_ways_in_end_in_the_same_session(tmp_path: Path) -> None:
    first, *others = (
        _ways_in(way, BOTH, tmp_path) for way in ("initialize", "attach", "install", "file")
    )
    assert len(first["blocks"]) == 3
    assert first["method"] == "topk"
    assert all(other == first for other in others)
    assert " on 3 blocks (LlamaDecoderLayer)" in first["summary"]
    assert "Top-K" in first["summary"]


@pytest.mark.parametrize("way", ["initialize", "install"])
@ranks(2)
def test_without_our_sections_it_is_plain_deepspeed(way: str) -> None:
    assert _ways_in(way, {}) == _ways_in("stock", {})


@pytest.mark.parametrize(
    ("slots", "kind", "section", "words"),
    [
        (
            *([2], "plain", {"activation": {"policy": "block", "modules": ["PlainBlok"]}}),
            ["PlainBlok", "PlainBlock"],
        ),
        ([2], "plain", BLOCK["ds_ckpt"], ['"modules": ["PlainBlock"]']),
        ([2], "llama", {"compression": {"method": "topkk"}}, ["$.ds_ckpt.compression.method"]),
        (
            *([2], "llama", topk_section(rules=[{"match": "*.missing.*", "method": "quantize"}])),
            ["$.ds_ckpt.compression.rules[0]", "embed_tokens"],
        ),
        (
            *([1, 3], "llama", topk_section(exchange={"levels": 2})),
            ["$.ds_ckpt.compression.exchange.levels", "unequal numbers of ranks (1, 3)"],
        ),
    ],
    ids=["modules", "no modules", "method", "rule", "levels"],
)
@ranks()
def test_what_does_not_fit_is_refused_and_leaves_deepspeed_untouched(kind, section, words) -> None:
    original = stage3.reduce_scatter_coalesced
    with refused(*words), running(kind, section):
        pass
    assert stage3.reduce_scatter_coalesced is original


@pytest.mark.parametrize("part", ["_gather", "_gradient", "_blocks"])
@ranks(2)
def test_an_error_of_one_part_leaves_no_other_part_attached(part: str) -> None:
    """An engine is destroyed while one part of its session cannot be left."""
    before = stage3.reduce_scatter_coalesced
    section = topk_section() | BLOCK["ds_ckpt"]
    engine = models.start("llama", models.zero3_config(ds_ckpt=section))
    optimizer, blocks = engine.optimizer, engine.module.model.layers
    session = ds_ckpt.session_of(engine)
    leave = getattr(session, part).detach if part != "_blocks" else session._blocks.remove

    def raises() -> None:
        leave()
        raise RuntimeError("the other process has gone")

    setattr(getattr(session, part), leave.__name__, raises)
    with pytest.raises(RuntimeError, match="the other process has gone"):
        engine.destroy()
    patched = {"zero_grad", "_loss_scale_update_and_overflow_cleanup"}
    assert not patched & vars(optimizer).keys()
    assert not any("forward" in vars(block) for block in blocks)
    assert stage3.reduce_scatter_coalesced is before
    assert session.counters not in collectives._listeners
    assert ds_ckpt.session_of(engine) is None


def _unlike(rank_1: str) -> str:
    """This rank's error if rank 1 has no plugin or other settings."""
    others = {"none": {}, "other": {"ds_ckpt": {"activation": {"policy": "mlp"}}}}
    is_other = dist.get_rank() == 1
    config = models.zero3_config(**(others.get(rank_1, BLOCK) if is_other else BLOCK))
    has_plugin = rank_1 != "stock" or not is_other
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv(environment.WAIT_VARIABLE, "0.5")
        if rank_1 == "wire" and is_other:
            monkeypatch.setattr(wire, "VERSION", 99)
        if rank_1 == "version" and is_other:
            monkeypatch.setattr(entry, "__version__", "9.9")
        try:
            models.start("llama", config, plugin=has_plugin)
        except ds_ckpt.UnsupportedError as error:
            return str(error)
    return ""


@ranks(2)
def test_a_rank_without_the_plugin_is_named_before_anything_waits() -> None:
    start_s = time.monotonic()
    message = _unlike("stock")
    if dist.get_rank() == 0:
        assert "no answer from ds_ckpt within 0.5 s on rank 1" in message
        assert time.monotonic() - start_s < 20
    else:
        assert message == ""


@pytest.mark.parametrize(
    ("rank_1", "other"),
    [
        ("none", "plain DeepSpeed"),
        ("other", "checkpointing mlp"),
        ("wire", "wire format 99, checkpointing block"),
        ("version", f"ds_ckpt 9.9, wire format {wire.VERSION}, checkpointing block"),
    ],
)
@ranks(2)
def test_ranks_with_other_settings_are_named_on_all(rank_1: str, other: str) -> None:
    message = _unlike(rank_1)
    assert "checkpointing block on rank 0" in message
    assert f"{other} on rank 1" in message


@ranks(2)
def test_a_section_without_effect_is_said_by_one_rank() -> None:
    with captured_log() as said, running("llama", {"activation": {"policy": "none"}}):
        pass
    line = "ds_ckpt: the ds_ckpt section switches nothing on: plain DeepSpeed"
    assert said == [line] * (dist.get_rank() == 0)


@pytest.mark.parametrize("section", [BLOCK, {}])
@ranks(2)
def test_an_engine_for_evaluation_alone_is_left_to_deepspeed(section: dict[str, Any]) -> None:
    """An engine without an optimizer, as transformers builds it; Lightning's has no section."""
    config = models.zero3_config(**section)
    del config["optimizer"]
    ds_ckpt.install()
    try:
        with captured_log() as said:
            engine, *_ = deepspeed.initialize(model=models.build("llama"), config=config)
    finally:
        ds_ckpt.uninstall()
    assert ds_ckpt.session_of(engine) is None
    line = "ds_ckpt: this engine has no optimizer (inference): plain DeepSpeed"
    assert (line in said) == (dist.get_rank() == 0)
    with pytest.raises(ds_ckpt.UnsupportedError, match=r"engine\.optimizer"):
        ds_ckpt.attach(engine)
    engine.eval()
    with torch.no_grad():
        assert engine(**models.batch("llama", 0, dist.get_rank())).loss > 0
    engine.destroy()
