"""The devices of the GPU tests, and what every operator must keep to there: bits, graphs, streams, memory, compilers.

A check takes ``call(*tensors) -> tensors``, forward alone or with gradients, and ``draw(seed)``, which makes the
tensors: of equal shapes for every seed. Time on a GPU is short, so tests give full sizes there and small ones in the
rehearsal (``gpu.size(full, small)``), and mark parameters that the rehearsal leaves out (:func:`full_only`).
"""

import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from filelock import FileLock
from torch import Tensor

from benchmarks.measure.device import Gpu, Rehearsal
from rbm_kernels import _native
from rbm_kernels._library import TRITON_OPERATORS

Draw = Callable[[int], tuple[Tensor | None, ...]]
Size = TypeVar("Size")
Call = Callable[..., Sequence[Tensor]]
# The operators that librbm_cuda and Triton both have.
MEMORY_UPDATE = ("memory_statistics", "memory_update_")


class RealGpu(Gpu):
    """The current CUDA device."""

    rehearses = False
    compiler = "inductor"

    def size(self, full: Size, small: Size) -> Size:
        """``full``: a size as users have it."""
        return full

    def kernels(self) -> AbstractContextManager[None]:
        """The operators as they are: CUDA tensors are served by the kernels."""
        return nullcontext()

    @contextmanager
    def memory_update_by(self, implementation: str) -> Iterator[None]:
        """Memory updates by ``librbm_cuda`` (skips where it is not loaded), or by the ``Triton`` that stands in."""
        if implementation == "librbm_cuda":
            if not _native.status()["cuda"]["loaded"]:
                pytest.skip(_native.status()["cuda"]["reason"])
            yield
            return
        if not _native.status()["cuda"]["loaded"]:  # Triton serves them already, and PyTorch refuses to bind it twice
            yield
            return
        library = torch.library.Library("rbm", "IMPL")
        try:
            for operator in MEMORY_UPDATE:
                library.impl(operator, TRITON_OPERATORS[operator], "CUDA")
            yield
        finally:
            library._destroy()

    def sleep(self) -> None:
        """Keep the current stream busy for some 10 ms, so that work that does not wait for it fails every time."""
        torch.cuda._sleep(20_000_000)

    def second(self) -> str:
        """Another device of this machine; skips without one."""
        if torch.cuda.device_count() < 2:
            pytest.skip("there is one GPU")
        return "cuda:1"

    def with_memory(self, needed: int, work: Callable[[], None]) -> None:
        """Do work that needs so many bytes; skips where they are not free. Processes side by side take turns."""
        with FileLock(Path(tempfile.gettempdir()) / "rbm-gpu-tests.lock"):
            torch.cuda.empty_cache()
            if self.free_bytes() < needed:
                pytest.skip(f"{needed >> 30} GiB of GPU memory are needed, {self.free_bytes() >> 30} are free")
            work()
            torch.cuda.empty_cache()


class RehearsedGpu(Rehearsal):
    """CPU tensors in a GPU's place."""

    rehearses = True
    compiler = "aot_eager"

    def size(self, full: Size, small: Size) -> Size:
        """``small``: the interpreter takes milliseconds for each tile."""
        return small

    def kernels(self) -> AbstractContextManager[Counter]:
        """The Triton kernels for CPU tensors, in the interpreter; counts their calls."""
        from triton_on_cpu import serving_kernels

        return serving_kernels()

    def memory_update_by(self, implementation: str) -> AbstractContextManager[Counter]:
        """All kernels; with ``librbm_cuda`` the memory updates are left to librbm_cpu, in its place."""
        from triton_on_cpu import KERNELS, serving_kernels

        by_triton = implementation == "Triton"
        return serving_kernels([name for name in KERNELS if by_triton or name not in MEMORY_UPDATE])

    def sleep(self) -> None:
        """Nothing runs beside the caller."""

    def second(self) -> str:
        """The same one."""
        return self.name

    def with_memory(self, needed: int, work: Callable[[], None]) -> None:
        """Do the work; the sizes of a rehearsal need nothing."""
        work()


def full_only(*values: object) -> list:
    """Parameters that a GPU runs and the rehearsal leaves out."""
    return [
        pytest.param(*value, marks=pytest.mark.gpu)
        if isinstance(value, tuple)
        else pytest.param(value, marks=pytest.mark.gpu)
        for value in values
    ]


