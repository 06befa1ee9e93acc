"""Arguments of the operators for the fuzzer: any legal shape, stride, dtype and number, and faults put into them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
STRIDES = ("contiguous", "transposed", "apart", "offset", "expanded")
# What a row, or the whole tensor, is made of; the last two are no numbers.
NUMBERS = ("normal", "zero", "tiny", "denormal", "small", "long", "huge", "nan", "inf")
_SIZES = {"tiny": 1e-30, "denormal": 1e-40, "small": 1e-13, "long": 1e17, "huge": 3e38}


@dataclass(frozen=True)
class Case:
    """One call. ``rows`` names what each of some rows is made of: place and kind."""

    b: int
    d: int
    n: int
    e: int
    k: int
    dtype: str
    wide_memory: bool
    strides: tuple[str, ...]
    rows: tuple[tuple[int, str], ...]
    options: tuple[bool, bool]
    temperature: float
    seed: int
    fault: int | None

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    @property
    def accumulated(self) -> torch.dtype:
        return torch.float64 if self.dtype == "float64" else torch.float32


@st.composite
def cases(draw, dtypes=tuple(DTYPES), faults: int = 60) -> Case:
    """Small sizes, 0 and 1 among them; batches beyond 256 rows, where the CPU library takes another way."""
    b = draw(st.one_of(st.integers(0, 9), st.sampled_from([255, 256, 257, 300])))
    e = draw(st.one_of(st.integers(1, 9), st.sampled_from([16, 33])))
    size = st.one_of(st.integers(0, 9), st.sampled_from([15, 16, 17, 33, 70]))
    return Case(
        b=b,
        d=draw(size),
        n=draw(size),
        e=e,
        k=draw(st.integers(1, min(e, 9))),
        dtype=draw(st.sampled_from(dtypes)),
        wide_memory=draw(st.booleans()),
        strides=tuple(draw(st.lists(st.sampled_from(STRIDES), min_size=4, max_size=4))),
        rows=tuple(draw(st.lists(st.tuples(st.integers(0, 300), st.sampled_from(NUMBERS)), max_size=4))),
        options=(draw(st.booleans()), draw(st.booleans())),
        temperature=draw(st.sampled_from([1.0, 0.05, 0.5, 20.0])),
        seed=draw(st.integers(0, 2**31)),
        # One case in three has a fault: its number, modulo those that the operator knows.
        fault=draw(st.one_of(st.none(), st.none(), st.integers(0, faults))),
    )


def numbers(case: Case, generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Normal numbers, but for the rows that the case names (those of the first dimension)."""
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    for place, kind in case.rows:
        if values.numel() == 0:
            break
        row = values[place % shape[0]]
        if kind == "zero":
            row.zero_()
        elif kind in ("nan", "inf"):
            row.view(-1)[place % row.numel()] = float(kind)
        elif kind != "normal":
            row.div_(row.abs().max()).mul_(min(_SIZES[kind], 0.9 * torch.finfo(dtype).max))
    return values.to(dtype)


def laid_out(tensor: Tensor, strides: str) -> Tensor:
    """The same numbers with other strides; expanded: the first row's numbers in all rows."""
    if strides == "transposed" and tensor.dim() > 1:
        return tensor.mT.contiguous().mT
    if strides == "apart" and tensor.dim() > 0:
        wide = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1] + 1), 7, dtype=tensor.dtype)
        wide[..., 1::2] = tensor
        return wide[..., 1::2]
    if strides == "offset":
        flat = torch.full((tensor.numel() + 3,), 7, dtype=tensor.dtype)
        flat[3:] = tensor.reshape(-1)
        return flat[3:].view(tensor.shape)
    if strides == "expanded" and tensor.dim() > 1 and tensor.shape[0] > 0:
        return tensor[:1].expand(tensor.shape)
    return tensor


def gates_and_experts(case: Case, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    gates = torch.rand(case.b, case.k, generator=generator, dtype=torch.float64).to(case.accumulated)
    experts = torch.rand(case.b, case.e, generator=generator).argsort(1)[:, : case.k].int()
    return laid_out(gates, case.strides[2]), laid_out(experts, case.strides[3])


def csr_rows(case: Case, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Entries in any order, some repeated, rows without any."""
    dense = numbers(case, generator, (case.b, case.d), DTYPES[case.dtype])
    counts = torch.randint(0, case.d + 2, (case.b,), generator=generator) if case.d else torch.zeros(case.b).long()
    crow = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    entries = int(crow[-1])
    col = torch.randint(0, max(1, case.d), (entries,), generator=generator)
    row = torch.repeat_interleave(torch.arange(case.b), counts)
    return crow, laid_out(col.int(), case.strides[0]), laid_out(dense[row, col], case.strides[1])


def with_fault(case: Case, arguments: dict, shared: dict[str, tuple[int, ...]]) -> dict | None:
    """The arguments with one fault; None where this one does no harm.

    ``shared`` names the dimensions of each tensor that must agree with another argument.
    """
    names = [name for name, value in arguments.items() if isinstance(value, Tensor)]
    tensor_faults: list[Callable[[Tensor], Tensor]] = [
        lambda t: t[None],
        lambda t: t.to(torch.complex64),
        lambda t: t.to(torch.int64),
        lambda t: t.to("meta"),
        *[lambda t, place=place: _longer(t, place) for place in range(3)],
    ]
    scalars = [("k", 0), ("k", case.e + 1), ("k", -1), ("temperature", 0.0), ("temperature", float("nan"))]
    scalars += [("decay", -0.1), ("decay", float("nan")), ("num_experts", 0), ("num_experts", 2**31), ("block_m", 0)]
    scalars = [(name, value) for name, value in scalars if name in arguments]
    number = case.fault % (len(names) * len(tensor_faults) + len(scalars) + 2)
    if number < len(scalars):
        return arguments | dict([scalars[number]])
    number -= len(scalars)
    if number < 2:
        experts = arguments.get("experts")
        if experts is None or experts.numel() == 0:
            return None
        experts = experts.clone(memory_format=torch.contiguous_format)
        experts.view(-1)[case.seed % experts.numel()] = (-1, case.e)[number]
        return arguments | {"experts": experts}
    number -= 2
    name, kind = names[number // len(tensor_faults)], number % len(tensor_faults)
    if kind >= 4 and kind - 4 not in shared.get(name, ()):
        return None
    if kind == 3 and len(names) == 1:
        return None
    return arguments | {name: tensor_faults[kind](arguments[name])}


def _longer(tensor: Tensor, place: int) -> Tensor:
    shape = list(tensor.shape)
    shape[place] += 1
    return tensor.new_zeros(shape)
