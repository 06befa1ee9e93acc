"""llama.cpp's experts on a CPU: ggml's ``mul_mat_id``, SwiGLU, ``mul_mat_id``, and a sum over a row's experts.

The graph is the one that llama.cpp builds for models with a merged matrix of gates and values, called through ggml's C
interface (version 0.21). ggml keeps rows in float32, also between bfloat16 weights; the time includes the conversion of
rows and result. It has no packed form for float32 and bfloat16.
"""

import ctypes
import math
import weakref
from collections.abc import Callable
from ctypes import c_bool, c_char, c_int, c_int64, c_size_t, c_void_p

import torch
from torch import Tensor

_TYPES = {torch.float32: 0, torch.float16: 1, torch.int32: 26, torch.bfloat16: 30}  # enum ggml_type
_NODES = 64  # upper bound of the tensors in a graph


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


_RETURNS_POINTER = (
    *("init", "new_tensor_3d", "new_tensor_2d", "mul_mat_id", "swiglu", "mul", "add", "view_2d", "new_graph_custom"),
    *("get_data", "gallocr_new", "backend_cpu_init", "backend_cpu_buffer_type", "backend_alloc_ctx_tensors"),
)


class _Ggml:
    """The library's functions, with the types of their results."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        for name in _RETURNS_POINTER:
            getattr(library, f"ggml_{name}").restype = c_void_p
        library.ggml_tensor_overhead.restype = library.ggml_graph_overhead_custom.restype = c_size_t
        library.ggml_gallocr_alloc_graph.restype = c_bool
        self.backend = c_void_p(self.backend_cpu_init())
        weakref.finalize(self, library.ggml_backend_free, self.backend)

    def __getattr__(self, name: str) -> Callable[..., int | None]:
        function = getattr(self._library, f"ggml_{name}")
        return lambda *arguments: function(*(c_size_t(a) if isinstance(a, int) else a for a in arguments))

    def context(self, owner: object) -> c_void_p:
        """A context for descriptions of tensors and a graph, freed with its owner."""
        size = _NODES * self.tensor_overhead() + self.graph_overhead_custom(_NODES, c_bool(False))
        made = c_void_p(self._library.ggml_init(_InitParams(size, None, True)))
        weakref.finalize(owner, self._library.ggml_free, made)
        return made

    def tensor(self, context: c_void_p, dtype: torch.dtype, *sizes: int) -> c_void_p:
        """A tensor without memory; ggml's order of sizes is the reverse of PyTorch's."""
        new = getattr(self, f"new_tensor_{len(sizes)}d")
        return c_void_p(new(context, c_int(_TYPES[dtype]), *map(c_int64, reversed(sizes))))

    def memory(self, tensor: c_void_p, dtype: torch.dtype, *shape: int) -> Tensor:
        """The memory of a tensor that has some, as a tensor of PyTorch."""
        size = math.prod(shape) * dtype.itemsize
        return torch.frombuffer((c_char * size).from_address(self.get_data(tensor)), dtype=dtype).view(shape)


def is_in(library: ctypes.CDLL) -> bool:
    """Whether a library is ggml's for CPUs."""
    return all(hasattr(library, f"ggml_{name}") for name in _RETURNS_POINTER)


class Experts:
    """Experts ``up [E, 2 I, D]`` and ``down [E, D, I]`` in ggml's memory, as a function of rows, gates and experts."""

    def __init__(self, library: ctypes.CDLL, up: Tensor, down: Tensor) -> None:
        self.ggml = ggml = _Ggml(library)
        context = ggml.context(self)
        self.up, self.down = (ggml.tensor(context, weight.dtype, *weight.shape) for weight in (up, down))
        buffer = c_void_p(ggml.backend_alloc_ctx_tensors(context, ggml.backend))
        weakref.finalize(self, ggml.backend_buffer_free, buffer)
        for target, weight in ((self.up, up), (self.down, down)):
            ggml.memory(target, weight.dtype, *weight.shape).copy_(weight)
        self.shape, self.graph = None, None

    def __call__(self, x: Tensor, gates: Tensor, experts: Tensor) -> Tensor:
        if self.shape != (*x.shape, gates.shape[1]):
            self.shape = (*x.shape, gates.shape[1])
            self.graph = _Graph(self, *self.shape)
        return self.graph(x, gates, experts)


class _Graph:
    """The computation for a number of rows."""

    def __init__(self, of: Experts, rows: int, features: int, k: int) -> None:
        self.ggml = ggml = of.ggml
        context = ggml.context(self)
        x = ggml.tensor(context, torch.float32, rows, 1, features)
        chosen = ggml.tensor(context, torch.int32, rows, k)
        gates = ggml.tensor(context, torch.float32, rows, k, 1)

        def then(name: str, *arguments: object) -> c_void_p:
            return c_void_p(getattr(ggml, name)(context, *arguments))

        hidden = then("swiglu", then("mul_mat_id", of.up, x, chosen))
        gated = then("mul", then("mul_mat_id", of.down, hidden, chosen), gates)
        width = 4 * features
        y, *others = (then("view_2d", gated, features, rows, k * width, i * width) for i in range(k))
        for other in others:
            y = then("add", y, other)
        for tensor in (x, chosen, gates):
            ggml.set_input(tensor)
        ggml.set_output(y)
        self.graph = then("new_graph_custom", _NODES, c_bool(False))
        ggml.build_forward_expand(self.graph, y)
        allocator = c_void_p(ggml.gallocr_new(c_void_p(ggml.backend_cpu_buffer_type())))
        weakref.finalize(self, ggml.gallocr_free, allocator)
        if not ggml.gallocr_alloc_graph(allocator, self.graph):
            raise MemoryError(f"ggml has no memory for {rows} rows")
        self.x, self.y = (ggml.memory(tensor, torch.float32, rows, features) for tensor in (x, y))
        self.gates = ggml.memory(gates, torch.float32, rows, k)
        self.chosen = ggml.memory(chosen, torch.int32, rows, k)
        ggml.backend_cpu_set_n_threads(ggml.backend, c_int(torch.get_num_threads()))

    def __call__(self, x: Tensor, gates: Tensor, experts: Tensor) -> Tensor:
        self.x.copy_(x)
        self.gates.copy_(gates)
        self.chosen.copy_(experts)
        self.ggml.backend_graph_compute(self.ggml.backend, self.graph)
        return self.y.to(x.dtype, copy=True)
