"""The rules across sections name DeepSpeed's keys: the installed one must read each."""

import inspect
import pkgutil
from importlib import metadata
from pathlib import Path

import pytest

from ds_ckpt.config.models import CompatSection
from ds_ckpt.config.rules import CONFLICTS
from ds_ckpt.zero3.compatibility import LAST

pytestmark = pytest.mark.skipif(
    metadata.version("deepspeed") != LAST, reason="the keys are those of the newest DeepSpeed"
)

ALL = [key for _, rows in CONFLICTS for key in rows]
REVIEWED = Path(__file__).with_name("reviewed_zero_keys.txt")
"""Keys of zero_optimization that were looked at when the rules were written. A new one may lead
gradients or weights past the hooks: look at it, add a rule or add it to the file."""
_MODELS = {
    "zero_optimization": "deepspeed.runtime.zero.config:DeepSpeedZeroConfig",
    "zero_optimization.offload_optimizer": (
        "deepspeed.runtime.zero.offload_config:DeepSpeedZeroOffloadOptimizerConfig"
    ),
    "zero_optimization.offload_param": (
        "deepspeed.runtime.zero.offload_config:DeepSpeedZeroOffloadParamConfig"
    ),
    "compile": "deepspeed.compile.config:CompileConfig",
    "hybrid_engine": "deepspeed.runtime.config:HybridEngineConfig",
    "tensor_parallel": "deepspeed.runtime.tensor_parallel.config:TPTrainingConfig",
}


def _fields(section: str) -> set[str]:
    """The keys that DeepSpeed's model of a section reads."""
    return set(pkgutil.resolve_name(_MODELS[section]).model_fields)


@pytest.mark.parametrize("key", [*ALL, "zero_optimization.zero_quantized_weights"])
def test_a_rule_names_a_key_that_deepspeed_reads(key: str) -> None:
    from deepspeed.module_inject.auto_ep_config import AutoEPConfig
    from deepspeed.runtime import config, constants

    section, _, name = key.rpartition(".")
    if section in _MODELS:
        removed = config._REMOVED_ZERO_CONFIG_KEYS if section == "zero_optimization" else {}
        assert name in _fields(section) | {*removed}
    elif section == "expert_parallel":
        assert section == config.EXPERT_PARALLEL
        assert hasattr(AutoEPConfig(), name)
    elif section == "optimizer":
        assert name == constants.TYPE
        assert config.MUON_OPTIMIZER == "muon"
    elif name == "sequence_parallel_size":
        assert name in inspect.getsource(config.DeepSpeedConfig)
    else:
        own = f"{name.upper()}_{section.upper()}"  # of a section of its own
        constant = getattr(constants, own if section else name.upper())
        assert constant == name


def test_deepspeeds_activation_section_has_the_expected_keys() -> None:
    from deepspeed.runtime.activation_checkpointing.config import ACT_CHKPT, ACT_CHKPT_DEFAULT

    assert ACT_CHKPT == "activation_checkpointing"
    assert set(CompatSection.model_fields) == set(ACT_CHKPT_DEFAULT)


def test_every_key_of_zero_has_been_looked_at() -> None:
    assert _fields("zero_optimization") == set(REVIEWED.read_text().split())
