"""A lead or a lower b1 for what error feedback delays, beside dense training with the same.

    nice -n 19 python benchmarks/momentum.py --data FILE [--seeds 0 1 2] [--only 'Top-K*'] \
        [--own-share] [--workers 8]
    python benchmarks/momentum.py --table [--against '1 bit' 0.7 'lead 0.3']
    python benchmarks/momentum.py --kept --own-share --data FILE

Trains what `validate-accuracy` trains (4 virtual workers, 300 steps of which 75 dense) with AdamW
of b1 0.9 and 0.7. An arm is a method and what becomes of the first moment after the warm-up:
`none`, `matched` (the plugin's own), `lead A`, or `b1 B`. Behind a lead `, b2 B` is AdamW's from
the start and `, rate R` another learning rate than 3e-3; `, smoothed` takes the second moment from
squares of the first after the warm-up. Dense training has arms of its own; the best of them is what
an optimizer that was tuned comes to without compression. Resumable.

In every method a process's own share is exact, which is a quarter of each gradient here.
`--own-share` compresses it like the others', as it is with many workers.

`--kept` prints what methods keep back for later steps at step 100 to 130, with b1 0.7: as a share
of energy, which `matched` goes by, and in the metric of Adam's steps (squares over the root of the
second moment), in which entries count as much as they move weights.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ds_ckpt.exchange import build as exchange_build
from ds_ckpt.exchange.build import ExchangeSettings
from ds_ckpt.exchange.exchange import AllToAllExchange, Item
from ds_ckpt.exchange.layout import LocalShard
from ds_ckpt.exchange.metric import StepMetric
from ds_ckpt.exchange.momentum import FirstMoments
from ds_ckpt.exchange.rules import MethodSettings
from ds_ckpt.lab.validate.statistics import paired
from ds_ckpt.lab.validate.task import Task, make_spec, open_task
from ds_ckpt.lab.validate.trainer import train
from ds_ckpt.lab.validate.world import InProcessWorld, Recipe

RESULTS = Path(__file__).parent / "results" / "momentum.jsonl"
WARM_UP = 75
DENSE = "dense"
METHODS = {
    DENSE: MethodSettings("dense"),
    "Top-K 1%": MethodSettings("topk", density=0.01),
    "rank 4": MethodSettings("powersgd", rank=4),
    "2 bits": MethodSettings("quantize", bits=2),
    "3 bits": MethodSettings("quantize", bits=3),
    "1 bit": MethodSettings("entropy_coded", bits=1.0, metric="energy"),
    "1/3 bit": MethodSettings("entropy_coded", bits=0.33, metric="energy"),
    "1 bit in steps": MethodSettings("entropy_coded", bits=1.0, metric="steps"),
    "1/3 bit in steps": MethodSettings("entropy_coded", bits=0.33, metric="steps"),
    "0.31 bits in steps": MethodSettings("entropy_coded", bits=0.31, metric="steps"),
    "1 bit in steps, warm-up in 4 bits": MethodSettings("entropy_coded", bits=1.0, metric="steps"),
}
ARMS = [
    *((DENSE, b1, how) for b1 in (0.9, 0.7) for how in ("none", "lead 0.3")),
    *(
        (m, b1, how)
        for b1 in (0.9, 0.7)
        for m in METHODS
        if m != DENSE and "," not in m
        for how in ("matched", "none")
    ),
]


class OwnShareToo(AllToAllExchange):
    """What a process owns itself goes through the codec like what it sends; low rank has none."""

    def _accumulate(self, items: Sequence[Item], loss_scale: float, *, defer: bool) -> Tensor:
        finite = super()._accumulate(items, loss_scale, defer=False)
        for item in items:
            if item.pending is None or item.codec is None:
                continue
            left = item.own.div(loss_scale)
            if item.energy is not None:
                item.energy = item.energy + left.square().sum()
            weights = None
            if item.in_steps and self.metric is not None:
                device = left.device
                weights = self.metric.weights(item.name, item.shape, item.layout, device)
            weights = torch.ones_like(item.pending) if weights is None else weights
            weights = weights[item.layout.shard(self._me)]
            left.div_(weights)
            payload = torch.empty(item.codec.packed_bytes(left.numel()), dtype=torch.uint8)
            item.codec.pack(left, payload)
            item.own.zero_()
            item.codec.unpack_add(payload, item.own, loss_scale)
            item.own.mul_(weights)
            item.pending[item.layout.shard(self._me)] = left.mul_(weights)
        return finite


class Told(StepMetric):
    """Weights from the optimizer's own second moment, which no sender has.

    Args:
        kind: "full": each entry's own; "factors": the product of its row's mean and its column's.
        power: of the second moment.
        every: steps from one look at it to the next.
    """

    def __init__(self, world: InProcessWorld, kind: str, power: str, every: str) -> None:
        super().__init__(lambda sums: None)
        self._world, self._kind, self._power = world, kind, float(power)
        self._parameters = dict(zip(world._names, world._parameters, strict=True))
        self._every, self._step = int(every), 0
        self._told: dict[str, Tensor] = {}

    def weights(
        self, name: str, shape: torch.Size, layout: LocalShard, device: torch.device
    ) -> Tensor | None:
        now = self._world.step - WARM_UP
        if now - self._step >= self._every:
            self._told, self._step = {}, now
        if name not in self._told:
            squares = self._world._optimizer.adamw.state[self._parameters[name]]["exp_avg_sq"]
            if self._kind == "factors" and squares.dim() == 2:
                rows, columns = squares.mean(1, keepdim=True), squares.mean(0, keepdim=True)
                squares = rows * columns / squares.mean()
            squares = squares.clamp(min=1e-6 * float(squares.mean()))
            self._told[name] = squares.pow(self._power).view(-1)
        return self._told[name]

    def given(
        self, name: str, shape: torch.Size, layout: LocalShard, gradient: Tensor, scale: float
    ) -> None:
        """It knows better."""


def tell(world: InProcessWorld, how: str) -> None:
    """Give every process `Told`; `how`: "told KIND POWER EVERY"."""
    _, kind, power, every = how.split()
    for worker in world.workers._workers:
        worker.scheduled.all_to_all.metric = Told(world, kind, power, every)


@dataclass
class Switched(FirstMoments):
    """The same for every group from the end of the warm-up, whatever is left behind.

    Attributes:
        b1: instead of the optimizer's own; None: that.
        fixed: the lead.
        smoothed: the second moment is of m^2 (1 + b1) / (1 - b1), as large as g^2 if g is noise.
    """

    world: InProcessWorld
    b1: float | None = None
    fixed: float = 0.0
    smoothed: bool = False

    def lead(self, group: int) -> float:
        return self.fixed

    @contextmanager
    def leading(
        self, optimizer: Optimizer, group: int, parameters: Iterable[Tensor]
    ) -> Iterator[None]:
        if self.world.step <= WARM_UP:  # the step is counted already
            yield
            return
        holder = optimizer.param_groups[group]
        own = holder["betas"]
        if self.smoothed:
            _square_first_moments(optimizer, group, parameters)
        holder["betas"] = (own[0] if self.b1 is None else self.b1, own[1])
        try:
            with super().leading(optimizer, group, parameters):
                yield
        finally:
            holder["betas"] = own


def _square_first_moments(optimizer: Optimizer, group: int, parameters: Iterable[Tensor]) -> None:
    """Make the next step's second moment one of the first's squares: Adam adds those of g."""
    b1, b2 = optimizer.param_groups[group]["betas"]
    for parameter in parameters:
        if parameter.grad is not None:
            state = optimizer.state[parameter]
            squares = state["exp_avg"].lerp(parameter.grad, 1 - b1).square() * ((1 + b1) / (1 - b1))
            squares -= parameter.grad.square() * (1 - 1e-6)  # not below 0 by rounding
            state["exp_avg_sq"].add_(squares, alpha=(1 - b2) / b2)


def run(task: Task, method: str, b1: float, how: str, seed: int) -> dict[str, Any]:
    """One arm of one seed."""
    spec = task.spec
    how, _, more = how.partition(", ")
    b2 = more.removeprefix("b2 ") if more.startswith("b2") else "0.95"
    settings = ExchangeSettings(
        METHODS[method],
        warmup_steps=WARM_UP,
        warmup_bits=4 if method.endswith("warm-up in 4 bits") else None,
        momentum="matched" if how == "matched" else "none",
    )
    task.learner.begin(seed)
    rate = float(more.removeprefix("rate")) if more.startswith("rate") else spec.learning_rate
    recipe: Recipe = replace(spec.recipe(), betas=(b1, float(b2)), learning_rate=rate)
    world = InProcessWorld(
        task.learner.model, task.learner.loss, recipe, settings, workers=spec.world
    )
    if more.startswith("told"):
        tell(world, more)
    kind, _, number = how.partition(" ")
    if number:
        value = float(number)
        world.moments = (
            Switched(world, fixed=value, smoothed=more == "smoothed")
            if kind == "lead"
            else Switched(world, b1=value)
        )
    outcome = train(task.learner, world, spec.steps, evaluate_every=spec.steps)
    moments = world.moments
    return {
        "loss": outcome.final("loss"),
        "diverged": outcome.diverged,
        "kept": moments.kept.get(0) if how == "matched" and moments is not None else None,
    }


def kept_back(task: Task, method: str, told: str | None) -> tuple[float, float]:
    """Of energy, and in the metric of Adam's steps; all workers together."""
    settings = ExchangeSettings(METHODS[method], warmup_steps=WARM_UP, momentum="matched")
    task.learner.begin(0)
    recipe: Recipe = replace(task.spec.recipe(), betas=(0.7, 0.95))
    model, workers = task.learner.model, task.spec.world
    world = InProcessWorld(model, task.learner.loss, recipe, settings, workers=workers)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    if told:
        tell(world, f"told {told}")
    average, given = world.workers.average, list[dict[str, Tensor]]()

    def watched(gradients: Sequence[Sequence[Tensor]], *, at_boundary: bool = True) -> list[Tensor]:
        owed = world.workers.residuals()
        given[:] = [
            {
                n: of[n].add(g.view(-1), alpha=1 / workers)
                for n, g in zip(names, own, strict=True)
                if n in of
            }
            for of, own in zip(owed, gradients, strict=True)
        ]
        return average(gradients, at_boundary=at_boundary)

    world.workers.average = watched  # type: ignore[method-assign]
    sums = torch.zeros(2, 2, dtype=torch.float64)
    for step in range(1, 131):
        world.train_step()
        if step < 100 or step % 10:
            continue
        states = world._optimizer.adamw.state
        moments = [states[p]["exp_avg_sq"] for p in model.parameters() if p.requires_grad]
        scales = {n: v.sqrt().view(-1) + 1e-8 for n, v in zip(names, moments, strict=True)}
        for place, each in enumerate((given, world.workers.residuals())):
            for name, values in ((n, v.double()) for of in each for n, v in of.items()):
                squares = values.square()
                sums[place, 0] += squares.sum()
                sums[place, 1] += (squares / scales[name]).sum()
    energy, in_steps = (sums[1] / sums[0]).tolist()
    return energy, in_steps


