"""Held-out loss at the size of GPT-2 on one GPU: uncompressed, 3 bits, 1 bit and 0.31 bits.

    python benchmarks/loss_at_scale.py [--data FILE] [--minutes 12] [--results FILE]
    python benchmarks/loss_at_scale.py --device cpu --hidden-size 64 --layers 2 --minutes 1

A Llama of 127 million parameters on the text of every Python (or a file), virtual workers and
settings of `frontier.py --tuned`, GPT-3's learning rate. Two steps of each row are timed, then all
rows train as many as the minutes allow. The better of two uncompressed rows, one for the betas of
each kind of compressed row, counts. One seed is no verdict. Runs are lines of --results.
"""

import argparse
import dataclasses
import platform
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from _own_share import OwnShareToo
from frontier import BOTH_WAYS, SIZES, Cell, after, append, begin, one_thread, result_line, tuned

from ds_ckpt.engine import step as engine_step
from ds_ckpt.lab.validate.experiment import train
from ds_ckpt.lab.validate.task import Task
from ds_ckpt.lab.validate.world import InProcessWorld
from ds_ckpt.lab.workload import embedded_corpus, file_corpus

WORKERS = 4


def rows(steps: int) -> list[Cell]:
    """Return what is trained; the first fifth of the steps are a warm-up."""
    dense, one_bit, third, three = BOTH_WAYS[:4]
    warm_up = max(1, steps // 5)
    coded = (after(tuned(one_bit), warm_up, 3), after(tuned(third, lead=0.6), warm_up, 3))
    every = dense, tuned(dense), after(three, warm_up, None), *coded
    return [dataclasses.replace(one, rate=6e-4) for one in every]


def world_of(learner: Task, one: Cell, steps: int) -> InProcessWorld:
    """Return virtual workers at the start of a run."""
    learner.begin(0)
    recipe = dataclasses.replace(one.recipe(steps), correction_start=steps // 5)
    return InProcessWorld(learner.model, learner.loss, recipe, one.settings, workers=WORKERS)


def seconds_of_a_step(learner: Task, one: Cell) -> float:
    """Return the time of a compressed step."""
    settings = dataclasses.replace(one.settings, warmup_steps=0)
    world = world_of(learner, dataclasses.replace(one, settings=settings), 100)
    world.train_step()  # the host reads losses and a norm
    start_s = time.perf_counter()
    world.train_step()
    return time.perf_counter() - start_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--data", type=Path, help="a text file, in place of Python's documentation")
    parser.add_argument("--minutes", type=float, default=12.0)
    parser.add_argument("--hidden-size", type=int, default=768)
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--results", type=Path, default=Path("runs/loss_at_scale.jsonl"))
    options = parser.parse_args()
    start_s, device, width = time.perf_counter(), options.device, options.hidden_size
    hardware = platform.machine() if device == "cpu" else torch.cuda.get_device_name(device)
    if device == "cpu":
        one_thread()
    engine_step.AllToAllExchange = OwnShareToo  # type: ignore[attr-defined, misc]
    text = file_corpus(options.data, "--data") if options.data else embedded_corpus()
    task: dict[str, Any] = SIZES | {"world": WORKERS, "products": "bf16", "layers": options.layers}
    task |= {"hidden_size": width, "intermediate_size": width * 8 // 3, "heads": -(-width // 64)}
    learner = begin(text, task, compiled=False, device=device)
    each_s = sum(seconds_of_a_step(learner, one) for one in rows(100))
    left_s = 0.9 * 60 * options.minutes - (time.perf_counter() - start_s)  # evaluation takes more
    steps = max(10, int(left_s / each_s))
    print(f"{steps} steps of {WORKERS} workers, {each_s:.2f} s for one of each row; {hardware}")
    losses: dict[str, float] = {}
    for one in rows(steps):
        world = world_of(learner, one, steps)
        outcome = train(learner, world.model, world.train_step, steps)
        losses[one.name] = outcome.heldout[-1][1]
        settings = dataclasses.asdict(one.settings) | {"default": one.settings.default.method}
        line = result_line(learner, text, settings, one.recipe(steps), outcome)
        line |= {"row": one.name, "task": task, "hardware": hardware}
        append(options.results, line | {"date": f"{datetime.now(timezone.utc):%Y-%m-%d}"})
        gap = losses[one.name] / min(x for name, x in losses.items() if "dense" in name[:5]) - 1
        print(f"{one.name:45} {losses[one.name]:.4f}  {gap:+.2%} of the best dense run so far")


if __name__ == "__main__":
    main()
