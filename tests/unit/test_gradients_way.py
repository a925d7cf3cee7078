"""Ways of tensors: files that a bucket's gradients pass, hooks that a block's activations pass."""

import sys
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from virtual import World

import ds_ckpt
from ds_ckpt.activation import Policy, checkpoint, make_policy
from ds_ckpt.engine.step import make_step_state
from ds_ckpt.exchange.method_rules import ExchangeSettings, MethodSettings
from ds_ckpt.lab.validate.virtual import VirtualTransport
from ds_ckpt.telemetry import Counters
from ds_ckpt.zero3.gradient_hook import GradientHook
from tests.unit.offload_models import Model, put_on

ROOT = str(Path(ds_ckpt.__file__).parent) + "/"


class Way:
    """Notes, up to the wire, the files of functions that hand tensors on or make new ones.

    Functions that return views (of packets, of shards) address a tensor, which stays where it is.
    """

    def __init__(self) -> None:
        self.files: set[str] = set()
        self._open: list[tuple[str, set[int]]] = []
        self._since_wire: set[str] = set()

    def __call__(self, frame: FrameType, event: str, value: Any) -> None:
        file = frame.f_code.co_filename.removeprefix(ROOT)
        if file.startswith(("/", "<")) or event not in ("call", "return"):
            return
        if file.startswith("lab/"):  # ranks are threads here
            file = "exchange/transport.py"
        if event == "call":
            self._open.append((file, storages([*frame.f_locals.values()])))
            if frame.f_code in WIRE:
                self.files |= self._since_wire | {file for file, taken in self._open if taken}
                self._since_wire.clear()
            return
        _, taken = self._open.pop()
        if taken and storages(value) - taken:
            self._since_wire.add(file)


def storages(values: Any) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in tree_leaves(values) if isinstance(t, Tensor)}


WIRE = (VirtualTransport.all_to_all.__code__, VirtualTransport.all_reduce.__code__)
ALWAYS = {"zero3/gradient_hook.py", "exchange/exchange.py", "exchange/transport.py"}
FEEDBACK = "compression/error_feedback.py"
POWERSGD = {"exchange/low_rank.py", "compression/powersgd.py"}


@pytest.mark.parametrize("local", [1, 2])
@pytest.mark.parametrize(
    ("method", "values", "files"),
    [
        ("quantize", {"bits": 3}, {"compression/quantize.py"}),
        ("topk", {"density": 0.01}, {"compression/topk.py"}),
        (
            "topk",
            {"density": 0.01, "values": "bf16"},
            {"compression/topk.py", "compression/wire.py"},
        ),
        ("powersgd", {"rank": 2}, POWERSGD),
    ],
)
def test_a_gradient_passes_six_files(method, values, files, local) -> None:
    world = World(2 * local, lambda name, shape: None, local=local)
    settings = ExchangeSettings(MethodSettings(method, **values), warmup_steps=0)
    way = Way()

    def work(p: int) -> None:
        transports = world.transports[p], world.virtual.transports[p]
        how = {"current_step": lambda: 1, "in_host": world.exchanges[p].in_host}
        residuals = settings.residuals(p, defers=False)
        state = make_step_state(settings, *transports, residuals, **how)
        hook: Any = GradientHook.__new__(GradientHook)
        vars(hook).update(optimizer=SimpleNamespace(loss_scale=1.0), names={0: "w"}, verify=None)
        vars(hook).update(exchange=state, counters=Counters())
        sys.setprofile(way if p == 0 else None)
        try:
            hook.reduce_bucket([SimpleNamespace(ds_id=0)], [torch.ones(64, 64)], None, None)
        finally:
            sys.setprofile(None)

    world.virtual.run(work)
    assert way.files == ALWAYS | {FEEDBACK} | files
    assert len(way.files) <= 6


@pytest.mark.parametrize(("policy", "modes"), [("block", []), ("selective", ["modes"])])
def test_an_activation_passes_torchs_checkpoint_one_context_and_one_offload_hook(
    policy, modes, monkeypatch
) -> None:
    """A block enters three pairs of hooks, its recomputation two, and a mode only if selective."""
    entered: list[str] = []

    def record(owner: Any, name: str, what: Any) -> None:
        plain = getattr(owner, name)
        call = lambda one, *a, **k: entered.append(what(one)) or plain(one, *a, **k)  # noqa: E731
        monkeypatch.setattr(owner, name, call)

    record(saved_tensors_hooks, "__enter__", lambda hooks: hooks.pack_hook.__module__)
    record(TorchDispatchMode, "__enter__", lambda mode: "modes")
    record(checkpoint, "checkpoint", lambda function: "torch.utils.checkpoint()")
    model = Model(blocks=3)
    _, store = put_on(model, None, policy=Policy(make_policy(policy), modules=("Block",)))
    loss = model(torch.ones(2, 8))
    offload, torchs = "ds_ckpt.activation.inputs", "torch.utils.checkpoint"
    ours = ["ds_ckpt.activation.checkpoint", *modes]
    assert entered == 3 * [offload, "torch.utils.checkpoint()", torchs, *ours]
    entered.clear()
    loss.backward()
    assert entered == 3 * [torchs, *ours]
    assert store.counters.out.total() > 0
