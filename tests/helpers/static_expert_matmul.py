"""Compile the grouped matmul's kernels ahead of time and read the machine code: no GPU is needed.

A script, because kernels that were decorated under TRITON_INTERPRET=1 cannot be compiled: the test suite runs it in a
process of its own. ``python static_expert_matmul.py bfloat16 [80 90 ...]`` prints one JSON object a line.
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

from rbm_kernels.expert_matmul import config, kernels, weight_kernels

# The reference shape of DESIGN.md.
ROWS, FEATURES, EXPERTS, TOP_K = 169_343, 256, 8, 3
POINTERS = {"bfloat16": "*bf16", "float16": "*fp16", "tf32": "*fp32", "ieee": "*fp32"}
INTEGER_POINTERS = ("experts", "order", "tile_experts", "tile_counts", "listed_rows", "ends")
FLOAT32_POINTERS = ("gates", "listed_gates", "grad_gates", "partial", "sums")
ARCHITECTURES = (80, 90, 100, 120)


def compile_kernel(kernel, constants: dict, tile: config.Tile, precision: str, architecture: int) -> dict:
    """Compile one kernel as the just-in-time compiler would for aligned tensors at the reference shape."""
    signature, constexprs, attributes = {}, {}, {}
    float32 = FLOAT32_POINTERS + constants.get("float32_outputs", ())
    divisible = [["tt.divisibility", 16]]
    for position, name in enumerate(kernel.arg_names):
        stem = name.removesuffix("_ptr")
        if name in constants:
            signature[name] = "constexpr"
            constexprs[(position,)] = constants[name]
        elif name.endswith("_ptr"):
            signature[name] = (
                "*i32" if stem in INTEGER_POINTERS else "*fp32" if stem in float32 else POINTERS[precision]
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
        usage = subprocess.check_output(
            [tools / "cuobjdump", "-res-usage", file.name], text=True, stderr=subprocess.STDOUT
        )
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


def reference_cases(precision: str, architecture: int):
    """Every matmul kernel with its configuration at the reference shape."""
    table = "half" if precision in ("bfloat16", "float16") else precision
    shape = (architecture, table, ROWS, FEATURES, FEATURES)
    columns = {"TOP_K": TOP_K, "BLOCK_TOP_K": triton.next_power_of_2(TOP_K), "BLOCK_UNION": config.UNION_BLOCK}
    routing = {**columns, "STRIDE_ROUTING": TOP_K, "sums_ptr": None}
    forward, backward, weight = config.forward_tile(*shape), config.backward_tile(*shape), config.weight_tile(*shape)
    as_y, as_grad_x = (
        {"HAS_BIAS": True, "stride_weight_in": 1},
        {"HAS_BIAS": False, "bias_ptr": None, "stride_weight_out": 1},
    )
    yield "y", kernels.expert_matmul_fwd_kernel, forward, {**as_y, **routing}
    yield "grad_x", kernels.expert_matmul_fwd_kernel, forward, {**as_grad_x, **routing}
    yield "grad_x and grad_gates", kernels.expert_matmul_bwd_kernel, backward, {"HAS_BIAS": True, **routing}
    yield "grad_weight", weight_kernels.expert_matmul_bwd_weight_kernel, weight, {"HAS_BIAS": True, "BLOCK_E": EXPERTS}

    if precision == "float16":
        return  # As bfloat16.
    # A pass between others, which reads float32 sums and writes them: the most registers.
    between = {**columns, "STRIDE_ROUTING": TOP_K, "TOP_K": 2, "BLOCK_TOP_K": 2, "float32_outputs": ("y", "grad_x")}
    forward = config.forward_tile(*shape, passes=2)
    yield "y, a pass", kernels.expert_matmul_fwd_kernel, forward, {**as_y, **between}
    yield "grad_x, a pass", kernels.expert_matmul_fwd_kernel, forward, {**as_grad_x, **between}
    yield "grad_x and grad_gates, a pass", kernels.expert_matmul_bwd_kernel, backward, {"HAS_BIAS": True, **between}


def main(precision: str, *architectures: str) -> None:
    """Print one line for each kernel and architecture."""
    for architecture in map(int, architectures or ARCHITECTURES):
        for computes, kernel, tile, constants in reference_cases(precision, architecture):
            constants = {
                **constants,
                "INPUT_PRECISION": "tf32" if precision == "tf32" else "ieee",
                **{name.upper(): getattr(tile, name) for name in ("block_m", "block_n", "block_k")},
            }
            compiled = compile_kernel(kernel, constants, tile, precision, architecture)
            print(
                json.dumps({"computes": computes, "programs": tile.programs, "tile": tile[:5], **compiled}), flush=True
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