def table(lines: list[dict[str, Any]], against: tuple[str, float, str]) -> str:
    """Markdown: losses, and paired differences from dense training, and from another arm."""
    text, another = [], " ".join(map(str, against))
    for source in dict.fromkeys(line["data"] for line in lines):
        found: dict[tuple[str, float, str], dict[int, float]] = {}
        for line in lines:
            if line["data"] == source:
                place = line["method"], line["b1"], line["how"]
                found.setdefault(place, {})[line["seed"]] = line["loss"]
        mean = {place: statistics.fmean(of.values()) for place, of in found.items()}
        dense = [place for place in found if place[0] == DENSE]
        most = max(len(found[place]) for place in dense)
        best = min((p for p in dense if len(found[p]) == most), key=lambda p: mean[p])
        text += [
            f"{source}; best dense: b1 {best[1]:g}, {best[2]}",
            "",
            "| method | b1 | after the warm-up | held-out loss | against dense of this b1 "
            f"| against dense likewise | against the best dense | against {another} | seeds |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for place in sorted(found, key=lambda p: (-p[1], list(METHODS).index(p[0]), p[2])):
            method, b1, how = place
            like = "lead 0.3" if how == "matched" else how
            gaps = [
                _gap(found[place], found.get(reference, {}))
                for reference in ((DENSE, b1, "none"), (DENSE, b1, like), best, against)
            ]
            cells = [method, f"{b1:g}", how, f"{mean[place]:.4f}", *gaps, str(len(found[place]))]
            text.append(f"| {' | '.join(cells)} |")
        text.append("")
    return "\n".join(text)


def _gap(ours: dict[int, float], dense: dict[int, float]) -> str:
    """Mean of the pairs' differences, its 90% interval, and each."""
    gaps = [100 * (ours[seed] / dense[seed] - 1) for seed in sorted(ours) if seed in dense]
    if not gaps:
        return ""
    mean = f"{statistics.fmean(gaps):+.2f}%"
    if len(gaps) == 1 or not any(gaps):
        return mean
    interval = paired(gaps, 0.9)
    each = ", ".join(f"{gap:+.2f}" for gap in gaps)
    return f"{mean}, {interval.low:+.2f} to {interval.high:+.2f} ({each})"


def finished(path: Path) -> list[dict[str, Any]]:
    """The runs that a file has."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def keep(path: Path, line: dict[str, Any]) -> None:
    """Add a finished run to the file, and tell it."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    print(line, flush=True)


def main() -> None:
    """Train what is missing, or print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", help="text file; default: the embedded corpus")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", default="*", help='shell pattern over "METHOD B1 HOW"')
    parser.add_argument("--also", nargs=3, metavar=("METHOD", "B1", "HOW"), action="append")
    parser.add_argument("--own-share", action="store_true", help="compress it, too")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--kept", action="store_true", help="what methods keep back")
    parser.add_argument("--told", help='with --kept: "KIND POWER EVERY", see `Told`')
    parser.add_argument("--table", action="store_true")
    parser.add_argument(
        "--against", nargs=3, metavar=("METHOD", "B1", "HOW"), default=("dense", "0.9", "none")
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    if given.table:
        method, b1, how = given.against
        print(table(finished(given.results), (method, float(b1), how)))
        return
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    spec = make_spec("language", data=given.data, world=given.workers)
    task = open_task(spec, given.results.parent)
    world: dict[str, Any] = {} if given.workers == 4 else {"workers": given.workers}
    if given.own_share:
        exchange_build.AllToAllExchange = OwnShareToo  # type: ignore[attr-defined, misc]
        world["own_share"] = "compressed"
    if given.kept:
        for method in METHODS:
            if method != DENSE and "warm-up" not in method and fnmatch(method, given.only):
                shares = kept_back(task, method, given.told)
                print(method, given.told or "", *(f"{share:.3f}" for share in shares), flush=True)
        return
    arms = [*ARMS, *((m, float(b1), how) for m, b1, how in given.also or [])]
    for seed in given.seeds:
        for method, b1, how in arms:
            key = {"data": task.source, "method": method, "b1": b1, "how": how, "seed": seed}
            key |= {k: v for k, v in world.items() if method != DENSE or k == "workers"}
            done = any(line.items() >= key.items() for line in finished(given.results))
            if done or not fnmatch(f"{method} {b1:g} {how}", given.only):
                continue
            keep(given.results, key | run(task, method, b1, how, seed))


if __name__ == "__main__":
    main()
