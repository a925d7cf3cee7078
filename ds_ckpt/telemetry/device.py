"""Total and free memory of a device; of this node for the CPU accelerator."""

from __future__ import annotations

import psutil
import torch


def capacity_of(device: torch.device) -> int:
    """Return the bytes of the device's memory."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(psutil.virtual_memory().total)


def free_on(device: torch.device) -> int:
    """Return the free bytes, those in torch's cache included."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    return int(psutil.virtual_memory().available)
