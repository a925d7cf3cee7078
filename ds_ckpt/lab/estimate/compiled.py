"""What torch.compile captures of a model, and what its partitioner saves by recomputing itself.

On a model without memory, with no code generated: captured graphs are interpreted and their
operators counted, and AOTAutograd cuts them into forward and backward as Inductor's default does
(`min_cut_rematerialization_partition`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from ds_ckpt.activation import Block
from ds_ckpt.activation.planning.costs import flops_of, launches
from ds_ckpt.activation.planning.fake import FakeModel
from ds_ckpt.errors import Problem, UnsupportedError
from ds_ckpt.lab.estimate.observe import Observation, nothing_left
from ds_ckpt.lab.estimate.profiles import BlockCompiled, Break, Compiled, Footprint
from ds_ckpt.lab.subject import run_forward
from ds_ckpt.telemetry.memory import OUTSIDE, MemoryTracker, Operator

_STILL_MUCH = 0.1
"""A block that the compiler has captured needs a policy if it still holds more than this share of
what it held, and twice its checkpointed input."""


def compile_report(made: FakeModel, blocks: Sequence[Block], kept: Footprint) -> Compiled:
    """Raises UnsupportedError where the compiler itself fails.

    Args:
        made: the model and batch.
        blocks: of that model.
        kept: the step with policy "block".
    """
    import torch._dynamo as dynamo

    seen = _Backend(made.model, blocks)
    dynamo.reset()
    dynamo.utils.counters.clear()
    try:
        # outside the fake mode: the compiler finds it in the tensors, and takes no other mode
        compiled: Any = torch.compile(made.model, backend=seen.compiled)
        with nothing_left(made.model, made.batch):
            run_forward(compiled, made.batch).backward()
        # those for which a whole frame was left to Python
        told = {b.reason for b in seen.breaks}
        reasons = dict.fromkeys(_first_line(r) for r in dynamo.utils.counters["graph_break"])
        seen.breaks += [Break(reason, "") for reason in reasons if reason not in told]
    except Exception as error:
        raise UnsupportedError(
            Problem(
                where="--compile",
                found=f"{type(error).__name__}: {_first_line(str(error))[:200]}",
                why=f"torch.compile itself fails on {type(made.model).__name__}",
                remedy="leave --compile out; training it with torch.compile would fail as well",
            ),
            headline="torch.compile cannot be profiled",
        ) from error
    finally:
        dynamo.reset()
    # a forward without the compiler, masks decided as the compiler sees them
    traced = Observation(made.model, blocks)
    with made.entered(tracing=True), traced, traced.saved:
        loss = run_forward(made.model, made.batch)
    eager = {b.name: b.total_bytes for b in traced.blocks()}
    del loss
    inputs = {b.name: b.checkpointed_bytes for b in kept.blocks}
    operators: Counter[str] = Counter()
    for place, work in traced.work.items():
        operators[place.block] += work.launches

    def block(name: str) -> BlockCompiled:
        captured, saved, kept_bytes = seen.launches[name], seen.min_cut[name], inputs.get(name, 0)
        much = saved > max(2 * kept_bytes, _STILL_MUCH * eager[name])
        needs = captured < operators[name] or much
        return BlockCompiled(name, captured, operators[name], eager[name], saved, kept_bytes, needs)

    whole = traced.total("forward")
    return Compiled(
        graphs=seen.graphs,
        breaks=tuple(seen.breaks),
        captured_flops=seen.flops,
        flops=whole.flops,
        captured_operators=sum(seen.launches.values()),
        operators=whole.launches,
        eager_held_bytes=traced.saved.bytes,
        min_cut_bytes=sum(seen.min_cut.values()),
        blocks=tuple(block(b.name) for b in blocks),
    )


def _first_line(reason: str) -> str:
    return reason.strip().splitlines()[0].strip() if reason.strip() else "no reason is given"


class _Backend:
    """Counts what runs in captured graphs, and what goes from their forward to their backward.

    Attributes:
        launches, min_cut: operators, and bytes that wait for backward, by block.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[Block]) -> None:
        self._model, self._block = model, OUTSIDE
        self._names = {b.name for b in blocks}
        self._owners = {id(p): b.name for b in blocks for p in b.module.parameters()}
        self.graphs = self.flops = 0
        self.breaks: list[Break] = []
        self.launches: Counter[str] = Counter()
        self.min_cut: Counter[str] = Counter()

    def compiled(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.graphs += 1
        reason = getattr(module, "compile_subgraph_reason", None)
        if reason is not None and reason.graph_break:
            frame = reason.user_stack[-1] if reason.user_stack else None
            where = f"{frame.filename}:{frame.lineno} in {frame.name}" if frame else ""
            self.breaks.append(Break(_first_line(reason.reason), where))
        cut, outer = self._cut(module, inputs), self

        class Interpreter(fx.Interpreter):
            def run_node(self, node: fx.Node) -> Any:
                outer._block = _block_of(node, outer._names)
                return super().run_node(node)

        def run(*args: Any) -> Any:
            with MemoryTracker(self._model, operator=self._ran):
                Interpreter(module).run(*args)
            return cut(*args)

        return run

    def _ran(self, operator: Operator) -> None:
        if launches(operator):
            self.launches[self._block] += 1
            self.flops += flops_of(operator)

    def _cut(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """The graph as AOTAutograd cuts it."""
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch._aot_autograd.utils import make_boxed_func
        from torch._functorch.partitioners import min_cut_rematerialization_partition
        from torch._inductor.decomposition import select_decomp_table

        weights = {i for i, x in enumerate(inputs) if isinstance(x, nn.Parameter)}
        holders = {self._owners.get(id(inputs[i]), OUTSIDE) for i in weights}
        home = holders.pop() if len(holders) == 1 else OUTSIDE

        def partition(joint: fx.GraphModule, given: Any, **options: Any) -> Any:
            cut = min_cut_rematerialization_partition(joint, given, **options)
            self._count(cut[1], weights, home, joint)
            return cut

        def boxed(module: fx.GraphModule, _: Any) -> Any:
            return make_boxed_func(module.forward)

        compiled: Callable[..., Any] = aot_autograd(
            fw_compiler=boxed,
            bw_compiler=boxed,
            partition_fn=partition,
            decompositions=select_decomp_table(),
        )(module, inputs)
        return compiled

    def _count(
        self, backward: fx.GraphModule, weights: set[int], home: str, joint: fx.GraphModule
    ) -> None:
        """Bytes of the backward's arguments that are neither gradients nor weights."""
        original = {n.name: n for n in joint.graph.nodes}
        counted = set()
        for node in backward.graph.nodes:
            value = node.meta.get("val")
            if node.op != "placeholder" or not isinstance(value, Tensor):
                continue
            base = _base(original.get(node.name, node))
            index = re.fullmatch(r"primals_(\d+)", base.name)
            weight = index is not None and int(index[1]) - 1 in weights
            if node.name.startswith("tangents") or weight or base.name in counted:
                continue
            counted.add(base.name)
            stored = base.meta.get("val", value)
            size = stored if isinstance(stored, Tensor) else value
            block = _block_of(base, self._names)
            self.min_cut[home if block == OUTSIDE else block] += size.nbytes


def _base(node: fx.Node) -> fx.Node:
    """The node whose memory a view shows."""
    while node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
        returns = node.target._schema.returns
        first = node.args[0] if node.args else None
        if not returns or returns[0].alias_info is None or not isinstance(first, fx.Node):
            break
        node = first
    return node


def _block_of(node: fx.Node, names: set[str]) -> str:
    """By the modules that the compiler noted for it."""
    for path, _ in (node.meta.get("nn_module_stack") or {}).values():
        plain = re.sub(r"\['?(\w+)'?\]", r".\1", path.replace("_modules", "")).replace("..", ".")
        parts = plain.split(".")
        for start in range(1, len(parts)):
            for end in range(len(parts), start, -1):
                name = ".".join(parts[start:end])
                if name in names:
                    return name
    return OUTSIDE
