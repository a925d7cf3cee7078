"""Held-out loss against bytes: every compression method at several ratios, with AdamW.

    nice -n 19 python benchmarks/frontier.py [--steps 1500] [--seeds 0 1 2] [--only PATTERN]
    python benchmarks/frontier.py --tuned [--workers 4] [--batch 32]
    python benchmarks/frontier.py --tuned --hidden-size 512 --steps 3000
    python benchmarks/frontier.py --tuned --data FILE
    python benchmarks/frontier.py --table [--tuned]

Trains the 4.9-million Llama on the corpus that every Python ships, with 2 virtual workers
(`ds_ckpt.lab.validate`): the exchange code of a real run, one process, one thread. Runs of one seed
share weights, data and their order, and are compared in pairs. Every finished run is a line of
`results/frontier.jsonl`; a run that is there is not repeated. Matrix products round their factors
to bf16 where the CPU multiplies bf16 (torch's precision "medium"); weights, gradients, sums and the
optimizer are fp32.

`--tuned` trains each method with AdamW of b1 0.9 as it is, and with b1 0.7 and a lead of 0.3 after
the warm-up (`error_feedback.momentum: 0.3`), dense training too: the better of its two is what a
tuned optimizer comes to. A process's own share is compressed like the others', which is as hard as
with many workers; low rank's stays exact. Products are bf16 (autocast), weights and gradients fp32.
A step's sequences (`--batch`, eight) are the same however many workers share them. `--hidden-size
512` is a Llama of 19 million, `--data` another text. These go to `results/frontier_tuned.jsonl`.

Bytes are counted where the exchange sends them, with bf16 gradients, headers and scales and what
travels whole included, against the dense exchange of the same gradients.
"""

import argparse
import dataclasses
import fnmatch
import json
import platform
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _frontier_table import table
from _own_share import OwnShareToo

from ds_ckpt.engine import step as engine_step
from ds_ckpt.exchange.method_rules import ExchangeSettings, MethodSettings, WarmupBits
from ds_ckpt.lab.validate import data as validate_data
from ds_ckpt.lab.validate.data import Inputs, Text
from ds_ckpt.lab.validate.experiment import Outcome, train
from ds_ckpt.lab.validate.task import Task, TaskSpec
from ds_ckpt.lab.validate.world import InProcessWorld, Recipe, sixteen_bit_step_bytes
from ds_ckpt.lab.workload import Corpus, embedded_corpus, file_corpus, llama

RESULTS = Path(__file__).parent / "results" / "frontier.jsonl"
TUNED_RESULTS = RESULTS.with_name("frontier_tuned.jsonl")
START = 100
SIZES: dict[str, int] = {
    "world": 2,
    "sequences": 4,
    "sequence_length": 128,
    "accumulation": 1,
    "evaluation_batches": 32,
    "hidden_size": 256,
    "layers": 6,
    "intermediate_size": 688,
    "heads": 8,
}
"""Sizes of the task: virtual workers, a worker's micro-batch, evaluation, the Llama."""
LLAMA = ("hidden_size", "layers", "intermediate_size", "heads")


@dataclass(frozen=True)
class Cell:
    """A row of the frontier. The order of CELLS is the order of work.

    Attributes:
        b1: AdamW's.
        rate: the largest learning rate.
    """

    name: str
    settings: ExchangeSettings
    b1: float = 0.9
    rate: float = 2e-3

    def recipe(self, steps: int) -> Recipe:
        """AdamW; in dense training with the lead that the exchange gives where it compresses."""
        momentum = self.settings.momentum
        lead = momentum if self.settings.lossless and isinstance(momentum, float) else 0.0
        adamw = steps, self.rate, (self.b1, 0.95)
        return Recipe(*adamw, momentum_correction=lead, correction_start=START)


def cell(name: str, method: str, *, feedback: bool = True, **options: Any) -> Cell:
    default = MethodSettings(method, **options)
    return Cell(name, ExchangeSettings(default, error_feedback=feedback, warmup_steps=START))


CELLS = (
    cell("dense", "dense"),
    cell("8 bits", "quantize", bits=8),
    cell("4 bits", "quantize", bits=4),
    cell("3 bits", "quantize", bits=3),
    cell("2 bits", "quantize", bits=2),
    cell("rank 16", "powersgd", rank=16),
    cell("rank 4", "powersgd", rank=4),
    cell("Top-K 1.2%", "topk", density=0.012),
    cell("Top-K 4%", "topk", density=0.04),
    cell("Top-K 10%", "topk", density=0.1),
    cell("rank 32", "powersgd", rank=32),
    cell("2 bits, no feedback", "quantize", bits=2, feedback=False),
)


