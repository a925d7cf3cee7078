"""What a run was made with: versions and the machine, without its name."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import psutil


def versions() -> dict[str, str]:
    """Of Python and the packages that a measurement depends on."""
    names = ("ds_ckpt", "deepspeed", "torch", "transformers", "numpy")
    return {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in names},
    }


def machine() -> dict[str, Any]:
    """Processor, cores, memory, system."""
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return {
        "cpu_model": model,
        "cpu_cores": os.cpu_count() or 1,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
    }
