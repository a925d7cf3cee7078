"""Engines that the session refuses before it touches them."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest
import torch

from ds_ckpt.engine import weights
from ds_ckpt.engine.refusals import refuse_model_parallel, refuse_pipeline
from ds_ckpt.errors import DsCkptError, Problem, StateError, UnsupportedError
from ds_ckpt.telemetry.units import size


class PipelineEngine:
    """Stands in for DeepSpeed's, which needs several processes."""


class OwnPipeline(PipelineEngine):
    """A user's subclass."""


@pytest.mark.parametrize("engine", [PipelineEngine(), OwnPipeline()])
def test_pipelines_are_refused(engine: object) -> None:
    with pytest.raises(UnsupportedError, match="activation_checkpoint_interval"):
        refuse_pipeline(engine)
    refuse_pipeline(SimpleNamespace())


def test_the_name_is_deepspeeds() -> None:
    from deepspeed.runtime.pipe.engine import PipelineEngine as Theirs

    assert Theirs.__name__ == "PipelineEngine"


@pytest.mark.parametrize("attribute", ["mp_world_size", "sequence_parallel_size"])
def test_groups_that_share_parameter_names_are_refused(attribute: str) -> None:
    with pytest.raises(UnsupportedError, match=attribute):
        refuse_model_parallel(SimpleNamespace(**{attribute: 2}))
    refuse_model_parallel(SimpleNamespace(mp_world_size=1, sequence_parallel_size=1))


class Parameter(SimpleNamespace):
    def element_size(self) -> int:
        return 2


@pytest.mark.parametrize(
    ("device", "needed", "remedies"),
    [
        # 4 nodes of 2: 4 shards of 8, of 2 bytes; twice on memory that the ranks of a node share
        ("cuda", 2 * 4 * 125_001, ["use 3 ranks per node or more", "frees 300 KiB, enough"]),
        ("cpu", 2 * 2 * 4 * 125_001, []),
    ],
)
def test_a_copy_of_the_weights_that_does_not_fit_is_refused_with_what_would(
    monkeypatch: pytest.MonkeyPatch, device: str, needed: int, remedies: list[str]
) -> None:
    missing = Parameter(ds_numel=1_000_001, ds_secondary_tensor=None)
    made = Parameter(ds_numel=10**9, ds_secondary_tensor=torch.empty(1))
    module = SimpleNamespace(parameters=lambda: [missing, made])
    engine = SimpleNamespace(device=device, module=module)
    kept = dict.fromkeys(weights.OFFLOADED, 100 * 1024)
    monkeypatch.setattr(weights, "resident_bytes", lambda engine, blocks: {**kept, "other": 10**9})
    monkeypatch.setattr(weights, "free_on", lambda device: needed)
    weights._refuse_too_large(engine, '"auto"', 4, 2)
    monkeypatch.setattr(weights, "free_on", lambda device: needed - 300 * 1024)
    with pytest.raises(UnsupportedError) as caught:
        weights._refuse_too_large(engine, '"auto"', 4, 2)
    (problem,) = caught.value.problems
    assert problem.where == "$.ds_ckpt.weights.resident"
    assert f"takes {size(needed)}" in problem.why
    assert f"where {size(needed - 300 * 1024)} are free" in problem.why
    told = problem.remedy.split("; or ")
    assert told[0].startswith("free 300 KiB")
    assert len(told) == 1 + len(remedies)
    assert all(words in told[i] for i, words in enumerate(remedies, 1))
    assert problem.remedy.endswith("or set $.ds_ckpt.weights.resident to false")
    monkeypatch.setattr(weights, "free_on", lambda device: needed - 300 * 1024 - 1)
    if device == "cuda":
        with pytest.raises(UnsupportedError, match="too little alone"):
            weights._refuse_too_large(engine, '"auto"', 4, 2)


def test_a_configuration_in_base64_is_deepspeeds_business() -> None:
    from ds_ckpt.engine.entry import _raw_config

    assert _raw_config(None, "eyJ6ZXJv" * 100, None) is None  # longer than a file's name may be


@pytest.mark.parametrize("kind", [UnsupportedError, StateError])
@pytest.mark.parametrize("headline", [None, "nothing fits"])
def test_an_error_can_be_raised_in_another_process(
    kind: type[DsCkptError], headline: str | None
) -> None:
    error = kind([Problem("a", "b", "c", "d"), Problem("e", "f", "g", "h")], headline=headline)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == str(error)
    assert again.problems == error.problems
