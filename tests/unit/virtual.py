"""A data-parallel world inside the test's process: exchanges, residuals, and what they did."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ds_ckpt.compression import Feedback
from ds_ckpt.compression.powersgd import Factors
from ds_ckpt.compression.storage import ResidualDtype
from ds_ckpt.exchange.exchange import AllToAllExchange
from ds_ckpt.exchange.layout import LocalShard, ShardLayout
from ds_ckpt.exchange.method_rules import Choose
from ds_ckpt.exchange.transport import InHostSum
from ds_ckpt.lab.validate.virtual import VirtualTransport, VirtualWorld


@dataclass
class World:
    """`world` processes with an exchange and residuals each, `local` of them on each host."""

    world: int
    choose: Choose
    error_feedback: bool = True
    holds: bool = False
    local: int = 1
    residual_dtype: ResidualDtype = "fp32"
    feedbacks: list[Feedback] = field(init=False)

    def __post_init__(self) -> None:
        assert self.world % self.local == 0
        hosts = self.world // self.local
        self.virtual = VirtualWorld(self.world, timeout_s=20.0)
        self.columns = [tuple(range(i, self.world, self.local)) for i in range(self.local)]
        between = [VirtualWorld(hosts, timeout_s=20.0) for _ in self.columns]
        inside = [VirtualWorld(self.local, timeout_s=20.0) for _ in range(hosts)]
        self.transports: list[VirtualTransport] = [
            between[p % self.local].transports[p // self.local] for p in range(self.world)
        ]
        options: Any = {"enabled": self.error_feedback, "accumulates": self.holds}
        options["dtype"] = self.residual_dtype
        self.feedbacks = [Feedback(**options, seed=p) for p in range(self.world)]
        self.factors = [Factors() for _ in range(self.world)]
        members = [inside[p // self.local].transports[p % self.local] for p in range(self.world)]
        sums = [InHostSum(one, self.columns) if self.local > 1 else None for one in members]
        self.exchanges = [
            AllToAllExchange(of, self.choose, *state, accumulates=self.holds, in_host=in_host)
            for of, in_host, *state in zip(
                self.transports, sums, self.feedbacks, self.factors, strict=True
            )
        ]

    def reduce(self, names, gradients, loss_scale=1.0, choose=None) -> list[list[Tensor]]:
        """`gradients[process][tensor]` -> shards `[process][tensor]`; inputs are not changed."""

        def work(p: int) -> list[Tensor]:
            copies = [g.clone() for g in gradients[p]]
            return self.exchanges[p].average(names, copies, loss_scale, choose=choose)

        return self.virtual.run(work)

    def hold(self, names, gradients, loss_scale=1.0) -> list[list[Tensor]]:
        """Accumulate a micro-step whose exchange is deferred; arguments as for `reduce`."""

        def work(p: int) -> list[Tensor]:
            return self.exchanges[p].accumulate(names, list(gradients[p]), loss_scale)

        return self.virtual.run(work)

    def commit(self, end: str = "commit") -> None:
        for state in (*self.feedbacks, *self.factors):
            getattr(state, end)()
        for exchange in self.exchanges:
            exchange.reset_step()

    def rollback(self) -> None:
        self.commit("rollback")

    def residual_sum(self, name: str, numel: int) -> Tensor:
        """Committed residuals of `name`, summed over processes in float64."""
        total = torch.zeros(numel, dtype=torch.float64)
        for process, feedback in enumerate(self.feedbacks):
            residual = feedback.state_dict().get(name)
            if residual is not None:
                layout = self.column(process, numel)
                for member in range(len(layout.members)):
                    total[layout.source(member)] += residual[layout.shard(member)].double()
        return total

    def column(self, process: int, numel: int) -> LocalShard:
        """Return the entries of a tensor of `numel` entries that `process` exchanges."""
        return LocalShard(ShardLayout(numel, self.world), self.columns[process % self.local])


class Operators(TorchDispatchMode):
    """Calls `see` with the name and the arguments of each operator before it runs."""

    def __init__(self, see: Callable[[str, Any], None]) -> None:
        super().__init__()
        self._see = see

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._see(func._schema.name, args)
        return func(*args, **(kwargs or {}))


def assemble(shards: Sequence[Sequence[Tensor]], tensor: int) -> Tensor:
    return torch.cat([per_process[tensor] for per_process in shards])
