"""Cost per step of keeping boundaries in host memory, on the stand-in: no accelerator involved.

    python benchmarks/offload.py [--repeats 25] [--layers 8 --hidden 128 --tokens 256 --batch 4]

A Llama in fp32 on one CPU thread, forward and backward. Milliseconds are the processor time of the
process (the machine is shared, and what others do is not this benchmark's), medians and quartiles
of rows taken in turns, and a row's median over that of plain block checkpointing. "Device" and host
are the same memory here: copies are made and the originals let go, nothing overlaps and no
memory is saved. So these are the costs of the engine and of two memory copies; what a side stream
hides, and what a pinned buffer gains, has to be measured on an accelerator.

`transformers offload=True` is torch's `save_on_cpu`: on the CPU it makes its copy out (not
pinned, see `_unpinned`), and none back. Boundaries: inputs of the layers whose storage is alive
when forward has ended, those that went out and came back, and their bytes, by the session's own
counters. Every row's gradients are compared with the first's, bit for bit.
"""

import argparse
import contextlib
import logging
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from _timing import Work, interleaved_s
from torch.multiprocessing.reductions import StorageWeakRef

from ds_ckpt.activation import CheckpointedBlocks
from ds_ckpt.activation.inputs import CheckpointedInputs, CheckpointedInputsConfig, build_inputs
from ds_ckpt.activation.policies import Policy, make_units
from ds_ckpt.telemetry.counters import OffloadCounters

ROWS: dict[str, CheckpointedInputsConfig | str] = {
    "no checkpointing": "none",
    "transformers": "transformers",
    "transformers offload=True": "transformers offload",
    "ds_ckpt block": CheckpointedInputsConfig(),
    "ds_ckpt block, offload": CheckpointedInputsConfig(offload=True),
    "ds_ckpt block, offload, 2 ahead": CheckpointedInputsConfig(offload=True, offload_prefetch=2),
}
REFERENCE = "ds_ckpt block"
MIB = 2**20


@contextlib.contextmanager
def _unpinned() -> Iterator[None]:
    """transformers asks for pinned memory, which a machine without an accelerator has none of."""
    from transformers import modeling_utils

    stock = modeling_utils.save_on_cpu
    modeling_utils.save_on_cpu = lambda **_: torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (tensor.device, torch.empty_like(tensor).copy_(tensor)),
        lambda packed: packed[1].to(packed[0]),
    )
    try:
        yield
    finally:
        modeling_utils.save_on_cpu = stock


@dataclass
class Row:
    """One way to keep boundaries, on a model of its own."""

    model: Any
    tokens: torch.Tensor
    boundaries: CheckpointedInputs | None = None
    refs: list[StorageWeakRef] = field(default_factory=list)
    on_device: int = 0

    def step(self) -> None:
        self.refs.clear()
        self.model.zero_grad()
        loss = self.model(input_ids=self.tokens, labels=self.tokens).loss
        self.on_device = sum(not ref.expired() for ref in self.refs[: len(self.layers)])
        loss.backward()

    @property
    def layers(self) -> Any:
        return self.model.model.layers

    def watch(self) -> None:
        for layer in self.layers:
            layer.register_forward_pre_hook(
                lambda _, args: self.refs.append(StorageWeakRef(args[0].untyped_storage()))
            )

    def cells(self) -> str:
        counters = None
        if self.boundaries is not None and self.boundaries.store is not None:
            self.boundaries.store.counters = counters = OffloadCounters()
        self.step()
        words = f"{self.on_device:>9}"
        if counters is None:
            return f"{words}{'-':>9}{'-':>9}{'-':>9}"
        moved = f"{counters.out.total():>9}{counters.back.total():>9}"
        return f"{words}{counters.out_bytes.total() / MIB:>9.2f}{moved}"


def make(kind: CheckpointedInputsConfig | str, options: argparse.Namespace) -> Row:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=options.hidden,
        intermediate_size=4 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        max_position_embeddings=options.tokens,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).train()
    row = Row(model, torch.randint(0, 256, (options.batch, options.tokens)))
    if isinstance(kind, CheckpointedInputsConfig):
        units = make_units(model, Policy())
        row.boundaries = build_inputs(kind, model, units, torch.device("cpu"))
        around = row.boundaries.around if row.boundaries else None
        CheckpointedBlocks(model, units=units, around=around)
    elif kind.startswith("transformers"):
        with _unpinned():
            model.activation_checkpointing_enable(offload="offload" in kind)
    row.watch()
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    options = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    rows = {name: make(kind, options) for name, kind in ROWS.items()}
    with _unpinned():
        steps: dict[str, Work] = {name: row.step for name, row in rows.items()}
        taken_s = interleaved_s(steps, options.repeats, time.process_time)
        taken_ms = {name: [1e3 * step_s for step_s in times] for name, times in taken_s.items()}
        gradients = {n: [p.grad for p in r.model.parameters()] for n, r in rows.items()}
        boundary_mib = options.batch * options.tokens * options.hidden * 4 / MIB
        print(f"torch {torch.__version__}, one CPU thread, no accelerator (the stand-in)")
        print(
            f"Llama of {options.layers} layers, hidden {options.hidden}, {options.batch} x "
            f"{options.tokens} tokens, fp32; a boundary is {boundary_mib:.2f} MiB"
        )
        print(f"{'':<36}{'ms':>8}{'quartiles':>16}{'ratio':>8}", end="")
        print(f"{'alive':>9}{'out MiB':>9}{'out':>9}{'back':>9}")
        reference_ms = statistics.median(taken_ms[REFERENCE])
        for name, row in rows.items():
            pairs = zip(gradients["no checkpointing"], gradients[name], strict=True)
            assert all(torch.equal(a, b) for a, b in pairs), name
            low_ms, median_ms, high_ms = statistics.quantiles(taken_ms[name], n=4)
            print(f"{name:<36}{median_ms:>8.1f}{f'{low_ms:.1f} to {high_ms:.1f}':>16}", end="")
            print(f"{median_ms / reference_ms:>8.3f}{row.cells()}")


if __name__ == "__main__":
    main()
