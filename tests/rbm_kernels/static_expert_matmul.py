"""Compile the grouped matmul's kernels ahead of time and read the machine code: no GPU is needed.

A script, because kernels that were decorated under TRITON_INTERPRET=1 cannot be compiled: the test suite runs it in a
process of its own. ``python static_expert_matmul.py [bfloat16 ...]`` prints one JSON object a line.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rbm_kernels.expert_matmul import config, kernels

# The reference shape of DESIGN.md.
ROWS, FEATURES, EXPERTS, TOP_K = 169_343, 256, 8, 3
POINTERS = {"bfloat16": "*bf16", "float16": "*fp16", "tf32": "*fp32", "ieee": "*fp32"}
INTEGER_POINTERS = ("experts", "order", "tile_experts", "tile_counts", "listed_rows", "ends")
FLOAT32_POINTERS = ("gates", "listed_gates", "grad_gates", "partial")
ARCHITECTURES = (80, 90, 100, 120)


def compile_kernel(kernel, constants: dict, tile: config.Tile, precision: str, architecture: int) -> dict:
    """Compile one kernel as the just-in-time compiler would for aligned tensors at the reference shape."""
    signature, constexprs, attributes = {}, {}, {}
    divisible = [["tt.divisibility", 16]]
    for position, name in enumerate(kernel.arg_names):
        stem = name.removesuffix("_ptr")
        if name in constants:
            signature[name] = "constexpr"
            constexprs[(position,)] = constants[name]
        elif name.endswith("_ptr"):
            signature[name] = (
                "*i32" if stem in INTEGER_POINTERS else "*fp32" if stem in FLOAT32_POINTERS else POINTERS[precision]
            )
            attributes[(position,)] = divisible
        else:
            signature[name] = "i32"
            if name in ("in_features", "out_features", "block_m") or name.startswith("stride"):
                attributes[(position,)] = divisible
    compiled = triton.compile(
        ASTSource(kernel, signature, constexprs, attributes),
        target=GPUTarget("cuda", architecture, 32),
        options={"num_warps": tile.num_warps, "num_stages": tile.num_stages},
    )
    return {
        "kernel": kernel.__name__,
        "precision": precision,
        "architecture": architecture,
        "warps": tile.num_warps,
        "shared": compiled.metadata.shared,
        **read_machine_code(compiled.asm["cubin"]),
    }


def read_machine_code(cubin: bytes) -> dict:
    """Registers, stack and matrix instructions of a cubin, as Triton's own copy of cuobjdump sees them."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.check_output([tools / "cuobjdump", "-res-usage", file.name], text=True, stderr=subprocess.STDOUT)
        code = subprocess.check_output([tools / "nvdisasm", "-c", file.name], text=True)
    return {
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "stack": int(re.search(r"STACK:(\d+)", usage)[1]),
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", code)),
        "HGMMA": len(re.findall(r"\bHGMMA\b", code)),
        "HMMA": len(re.findall(r"\bHMMA\b", code)),
        "UTCMMA": len(re.findall(r"\bUTC\w*MMA\b", code)),
        "LDGSTS": len(re.findall(r"\bLDGSTS\b", code)),
        "LDG": len(re.findall(r"\bLDG\b", code)),
        "BAR": len(re.findall(r"\bBAR\b", code)),
        "wide_loads": len(re.findall(r"\b(?:LDG\.E\.128|LDGSTS\.E\S*\.128)", code)),
    }
