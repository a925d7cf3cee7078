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

TYPES = {
    "*fp32": "values into out working",
    "*fp64": "sums",
    "*i64": "ends",
    "*i32": "headers words histograms guessed tried counts ones",
    "*i16": "gradient old new weights places scratch",
    "*u8": "payload first offsets codes",
    "fp32": "factor divisor",
    "i64": "numel values_stride payload_stride shard_stride offsets_stride place_stride stride",
    "i32": "rows seed segments row_bytes segment_bytes",
}
TYPE_OF = {name: kind for kind, names in TYPES.items() for name in names.split()}
CODED_KERNELS = ("sample", "guess", "code", "read", "add")


def compiled(function: Any, constants: Any, capability: int, contract: bool) -> dict[str, int]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names, types = function.arg_names, {**TYPE_OF, **constants.get("types", {})}
    kinds = {n: "constexpr" if n in constants else types.get(n, "i64") for n in names}
    fixed = {(i,): constants.get(n) for i, n in enumerate(names) if kinds[n] == "constexpr"}
    source = ASTSource(fn=function, signature=kinds, constexprs=fixed)
    how = {"enable_fp_fusion": contract}
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

    from ds_ckpt.compression import EntropyCoded, TopK, entropy_kernels, fused, triton_kernels
    from ds_ckpt.exchange import exchange
    from ds_ckpt.weights import lossless_kernels

    driver.set_active(_Driver())
    seen: set[str] = set()
    kernels = ("pack_quantized", "unpack_add_quantized", "block_maxima", "take_selected")
    kernels += ("add_gradient", "round_residual")
    for module, names in ((triton_kernels, kernels), (entropy_kernels, CODED_KERNELS)):
        for name in names:
            writes = 1 if name in ("pack_quantized", "block_maxima") else None
            setattr(module, name, _Compiled(getattr(module, name), seen, writes))
    fused.is_supported = lambda *_: True  # type: ignore[assignment]
    exchange.on_host = lambda device: False  # type: ignore[assignment]
    methods = [Quantize(bits=3), Quantize(bits=2), TopK(density=0.02), EntropyCoded(bits=1.0)]
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


def _cases() -> dict[str, tuple[Any, ...]]:
    """Return the most instructions of a warp, kernels, and their constants.

    One of four warps for 1,024 entries; `maxima` is for 8,192, `guess` for 2^20.
    """
    from ds_ckpt.compression import entropy_kernels, triton_kernels
    from ds_ckpt.weights import lossless_kernels

    tile, cases = {"TILE": TILE, "ALIGNED": True}, dict[str, tuple[Any, ...]]()
    for bits, most, most_added in ((3, 520, 270), (2, 660, 205)):
        options = {**Quantize.model_validate({"bits": bits})._kernel_options(), **tile}
        cases[f"pack, {bits} bits"] = (most, triton_kernels.pack_quantized, options)
        added = (most_added, triton_kernels.unpack_add_quantized, options)
        cases[f"unpack_add, {bits} bits"] = added
    cases["unpack_add, 2 bits, contracted"] = added
    constants = {"STEP": _signed(_STEP), "MIX": _MIX, "REACH": _REACH, "TO_HALF": _TO_HALF}
    for name, stored, scales, most, most_rounded in (
        ("int8", "*i8", "*i16", 245, 235),
        ("bf16", "*i16", "constexpr", 225, 115),
    ):
        types = {"stored": stored, "values": stored, "scales": scales}
        options = {"BLOCK": 64, **constants, **tile, "types": types}
        cases[f"add_gradient, {name}"] = (most, triton_kernels.add_gradient, options)
        cases[f"round_residual, {name}"] = (most_rounded, triton_kernels.round_residual, options)
    options = {"FORMAT": "int8", "BLOCK": 64, "TILE": TILE}
    cases["take_selected"] = (1050, triton_kernels.take_selected, options)
    options = {"K": 2, "ROWS": 256, "COLUMNS": 32}
    cases["maxima"] = (1850, triton_kernels.block_maxima, options)
    for name, most, write in (("lengths", 700, False), ("encode", 2350, True)):
        cases[name] = (most, lossless_kernels.encode, {"MANTISSA": 7, "WRITE": write})
    cases["find_ones"] = (480, lossless_kernels.find_ones, {})
    cases["decode"] = (1540, lossless_kernels.decode, {"MANTISSA": 7})
    for stage, most in (("try", 5000), ("count", 2400), ("write", 4000)):
        cases[f"coded {stage}"] = (most, entropy_kernels.code, {"STAGE": stage})
    for name, most in (("sample", 400), ("guess", 1900), ("read", 2200), ("add", 340)):
        cases[f"coded {name}"] = (most, getattr(entropy_kernels, name), {})
    return cases


def main() -> None:
    if sys.argv[1:] == ["steps"]:
        _steps()
        return
    found = {}
    for capability in map(int, sys.argv[1:]):
        for name, (most, kernel, constants) in _cases().items():
            # on other architectures the one that has all that the others have
            if capability == 90 or not name.startswith("coded") or name == "coded write":
                made = compiled(kernel, constants, capability, "contracted" in name)
                found[f"{name}, sm_{capability}"] = {"most": most, **made}
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
