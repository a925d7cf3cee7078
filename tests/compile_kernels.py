"""Compile the fused kernels for GPUs that are not there, and print what the code has, as JSON.

    python -m tests.compile_kernels 80 90
    python -m tests.compile_kernels steps

Triton brings NVIDIA's assembler, so this ends with machine code; nothing is run. By kernel and
compute capability: instructions of a warp without a branch taken back (`instructions`), loads and
stores of 16 bytes at once (`wide`), and products and sums at once (`fma`).

`steps`: an exchange on CPU tensors with a driver that compiles each kernel it is given and runs
none. Printed are the kernels that are compiled at attach, and those of the steps after it.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from ds_ckpt.compression import Quantize
from ds_ckpt.compression.fused import TILE
from ds_ckpt.compression.storage import _MIX, _REACH, _STEP, _TO_HALF, _signed
from ds_ckpt.weights import lossless

_LONG = ("numel", "values_stride", "payload_stride", "stride", "count")
_LONG += ("shard_stride", "offsets_stride", "place_stride")
COUNTS = {"rows": "i32", **dict.fromkeys(_LONG, "i64")}
PACK = {"values": "*fp32", "payload": "*u8", **COUNTS}
ADD = {"first": "*u8", "into": "*fp32", "factor": "fp32", **COUNTS}
MAXIMA = {"values": "*fp32", "offsets": "*u8", **COUNTS}
RESIDUAL = {"gradient": "*i16", "out": "*fp32", "working": "*fp32", "divisor": "fp32", **COUNTS}
RESIDUAL |= {"seed": "i32"}
STORED = {
    "int8": {"stored": "*i8", "values": "*i8", "scales": "*i16"},
    "bf16": {"stored": "*i16", "values": "*i16"},
}
CHANGES = dict.fromkeys(("old", "new", "weights", "places"), "*i16")
CHANGES |= {"headers": "*i32", "words": "*i32", "ends": "*i64", **COUNTS}


def compiled(
    function: Any, signature: dict[str, str], constants: dict[str, Any], capability: int, **how: Any
) -> dict[str, int]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = function.arg_names
    source = ASTSource(
        fn=function,
        signature={name: signature.get(name, "constexpr") for name in names},
        constexprs={(names.index(n),): value for n, value in constants.items() if n in names},
    )
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=how)
    ptx, code = made.asm["ptx"], _instructions(made.asm["cubin"])
    wide = sum(".128" in name for name in code)
    return {"instructions": len(code), "wide": wide, "fma": ptx.count("fma.rn.f32")}


def _instructions(cubin: bytes) -> list[str]:
    """Return the names of a kernel's instructions, in order."""
    from triton.backends import nvidia

    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-sass", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+ )?([A-Z0-9_.]+)", text)
    return found[: max(i for i, name in enumerate(found) if name == "EXIT") + 1]


