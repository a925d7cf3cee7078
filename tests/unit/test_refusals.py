"""Engines that the session refuses before it touches them."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest

from ds_ckpt.errors import DsCkptError, Problem, StateError, UnsupportedError
from ds_ckpt.session.refusals import refuse_model_parallel, refuse_pipeline


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