def tuned(one: Cell, lead: float = 0.3) -> Cell:
    """With a lower b1 and a lead."""
    settings = dataclasses.replace(one.settings, momentum=lead)
    return Cell(f"{one.name}, b1 0.7, lead {lead:g}", settings, b1=0.7)


BOTH_WAYS = (
    cell("dense", "dense"),
    cell("1 bit", "entropy_coded", bits=1.0, metric="steps"),
    cell("0.31 bits", "entropy_coded", bits=0.31, metric="steps"),
    cell("3 bits", "quantize", bits=3),
    cell("Top-K 1.2%", "topk", density=0.012, values="int8"),
    cell("rank 4", "powersgd", rank=4),
    cell("2 bits", "quantize", bits=2),
)
WAYS = tuple(way for one in BOTH_WAYS for way in (tuned(one), one))
LONGER_LEAD = tuned(BOTH_WAYS[2], lead=0.6)


def after(one: Cell, steps: int, bits: WarmupBits | None) -> Cell:
    """With another warm-up, dense or in few bits."""
    settings = dataclasses.replace(one.settings, warmup_steps=steps, warmup_bits=bits)
    how = f"{steps} dense steps" if bits is None else f"{steps} steps in {bits} bits"
    return Cell(f"{one.name}, {how}", settings, b1=one.b1)


LONGER_WARM_UP = (
    *(
        after(way, steps, bits)
        for way in (tuned(BOTH_WAYS[1]), LONGER_LEAD)
        for steps, bits in ((100, 3), (300, 3), (300, None))
    ),
    *(after(tuned(way), 300, 3) for way in BOTH_WAYS[4:]),
)
RATES = tuple(
    dataclasses.replace(way, name=f"{way.name}, rate {rate:g}", rate=rate)
    for way in (*WAYS, LONGER_LEAD, *LONGER_WARM_UP)
    for rate in (1.25e-4, 2.5e-4, 5e-4, 1e-3, 4e-3)
)
TUNED = (*WAYS, LONGER_LEAD, *LONGER_WARM_UP, *RATES)
"""The lead of 0.6 is `zero3_50x.json`'s."""


@dataclass(frozen=True)
class Dealt(Text):
    """A text of which a step takes the same sequences for any number of workers."""

    workers: int = 1

    def batch(self, seed: int, number: int, worker: int, rows: int) -> Inputs:
        whole = super().batch(seed, number, 0, self.workers * rows)
        return {name: ids[worker * rows : (worker + 1) * rows] for name, ids in whole.items()}


class Mixed(Task):
    """Whose products are bf16."""

    def loss(self, step: int, micro: int, worker: int) -> torch.Tensor:
        with torch.autocast(self._device.partition(":")[0], torch.bfloat16):
            return super().loss(step, micro, worker)


def main() -> None:
    arguments = _arguments()
    results: Path = arguments.results or (TUNED_RESULTS if arguments.tuned else RESULTS)
    if arguments.table:
        print(table(list(_read(results)), arguments.steps))
        return
    one_thread()
    workers, file = arguments.workers, arguments.data
    text = file_corpus(file, "--data") if file else embedded_corpus()
    task: dict[str, Any] = SIZES | {"world": workers}
    if file:
        task["text"] = f"{text.source} ({text.sha256[:8]})"
    if arguments.tuned:
        task |= sizes_of(arguments.hidden_size, workers, arguments.batch) | {"products": "bf16"}
        engine_step.AllToAllExchange = OwnShareToo  # type: ignore[attr-defined, misc]
    learner = begin(text, task, compiled=not arguments.eager)
    for seed in arguments.seeds:
        for one in TUNED if arguments.tuned else CELLS:
            if not fnmatch.fnmatchcase(one.name, arguments.only):
                continue
            recipe = one.recipe(arguments.steps)
            key = {"cell": one.name, "seed": seed, "steps": arguments.steps, "task": task}
            if is_done(results, key):
                continue
            print(f"{time.strftime('%H:%M:%S')} seed {seed}: {one.name}", flush=True)
            learner.begin(seed)
            world = InProcessWorld(
                learner.model, learner.loss, recipe, one.settings, workers=workers
            )
            progress = _Progress(arguments.steps)
            outcome = train(learner, world.model, world.train_step, recipe.steps, progress)
            shapes = [(n, p.shape) for n, p in learner.model.named_parameters()]
            chosen = one.settings.default
            default = {"method": chosen.method} | chosen.sections[chosen.method].model_dump()
            settings = dataclasses.asdict(one.settings) | {"default": default}
            line = result_line(learner, text, settings, recipe, outcome) | key
            line["sixteen_bit_bytes"] = sixteen_bit_step_bytes(one.settings, shapes, workers)
            if one.settings.warmup_bits is not None:
                values = MethodSettings("quantize", bits=one.settings.warmup_bits)
                warm_up = dataclasses.replace(one.settings, default=values)
                line["sixteen_bit_warm_up_bytes"] = sixteen_bit_step_bytes(warm_up, shapes, workers)
            append(results, line)
            print(f"{time.strftime('%H:%M:%S')} {outcome.heldout[-1:]}")