class _Driver:
    """Driver that answers Triton's questions before a launch, for a GPU that is not there."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


class _Compiled:
    """A kernel that is compiled and not launched; what it should have written is zeros."""

    def __init__(self, kernel: Any, seen: set[str], writes: int | None) -> None:
        self._kernel, self._seen, self._writes = kernel, seen, writes

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            made = self._kernel.warmup(*args, grid=grid, **options)
            self._seen.add(f"{made.name} {made.hash}")
            if self._writes is not None:
                args[self._writes].zero_()

        return launch


def _steps() -> None:
    """Three ranks, methods by name, tensors of many sizes and numbers, two types of gradients."""
    from triton.runtime import driver
    from virtual import World

    from ds_ckpt.compression import TopK, fused, triton_kernels
    from ds_ckpt.exchange import exchange
    from ds_ckpt.weights import lossless_kernels

    driver.set_active(_Driver())
    seen: set[str] = set()
    for name, writes in (
        ("pack_quantized", 1),
        ("unpack_add_quantized", None),
        ("block_maxima", 1),
        ("take_selected", None),
        ("add_gradient", None),
        ("round_residual", None),
    ):
        kernel = _Compiled(getattr(triton_kernels, name), seen, writes)
        setattr(triton_kernels, name, kernel)
    fused.is_supported = lambda *_: True  # type: ignore[assignment]
    exchange.on_host = lambda device: False  # type: ignore[assignment]
    methods = [Quantize(bits=3), Quantize(bits=2), TopK(density=0.02)]
    shapes = [torch.Size(s) for s in ((64, 48), (33, 7), (1, 40), (1024,), (4000, 3), (2, 1))]
    tensors = {f"{i} {m}": s for m, s in enumerate(shapes) for i in range(len(methods))}
    world = World(3, lambda name, shape: methods[int(name[0])], residual_dtype="int8")
    for rank in world.exchanges:
        rank.reserve(tensors.items(), torch.device("cpu"))
    for dtype in (torch.float32, torch.bfloat16):
        bucket = [(name, shape, dtype) for name, shape in tensors.items()]
        world.exchanges[0].preallocate(bucket, torch.device("cpu"), sends=False)
    for name in ("encode", "find_ones", "decode"):
        kernel = _Compiled(getattr(lossless_kernels, name), seen, None)
        setattr(lossless_kernels, name, kernel)
    _change_weights(4096)
    at_attach = set(seen)
    for numel in (1, 16, 1024, 1025):
        _change_weights(numel)
    for dtype in (torch.float32, torch.bfloat16):
        for some in (1, 2, 4, 16):
            names = list(tensors)[:some]
            gradients = [[torch.ones(tensors[n], dtype=dtype) for n in names] for _ in range(3)]
            world.reduce(names, gradients, 3.0)
            world.commit()
    print(json.dumps({"at attach": len(at_attach), "in steps": len(seen - at_attach)}))


def _change_weights(numel: int) -> None:
    weights = torch.zeros(numel, dtype=torch.bfloat16)
    lossless.decode_(weights, lossless.encode(weights, weights.clone()))


def main() -> None:
    if sys.argv[1:] == ["steps"]:
        _steps()
        return
    from ds_ckpt.compression import triton_kernels
    from ds_ckpt.weights import lossless_kernels

    found = {}
    for capability in map(int, sys.argv[1:]):
        for bits in (3, 2):
            options = Quantize.model_validate({"bits": bits})._kernel_options()
            constants = {**options, "TILE": TILE, "ALIGNED": True}
            how = {"enable_fp_fusion": False}
            pack = (triton_kernels.pack_quantized, PACK, constants)
            add = (triton_kernels.unpack_add_quantized, ADD, constants)
            for name, kernel in (("pack", pack), ("unpack_add", add)):
                key = f"{name}, {bits} bits, sm_{capability}"
                found[key] = compiled(*kernel, capability, **how)
        key = f"unpack_add, 2 bits, contracted, sm_{capability}"
        found[key] = compiled(*add, capability, enable_fp_fusion=True)
        for stored, types in STORED.items():
            constants = {"STEP": _signed(_STEP), "MIX": _MIX, "REACH": _REACH, "TO_HALF": _TO_HALF}
            constants |= {"BLOCK": 64, "TILE": TILE, "ALIGNED": True, "scales": None}
            for name in ("add_gradient", "round_residual"):
                key, kernel = f"{name}, {stored}, sm_{capability}", getattr(triton_kernels, name)
                given = {k: v for k, v in constants.items() if k not in types}
                found[key] = compiled(
                    kernel, RESIDUAL | types, given, capability, enable_fp_fusion=False
                )
        constants = {"FORMAT": "int8", "BLOCK": 64, "TILE": TILE}
        types = dict.fromkeys(triton_kernels.take_selected.arg_names, "i64") | PACK
        found[f"take_selected, sm_{capability}"] = compiled(
            triton_kernels.take_selected,
            {name: kind for name, kind in types.items() if name not in constants},
            constants,
            capability,
            enable_fp_fusion=False,
        )
        blocks = {"K": 2, "ROWS": 256, "COLUMNS": 32}
        found[f"maxima, sm_{capability}"] = compiled(
            triton_kernels.block_maxima, MAXIMA, blocks, capability
        )
        for name, writes in (("lengths", {"WRITE": False}), ("encode", {"WRITE": True})):
            constants = {"MANTISSA": 7, **writes}
            key = f"{name}, sm_{capability}"
            found[key] = compiled(lossless_kernels.encode, CHANGES, constants, capability)
        for name in ("find_ones", "decode"):
            kernel = getattr(lossless_kernels, name)
            constants = {"MANTISSA": 7}
            found[f"{name}, sm_{capability}"] = compiled(kernel, CHANGES, constants, capability)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