@contextmanager
def float32_products(precision: str) -> Iterator[None]:
    """``tf32`` or ``ieee``, by PyTorch's own setting; nothing else changes it."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = precision
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def same_bits(got: Iterable[Tensor], expected: Iterable[Tensor], what: str) -> None:
    """Equal bit for bit; NaN equals NaN."""
    for place, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert a.dtype == b.dtype, (what, place)
        assert torch.equal(a.isnan(), b.isnan()), f"{what}: NaN in result {place}"
        assert torch.equal(a.nan_to_num(), b.nan_to_num()), f"{what}: result {place} differs"


def check_repeats(call: Call, draw: Draw, times: int = 20) -> None:
    """The same arguments give the same bits, so many times."""
    tensors = draw(0)
    first = call(*tensors)
    for number in range(1, times):
        same_bits(call(*tensors), first, f"run {number}")


def check_graph(gpu: Gpu, call: Call, draw: Draw) -> None:
    """A captured graph computes with what lies in its tensors at each replay, not with what the capture saw."""
    tensors = draw(0)
    graph = gpu.capture([lambda: call(*tensors)])
    seen = []
    for seed in (1, 0):
        expected = call(*draw(seed))
        _refill(tensors, draw(seed))
        graph.replay()
        same_bits(graph.results[0], expected, f"replay with the tensors of seed {seed}")
        seen.append([result.clone() for result in expected])
    assert any(not torch.equal(a, b) for a, b in zip(seen[0], seen[1], strict=True)), "seeds must differ in something"


def check_no_wait(gpu: Gpu, call: Call, draw: Draw) -> None:
    """The host does not wait for the device: PyTorch raises where it would."""
    tensors = draw(0)
    call(*tensors)  # what is compiled, loaded or allocated once may wait
    with gpu.without_synchronisation():
        call(*tensors)


def check_side_stream(gpu: Gpu, call: Call, draw: Draw) -> None:
    """Work goes to the current stream: its arguments are written there, late, after the host has launched it all."""
    expected = call(*draw(0))
    tensors, fresh = draw(1), draw(0)
    gpu.synchronize()
    with gpu.side_stream():
        gpu.sleep()
        _refill(tensors, fresh)
        got = call(*tensors)
    gpu.synchronize()
    same_bits(got, expected, "side stream")


def check_second_device(gpu: Gpu, call: Call, draw: Draw) -> None:
    """Arguments of another device than the current one are served there."""
    other = gpu.second()
    tensors = draw(0)
    got = call(*(t if t is None else t.to(other) for t in tensors))
    assert all(result.device == torch.device(other) for result in got)
    same_bits((result.to(tensors[0].device) for result in got), call(*tensors), other)


def check_peak(gpu: Gpu, call: Call, draw: Draw, allowed: int) -> None:
    """Bytes held at once, results included, beyond the arguments: at most ``allowed``.

    The allocator rounds every tensor up to 512 bytes, and none of the operators has more than 64 of them at a time.
    """
    tensors = draw(0)
    peak = gpu.peak_bytes(lambda: call(*tensors))
    assert peak <= allowed + 64 * 512, f"{peak:,} bytes at once, {allowed:,} allowed"


class OperatorOnGpu:
    """Tests of what holds for each operator, whatever it computes: for classes with fixtures ``call`` and ``draw``."""

    def test_repeats(self, call, draw, gpu):
        check_repeats(call, draw, gpu.size(20, 3))

    def test_graph_with_new_inputs(self, call, draw, gpu):
        check_graph(gpu, call, draw)

    def test_waits_for_nothing(self, call, draw, gpu):
        check_no_wait(gpu, call, draw)

    def test_side_stream(self, call, draw, gpu):
        check_side_stream(gpu, call, draw)

    def test_second_device(self, call, draw, gpu):
        check_second_device(gpu, call, draw)


def check_compiled(gpu: Gpu, call: Call, draw: Draw) -> None:
    """``torch.compile(fullgraph=True)`` gives the bits of the call itself, for a second set of arguments too."""
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend=gpu.compiler)
    for seed in (0, 1):
        same_bits(compiled(*draw(seed)), call(*draw(seed)), "compiled")
    torch._dynamo.reset()


def _refill(tensors: Iterable[Tensor | None], fresh: Iterable[Tensor | None]) -> None:
    with torch.no_grad():
        for old, new in zip(tensors, fresh, strict=True):
            if old is not None:
                old.copy_(new)


def check_devices(gpu: Gpu, operator: str, arguments: dict[str, object], *, named: bool = True) -> None:
    """A tensor on another device than the first gets a sentence: operator, both arguments, both devices if ``named``.

    On a GPU tensors go to the CPU. In the rehearsal, where the dispatcher would take the meta device's part, the
    operator's implementation for CUDA is called.
    """
    call, elsewhere = getattr(torch.ops.rbm, operator), "cpu"
    if gpu.rehearses:
        from triton_on_cpu import KERNELS

        call, elsewhere = KERNELS[operator], "meta"
    first, *others = (name for name, value in arguments.items() if isinstance(value, Tensor))
    assert others
    for name in others:
        moved = {**arguments, name: arguments[name].to(elsewhere)}
        with pytest.raises((ValueError, RuntimeError)) as refusal:
            call(*moved.values())
        for part in (f"rbm::{operator}: ", name, first, *([elsewhere, gpu.name] if named else [])):
            assert part in str(refusal.value)
