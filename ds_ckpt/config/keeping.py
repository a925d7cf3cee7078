"""Where boundaries are kept: these keys of `ds_ckpt.activation`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ds_ckpt.settings import SWITCH, Expects, Section


class KeepingConfig(Section):
    """How what checkpointing keeps is kept."""

    offload: Annotated[bool, SWITCH] = Field(
        default=False,
        description="Keep the boundaries of all recomputes but the last in host memory: they go "
        "out on a side stream while the next block runs, and come back before their recompute. "
        "Costs the bus twice their bytes a step, and pinned host memory of their size. Pays where "
        "a block computes longer than its boundary travels (long sequences). On the CPU "
        "accelerator a stand-in runs, which saves nothing. The same as cpu_checkpointing in "
        "activation_checkpointing.",
    )
    offload_prefetch: Annotated[int, Expects("a whole number, 1 or more", "1")] = Field(
        default=1,
        ge=1,
        description="How many recomputes ahead boundaries start to come back from host memory, or "
        "to be gathered where they are split. Each costs the device one more boundary in "
        "backward.",
    )
    offload_min_bytes: Annotated[int, Expects("a whole number, 0 or more", "65536")] = Field(
        default=65536,
        ge=0,
        description="Smaller tensors stay on the device: their copies would cost more time than "
        "they save memory.",
    )
    partition: Annotated[bool, SWITCH] = Field(
        default=False,
        description="Split what blocks are given over the tensor-parallel group, whose processes "
        "hold the same: each keeps 1 in n of the bytes, and they are gathered before their "
        "recompute. Costs one all-gather of each boundary a step, one recompute ahead of its use. "
        "A handshake compares the values, and stops training where they differ. Needs AutoTP or an "
        "mpu given to initialize or attach. The same as partition_activations.",
    )
    partition_min_bytes: Annotated[int, Expects("a whole number, 0 or more", "65536")] = Field(
        default=65536,
        ge=0,
        description="Smaller tensors are kept whole: their gathers would cost more time than they "
        "save memory.",
    )
    contiguous: Annotated[bool, SWITCH] = Field(
        default=False,
        description="Keep boundaries in one buffer that is allocated once, so that they leave no "
        "gaps between other tensors: on the device, or in host memory with offload. Costs a copy "
        "of every boundary on the device. The same as contiguous_memory_optimization.",
    )
    contiguous_count: Annotated[
        int | None, Field(ge=1), Expects("a whole number, 1 or more", "32")
    ] = Field(
        default=None,
        description="Boundaries like the first one that the buffer has room for. Default: one for "
        "each recompute of the model; fewer are refused, more serve several forwards before a "
        "backward. The same as number_checkpoints.",
    )
    synchronize: Annotated[bool, SWITCH] = Field(
        default=False,
        description="Wait for the device at the begin and the end of every forward and recompute "
        "of a block: for debugging and for clean traces; it stops all overlap. The same as "
        "synchronize_checkpoint_boundary.",
    )
    profile: Annotated[bool, SWITCH] = Field(
        default=False,
        description="Log a table of each block's kept bytes, forward time and recompute time "
        "every telemetry.every_n_steps steps. On an accelerator it waits for the device around "
        "every block, so steps are slower while it is on. The same as in activation_checkpointing.",
    )

    def keeping(self) -> str:
        """A few words on what is switched on here; empty where nothing is."""
        words = []
        if self.offload:
            words.append(f"boundaries in host memory, {self.offload_prefetch} ahead")
        if self.partition:
            words.append("boundaries split over the tensor-parallel group")
        if self.contiguous:
            words.append("boundaries in one buffer")
        if self.synchronize:
            words.append("synchronized at boundaries")
        if self.profile:
            words.append("profiled")
        return "".join(f", {word}" for word in words)
