"""Every policy on many architectures under ZeRO-3 with two processes."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import parameter_offload

import ds_ckpt
from tests import architectures
from tests.architectures import ARCHITECTURES, OFTEN
from tests.distributed import models
from tests.distributed.pool import fresh, ranks
from tests.distributed.training import running

LAYERS = 3
POLICIES: dict[str, dict[str, Any]] = {
    **{name: {"policy": name} for name in ("block", "attention", "mlp", "selective", "offload")},
    "every_n": {"policy": "every_n", "every_n": 2},
    "segments": {"policy": "segments", "segment_size": 2},
    "rules": {
        "rules": [
            {"match": "0", "policy": "selective", "save_ops": "matmuls"},
            {"match": "1-2", "policy": "segments"},
        ]
    },
}
OFFLOAD = {"offload": True, "offload_min_bytes": 0}
ALL = [(policy, offload) for policy in POLICIES for offload in (False, True)]
ALL.remove(("offload", False))
SOME = [("block", False), ("selective", True)]
OTHERS = tuple(kind for kind in ARCHITECTURES if kind not in OFTEN)
THIRDS = tuple(OTHERS[i::3] for i in range(3))


@pytest.mark.parametrize(
    ("kinds", "policies"),
    [
        (("llama",), ALL),
        (("t5", "mixtral", "vit"), SOME),
        *(pytest.param(kinds, ALL, marks=pytest.mark.slow) for kinds in (OFTEN[1:], *THIRDS)),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, tuple) else f"{len(given)} ways",
)
@ranks(2, timeout=280)
def test_gradients_are_bitwise_those_of_no_checkpointing(kinds, policies) -> None:
    """No weight is gathered more often than twice a step, none is left gathered."""
    for kind in kinds:
        fresh()
        with running(architectures.build(kind, LAYERS), reuse=0, lr=0.0) as engine:
            plain = _train(engine, kind, {})
            assert any(bool(g.any()) for g in plain["gradients"])
            again = _train(engine, kind, {})
            assert models.equal(plain["gradients"], again["gradients"]), "it has moved"
            limit = {n: max(2, *(s[n] for s in plain["gathers"])) for n in plain["gathers"][0]}
            for policy, offload in policies:
                name = f"{kind} {policy}{' offload' * offload}"
                ours = _train(engine, kind, POLICIES[policy] | (OFFLOAD if offload else {}))
                assert models.equal(plain["gradients"], ours["gradients"]), name
                assert plain["losses"] == ours["losses"], name
                more = [n for n, most in limit.items() if max(s[n] for s in ours["gathers"]) > most]
                assert more == [], name
                assert ours["left"] == [], name
                assert ours["stack"] == plain["stack"], name
                assert " blocks (" in ours["summary"], name
                if offload:
                    out, back = ours["out_and_back"]
                    assert sum(out.values()) > 0, name
                    assert sum(back.values()) > 0, name
                    # what the last block saves, too, is on the device in backward
                    assert all(back.get(block, 0) <= n for block, n in out.items()), name


def _train(engine: Any, kind: str, activation: dict[str, Any], steps: int = 2) -> dict[str, Any]:
    """Gradient partitions of all steps, bit for bit, and what was gathered and left.

    The engine's learning rate is 0: every policy begins and ends with the same weights.
    """
    section = {"activation": activation, "telemetry": {"enabled": True}}
    engine._config._param_dict["ds_ckpt"] = section
    session = ds_ckpt.attach(engine)
    parameters = list(engine.module.named_parameters())
    height = len(parameter_offload.FWD_MODULE_STACK)
    gradients, losses, gathers, left = [], [], [], []
    for step in range(steps):
        before = session.counters.snapshot()
        torch.manual_seed(step + dist.get_rank())
        loss = engine(**architectures.batch(kind, 2 * step + dist.get_rank())).loss
        engine.backward(loss)
        losses.append(float(loss.detach()))
        gradients += models.gradients(engine)
        left += [n for n, p in parameters if p.ds_status.name != "NOT_AVAILABLE"]
        engine.step()
        delta = session.counters.snapshot() - before
        gathers.append({n: delta.gathers.get(p.ds_id, 0) for n, p in parameters})
    offload = session.offload
    result = {
        "out_and_back": (dict(offload.out), dict(offload.back)) if offload else None,
        "gradients": gradients,
        "losses": losses,
        "gathers": gathers,
        "left": left,
        "stack": len(parameter_offload.FWD_MODULE_STACK) - height,
        "summary": session.summary,
    }
    session.detach()
    return result
