"""Compile the fused kernels for GPUs that are not there, and print what the code has, as JSON.

    python -m tests.compile_kernels 80 90

Triton brings NVIDIA's assembler, so this ends with machine code; nothing is run. By kernel and
compute capability: bytes of code, and products and sums at once (`fma`).
"""

from __future__ import annotations

import json
import sys
from typing import Any

from ds_ckpt.compression import Quantize
from ds_ckpt.compression.fused import TILE

COUNTS = dict.fromkeys(("rows", "numel", "values_stride", "payload_stride", "stride"), "i32")
PACK = {"values": "*fp32", "payload": "*u8", **COUNTS}
ADD = {"first": "*u8", "into": "*fp32", "factor": "fp32", **COUNTS}
STRIDES = dict.fromkeys(("shard_stride", "offsets_stride", "place_stride"), "i64")
MAXIMA = {
    "values": "*fp32",
    "offsets": "*u8",
    **dict.fromkeys(("numel", "count", "rows"), "i32"),
    **STRIDES,
}


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
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=how)
    return {"code_bytes": len(made.asm["cubin"]), "fma": made.asm["ptx"].count("fma.rn.f32")}


def main() -> None:
    from ds_ckpt.compression import triton_kernels

    found = {}
    for capability in map(int, sys.argv[1:]):
        for bits in (3, 2):
            options = Quantize.model_validate({"bits": bits})._kernel_options()
            constants = {**options, "TILE": TILE}
            how = {"enable_fp_fusion": False}
            pack = (triton_kernels.pack_quantized, PACK, constants)
            add = (triton_kernels.unpack_add_quantized, ADD, constants)
            for name, kernel in (("pack", pack), ("unpack_add", add)):
                key = f"{name}, {bits} bits, sm_{capability}"
                found[key] = compiled(*kernel, capability, **how)
        key = f"unpack_add, 2 bits, contracted, sm_{capability}"
        found[key] = compiled(*add, capability, enable_fp_fusion=True)
        blocks = {"K": 2, "ROWS": 256, "COLUMNS": 32}
        found[f"maxima, sm_{capability}"] = compiled(
            triton_kernels.block_maxima, MAXIMA, blocks, capability
        )
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
