"""Engines that the session refuses before it touches them."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest
import torch

from ds_ckpt.engine import resident_weights
from ds_ckpt.engine.refusals import refuse_unsupported
from ds_ckpt.errors import DsCkptError, Problem, StateError, UnsupportedError
from ds_ckpt.telemetry.units import size
from ds_ckpt.weights.changes import NodeLayout


class PipelineEngine:
    """Stands in for DeepSpeed's, which needs several processes."""


class OwnPipeline(PipelineEngine):
    """A user's subclass."""


@pytest.mark.parametrize("engine", [PipelineEngine(), OwnPipeline()])
def test_pipelines_are_refused(engine: object) -> None:
    from deepspeed.runtime.pipe.engine import PipelineEngine as Theirs

    assert Theirs.__name__ == "PipelineEngine"
    with pytest.raises(UnsupportedError, match="activation_checkpoint_interval"):
        refuse_unsupported(engine)
    refuse_unsupported(SimpleNamespace(zero_optimization_stage=lambda: 2))


class Parameter(SimpleNamespace):
    def element_size(self) -> int:
        return 2


def test_a_copy_of_the_weights_that_does_not_fit_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On 4 nodes of 2: 4 shards of 8, of 2 bytes, on memory that the 2 ranks of a node share."""
    missing = Parameter(ds_numel=1_000_001, ds_secondary_tensor=None)
    made = Parameter(ds_numel=10**9, ds_secondary_tensor=torch.empty(1))
    engine = SimpleNamespace(
        device="cpu", module=SimpleNamespace(parameters=lambda: [missing, made])
    )
    needed, layout = 16 * 125_001, NodeLayout(4, 2, 0, None)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
    monkeypatch.setattr(resident_weights, "free_on", lambda device: needed)
    resident_weights.refuse_too_large(engine, layout, '"auto"')
    monkeypatch.setattr(resident_weights, "free_on", lambda device: needed - 300 * 1024)
    with pytest.raises(UnsupportedError, match=f"takes {size(needed)}.*300 KiB more") as caught:
        resident_weights.refuse_too_large(engine, layout, '"auto"')
    assert caught.value.problems[0].where == "$.ds_ckpt.weights.resident"


def test_a_configuration_in_base64_is_deepspeeds_business() -> None:
    from ds_ckpt.engine.entry import _with_section

    # longer than a file's name may be
    assert _with_section({"config": "eyJ6ZXJv" * 100}) is None


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
