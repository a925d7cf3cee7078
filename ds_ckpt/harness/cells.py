"""What the demo compares: four cells and a reference, each of them a DeepSpeed JSON file.

The files are the experiment. They are written into the run folder as they are used, so that any
of them can be taken away and given to `deepspeed`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Method = Literal["dense", "topk", "all_to_all"]

PROCESSES = 2
SEQUENCES_PER_PROCESS = 4
SEQUENCE_LENGTH = 128
LEARNING_RATE = 2e-3


@dataclass(frozen=True)
class Cell:
    """One way to train. `reference` cells run a few steps, for a measurement alone."""

    name: str
    title: str
    method: Method
    checkpointing: bool
    reference: bool = False

    @property
    def file_name(self) -> str:
        return f"{self.name}.json"


CELLS = (
    Cell("dense", "dense", "dense", False),
    Cell("dense-checkpointing", "dense + checkpointing", "dense", True),
    Cell("topk", "Top-K", "topk", False),
    Cell("topk-checkpointing", "Top-K + checkpointing", "topk", True),
    # Sends every gradient whole, without the overhead of gloo's reduce-scatter: the dense
    # exchange that compression has to beat.
    Cell("all-to-all", "dense all-to-all", "all_to_all", False, reference=True),
)


def topk_start_step(steps: int) -> int:
    """The dense warm-up of the Top-K cells: a third of the run."""
    return max(1, steps // 3)


def cell_steps(cell: Cell, steps: int) -> int:
    """Steps that a cell trains for. A reference needs only enough for its bytes and a median."""
    return min(steps, max(4, steps // 6)) if cell.reference else steps


def deepspeed_config(cell: Cell, *, steps: int) -> dict[str, Any]:
    """The DeepSpeed configuration of a cell that trains for `steps` steps."""
    plugin: dict[str, Any] = {"telemetry": {"enabled": True}}
    if cell.checkpointing:
        plugin["activation"] = {"policy": "block"}
    if cell.method == "topk":
        plugin["compression"] = {
            "method": "topk",
            "topk": {"density": 0.01, "values": "int8", "selection": "blocks"},
            "error_feedback": {"enabled": True},
            # the demo shows what compression does, also where the link is too fast for it
            "exchange": {"autotune": False},
            "warmup_steps": topk_start_step(steps),
            "min_numel": 4096,
        }
    elif cell.method == "all_to_all":
        plugin["compression"] = {"method": "dense"}
    return {
        "train_micro_batch_size_per_gpu": SEQUENCES_PER_PROCESS,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "steps_per_print": 1_000_000,
        "zero_optimization": {
            "stage": 3,
            # As if the model were larger than the memory: weights are gathered for the forward
            # and again for the backward, and no small tensor stays whole.
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": 0,
        },
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": LEARNING_RATE,
                "betas": [0.9, 0.95],
                "weight_decay": 0.01,
                # torch's AdamW: DeepSpeed's own would be compiled first.
                "torch_adam": True,
            },
        },
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {
                "total_num_steps": steps,
                "warmup_num_steps": max(2, steps // 10),
                "warmup_type": "linear",
                "cos_min_ratio": 0.05,
            },
        },
        "ds_ckpt": plugin,
    }


def write_configs(folder: Path, *, steps: int) -> list[Path]:
    """Write the file of every cell into `folder`; returns the paths in the order of CELLS."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for cell in CELLS:
        path = folder / cell.file_name
        text = json.dumps(deepspeed_config(cell, steps=steps), indent=2)
        path.write_text(text + "\n", encoding="utf-8")
        paths.append(path)
    return paths