def begin(
    text: Corpus, task: Mapping[str, Any] = SIZES, *, compiled: bool, device: str = "cpu"
) -> Task:
    """Return the task that the frontier trains; the tuned one names its products."""
    data, learner = (Dealt, Mixed) if "products" in task else (Text, Task)
    length, sizes = task["sequence_length"], {name: task[name] for name in LLAMA}
    validate_data.EVALUATION_BATCHES = task["evaluation_batches"]
    windows = data.of(text, length)
    if isinstance(windows, Dealt):
        windows = dataclasses.replace(windows, workers=task["world"])
    begun = learner(
        TaskSpec(world=task["world"], batch=task["sequences"]),
        windows,
        lambda seed: llama(seed=seed, max_positions=length, attn_implementation="eager", **sizes),
        device=device,
    )
    if compiled:  # a quarter faster after a minute
        begun.model.compile()
    return begun


def sizes_of(hidden_size: int, workers: int, batch: int) -> dict[str, int]:
    """Return the differences of the tuned task to `SIZES`; `batch` are all workers' sequences."""
    wider = hidden_size / SIZES["hidden_size"]
    return {
        "sequences": batch // workers,
        "hidden_size": hidden_size,
        "intermediate_size": round(wider * SIZES["intermediate_size"]),
    }


def one_thread() -> None:
    """Set one thread and the precision that every run of the frontier uses; see above."""
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("medium")
    torch.set_flush_denormal(True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", default="*", help="shell pattern over names of cells")
    parser.add_argument("--table", action="store_true", help="print what the results say and stop")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--tuned", action="store_true", help="with AdamW's b1 and a lead, too")
    parser.add_argument("--workers", type=int, default=SIZES["world"])
    batch = SIZES["sequences"] * SIZES["world"]
    parser.add_argument("--batch", type=int, default=batch, help="with --tuned: sequences a step")
    parser.add_argument("--hidden-size", type=int, default=SIZES["hidden_size"])
    parser.add_argument("--data", type=Path, help="a text file, in place of Python's documentation")
    parser.add_argument("--results", type=Path)
    arguments = parser.parse_args()
    if arguments.tuned and arguments.batch % arguments.workers:
        parser.error(
            f"--batch: {arguments.workers} workers cannot share {arguments.batch} sequences"
        )
    return arguments


def _read(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)


def is_done(results: Path, key: dict[str, Any]) -> bool:
    """Return whether the file has the run of this key."""
    return any(all(line[k] == v for k, v in key.items()) for line in _read(results))


def result_line(
    learner: Task,
    text: Corpus,
    settings: dict[str, Any],
    recipe: Recipe,
    outcome: Outcome,
) -> dict[str, Any]:
    """Return the record of a finished run, without its key and its bytes in 16 bits."""
    return {
        "settings": settings,
        "task": SIZES,
        "recipe": dataclasses.asdict(recipe),
        "corpus": text.sha256,
        "parameters": sum(p.numel() for p in learner.model.parameters()),
        **dataclasses.asdict(outcome),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def append(results: Path, line: dict[str, Any]) -> None:
    """Add a finished run to the file."""
    results.parent.mkdir(parents=True, exist_ok=True)
    with results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


class _Progress:
    """A line every hundred steps."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._started_s = time.perf_counter()

    def __call__(self, done: int, loss: float) -> None:
        if done % 100 == 0:
            passed_s = time.perf_counter() - self._started_s
            print(f"  {done}/{self._steps} loss {loss:.4f} {passed_s:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
