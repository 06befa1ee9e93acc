"""The workloads of the suites: shapes, precisions, routings, and their tensors."""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.measure.device import HERE, REHEARSES
from benchmarks.measure.precision import DTYPES

DEVICE = HERE.name
# The first is the most important one; if time is short, only it is measured with every routing.
PRECISIONS = ("bfloat16", "float32", "tf32", "float16") if HERE.is_gpu else ("float32", "bfloat16")
ROUTINGS = ("uniform", "skewed", "clustered")
# Maximum multiplications of a shape's forward: a tenth of a second on two cores; practically unlimited on a GPU.
MOST = 10**13 if HERE.is_gpu else 4 * 10**9


def width(features: int) -> int:
    """The number of features to measure: unchanged, but in a rehearsal a sixteenth, odd if ``features`` is."""
    return features // 16 | features % 2 if REHEARSES else features


def batch(rows: int) -> int:
    """The number of rows to measure: unchanged, but in a rehearsal small, increasing with ``rows``, and one for one."""
    return round(rows**0.4) if REHEARSES else rows


@dataclass(frozen=True)
class Shape:
    """``rows`` rows of ``features`` to ``outputs`` through ``top_k`` of ``experts`` experts."""

    rows: int
    features: int = width(256)
    outputs: int = width(256)
    experts: int = 8
    top_k: int = 3

    def __str__(self) -> str:
        return f"B={self.rows} D={self.features} N={self.outputs} E={self.experts} k={self.top_k}"

    @property
    def multiplications(self) -> int:
        """Multiplications of the experts, forward."""
        return self.rows * self.top_k * self.features * self.outputs


# Numbers of nodes of the paper's graphs: ogbn-arxiv, Coauthor-CS, Cora, Coauthor Physics, ogbn-products.
ARXIV, COAUTHOR_CS, CORA, PHYSICS, PRODUCTS = map(batch, (169_343, 18_333, 2_708, 34_493, 2_449_029))
REFERENCE = Shape(ARXIV)
SHAPES = (
    REFERENCE,
    Shape(COAUTHOR_CS),
    Shape(CORA),
    Shape(CORA, width(1_433)),
    Shape(COAUTHOR_CS, width(128), width(128), 4),
    Shape(PHYSICS, width(512), width(512), 5),
    Shape(ARXIV, experts=3),
    Shape(ARXIV, experts=16),
    Shape(ARXIV, experts=32),
    Shape(ARXIV, experts=64, top_k=8),
    Shape(ARXIV, width(1_024), width(1_024)),
    Shape(PHYSICS, width(8_415)),
    Shape(PRODUCTS),
)
# As in Qwen3-30B-A3B, with half of its experts. Their weights are larger than a processor's caches.
LARGE = tuple(Shape(batch(rows), width(2_048), width(768), 64, 8) for rows in (1, 16, 256, 1_024))
# Batches in which an expert gets few rows, so that its weights cost more than the products.
MANY_EXPERTS = tuple(Shape(batch(rows), width(512), width(512), 64, 2) for rows in (64, 512))
# Routers only, as large as those of language models with many small experts. A router has no outputs.
ROUTERS = (
    Shape(batch(4_096), width(4_096), 1, 256, 8),
    Shape(batch(8_192), width(512), 1, 2_048, 8),
)


def for_this_machine(most_multiplications: int) -> tuple[Shape, ...]:
    """The shapes with at most this many multiplications forward; larger ones get as many rows as Cora."""
    cut = [s if s.multiplications <= most_multiplications else replace(s, rows=CORA) for s in SHAPES[1:]]
    fitting = (shape for shape in (REFERENCE, *cut) if shape.multiplications <= most_multiplications)
    return tuple(dict.fromkeys(fitting))


@dataclass(frozen=True)
class Workload:
    """A shape, the precision of its rows and weights, and how the rows are routed."""

    shape: Shape
    precision: str = PRECISIONS[0]
    routing: str = "uniform"

    def __str__(self) -> str:
        return f"{self.shape} {self.precision} {self.routing}"


def workloads(precisions: tuple[str, ...] = PRECISIONS, routings: tuple[str, ...] = ROUTINGS) -> list[Workload]:
    """Every shape of this machine. The first one comes first, with every routing.

    On CUDA in every precision. On a CPU, where half precision is rarely used, other precisions only at the first shape.
    """
    first, *others = for_this_machine(MOST)
    found = [Workload(first, precisions[0], routing) for routing in routings]
    found += [Workload(first, precision) for precision in precisions]
    found += [Workload(shape, p) for shape in others for p in (precisions if HERE.is_gpu else precisions[:1])]
    return list(dict.fromkeys(found))


