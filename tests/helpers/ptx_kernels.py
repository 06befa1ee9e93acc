"""Small PTX kernels, written by hand, and one way to run them on CPU tensors."""

import torch
from torch import Tensor

from ptx_executor.build import core
from ptx_executor.parse import parse
from ptx_executor.program import Program, Result, packed
from ptx_executor.watched_memory import extent

_REGISTERS = (
    ".reg .pred %p<20>; .reg .b16 %rs<20>; .reg .b32 %r<99>; .reg .b32 %f<40>; .reg .b64 %rd<40>; .reg .b64 %fd<20>;"
)


def kernel(body: str, parameters: int = 2, shared: int = 0) -> str:
    """A module with one kernel ``k`` whose ``%rd1``, ``%rd2``, ... are its parameters and ``%r1`` is the thread."""
    declared = ", ".join(f".param .u64 p{i}" for i in range(parameters))
    loads = "\n".join(f"ld.param.u64 %rd{i + 1}, [p{i}];" for i in range(parameters))
    array = f".shared .align 128 .b8 tile[{shared}];" if shared else ""
    return (
        f".version 8.0\n.target sm_90a\n.address_size 64\n.visible .entry k({declared})\n"
        f"{{\n{_REGISTERS}\n{array}\n{loads}\nmov.u32 %r1, %tid.x;\n{body}\nret;\n}}\n"
    )


def execute(
    text: str, *tensors: Tensor, grid: int = 1, threads: int = 32, seed: int = 0, unwritten: tuple[Tensor, ...] = ()
) -> Result:
    """Run the kernel ``k`` of a module; its parameters are the tensors' addresses."""
    program = Program(parse(text)["k"])
    memory = core().GlobalMemory()
    for tensor in unwritten:
        begin, end = extent(tensor)
        memory.mark_unwritten(begin, end - begin)
    memory.begin_launch([(*extent(tensor), f"tensor {i}") for i, tensor in enumerate(tensors)])
    arguments = packed(program.kernel, [("Q", tensor.data_ptr()) for tensor in tensors])
    return program.launch(arguments, (grid, 1, 1), (threads, 1, 1), memory, seed=seed)


def each_lane(instructions: str, *inputs: Tensor, out: torch.dtype, registers: tuple[str, ...], result: str) -> Tensor:
    """Load element ``thread`` of inputs ``[32]`` into registers, run the instructions, return ``result`` of all."""
    lines, letter = [], {1: "b8", 2: "b16", 4: "b32", 8: "b64"}
    for i, (tensor, register) in enumerate(zip(inputs, registers, strict=True)):
        size = tensor.element_size()
        lines += [f"mad.wide.u32 %rd30, %r1, {size}, %rd{i + 1};", f"ld.global.{letter[size]} {register}, [%rd30];"]
    size = out.itemsize
    lines += [instructions, f"mad.wide.u32 %rd30, %r1, {size}, %rd{len(inputs) + 1};"]
    lines.append(f"st.global.{letter[size]} [%rd30], {result};")
    written = torch.zeros(32, dtype=out)
    execute(kernel("\n".join(lines), len(inputs) + 1), *inputs, written)
    return written