def workload_of(item: Any) -> Workload | Shape | None:
    """The workload, or only the shape, that a pytest item has as its parameter; None if it has neither."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return parameters.get("workload", parameters.get("shape"))


@dataclass(frozen=True)
class Problem:
    """The operators' arguments, named as in ``rbm_kernels.ops``, and the gradient of the result."""

    x: Tensor
    memory: Tensor
    weight: Tensor
    bias: Tensor
    gates: Tensor
    experts: Tensor
    grad: Tensor

    @classmethod
    def of(cls, workload: Workload, device: str = DEVICE) -> "Problem":
        """New random tensors. ``x``, ``weight``, ``bias`` and ``gates`` require a gradient."""
        shape, dtype = workload.shape, DTYPES[workload.precision]

        def normal(*size: int) -> Tensor:
            return torch.randn(size, device=device, dtype=dtype)

        memory = torch.randn(shape.experts, shape.features, device=device)
        return cls(
            x=clear_rows(shape.rows, memory, shape.top_k, workload.precision).requires_grad_(),
            memory=memory,
            weight=(normal(shape.experts, shape.outputs, shape.features) * shape.features**-0.5).requires_grad_(),
            bias=normal(shape.experts, shape.outputs).requires_grad_(),
            gates=torch.rand(shape.rows, shape.top_k, device=device).softmax(-1).requires_grad_(),
            experts=route(workload.routing, shape, device),
            grad=normal(shape.rows, shape.outputs),
        )

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """The tensors that get a gradient from the experts."""
        return self.x, self.gates, self.weight, self.bias

    def nbytes(self) -> int:
        return sum(getattr(self, field.name).nbytes for field in fields(self))

    def in_float64(self) -> "Problem":
        """A copy in float64 with leaves of its own.

        A leaf's ``double()`` would keep the node that accumulates the leaf's gradient, with the stream on which it was
        made. No training step with this leaf could then be captured in a CUDA graph.
        """
        copies = {}
        for field in fields(self):
            tensor = getattr(self, field.name)
            wide = tensor.detach().double() if tensor.is_floating_point() else tensor
            copies[field.name] = wide.requires_grad_(tensor.requires_grad)
        return Problem(**copies)


def clear_rows(rows: int, memory: Tensor, top_k: int, precision: str = "float32") -> Tensor:
    """Random rows with unambiguous experts: the k-th cosine is clearly larger than the next.

    All implementations of routing then choose the same experts, and results can be compared row by row.
    """
    margin = 2e-3 if precision == "tf32" else 1e-5
    x = torch.randn(rows, memory.shape[1], device=memory.device, dtype=DTYPES[precision])
    unclear = torch.arange(rows if top_k < memory.shape[0] else 0, device=memory.device)
    directions = normalize(memory.double(), dim=-1).T
    for _ in range(100):
        if not len(unclear):
            break
        parts = unclear.split(65_536)
        unclear = torch.cat([part[_gap(x[part], directions, top_k) < margin] for part in parts])
        x[unclear] = torch.randn(len(unclear), x.shape[1], device=x.device, dtype=x.dtype)
    return x


def _gap(x: Tensor, directions: Tensor, top_k: int) -> Tensor:
    largest = (normalize(x.double(), dim=-1) @ directions).topk(top_k + 1).values
    return largest[:, -2] - largest[:, -1]


def route(kind: str, shape: Shape, device: str = "cpu") -> Tensor:
    """Experts of every row, int32 ``[B, k]``.

    ``uniform``: all sets are equally likely. ``skewed``: expert e has odds of 1 / e (Zipf's law). ``clustered``: rows
    belong to 16 clusters with one set each, similar to what memory vectors that follow their rows lead to.
    """
    if kind == "clustered":
        sets = torch.rand(16, shape.experts, device=device).topk(shape.top_k).indices
        return sets[torch.randint(16, (shape.rows,), device=device)].int()
    odds = torch.ones(shape.experts, device=device)
    if kind == "skewed":
        odds = 1 / torch.arange(1, shape.experts + 1, device=device)
    # The k largest values of log(odds) + Gumbel noise are k draws without replacement.
    keys = odds.log() - torch.empty(shape.rows, shape.experts, device=device).exponential_().log()
    return keys.topk(shape.top_k).indices.int()
