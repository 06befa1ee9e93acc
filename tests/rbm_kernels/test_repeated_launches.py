"""Later launches of a kernel skip Triton's binding of arguments: the driver must be called with the same all the same.

A driver that only takes notes stands for a GPU; kernels are compiled for sm_90.
"""

import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver
from triton.runtime import JITFunction

from rbm_kernels import _launching


def add_kernel(x_ptr, y_ptr, w_ptr, z_ptr, rows, stride, scale, HAS_Y: tl.constexpr, BLOCK: tl.constexpr = 64):
    row, columns = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + columns, mask=columns < rows, other=0.0) * scale
    if HAS_Y:
        x += tl.load(y_ptr + columns)
    tl.store(z_ptr + row * stride + columns, x, mask=columns < rows)


class OnGpu(torch.Tensor):
    """A CPU tensor that says that it is on a GPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    is_cuda = True


class Noting(CudaDriver):
    """A GPU that notes all that its C code would get, as C code reads it: of tensors, the addresses."""

    def __init__(self):
        self.device, self.stream, self.calls, self.launcher_cls = 0, 7, [], self._launcher
        self.threads = 1024
        self.loaded, self._functions = [], set()
        self.utils = SimpleNamespace(
            load_binary=lambda name, code, shared, device: ("module", self._load(code, device), 0, 0, self.threads),
            unload_module=lambda module: None,
        )

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return self.stream + device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def _load(self, code: bytes, device: int) -> int:
        self.loaded.append((code, device))
        return len(self.loaded)

    def unload(self) -> None:
        """Leave nothing for Triton to unload when there is no GPU any more."""
        for function in self._functions:
            for compiled, *_ in function.device_caches.values():
                for kernel in compiled.values():
                    kernel.module = None

    def _launcher(self, source, metadata):
        self._functions.add(source.fn)
        kinds, compiled_for = list(source.signature.values()), repr((source.signature, source.attrs, source.constants))

        def run(*arguments):
            *about, launch_metadata, before, after = arguments[:9]
            values = arguments[9:]
            assert len(values) == len(kinds)
            if before is not None:
                before(launch_metadata)
            taken = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in values]
            self.calls.append((*about, compiled_for, tuple(map(repr, taken))))
            if after is not None:
                after(launch_metadata)

        return run


@pytest.fixture
def gpu(monkeypatch) -> Iterator[Noting]:
    # Where the tests run compiled kernels without a GPU, this is replaced for good.
    if JITFunction.run.__globals__ is not JITFunction.__init__.__globals__:
        pytest.skip("JITFunction.run is not Triton's own")
    gpu = Noting()
    # Triton remembers this for each device, also one that is really there.
    monkeypatch.setattr(triton.compiler.compiler, "max_shared_mem", lambda device: 2**17)
    monkeypatch.setattr(triton.runtime.driver, "_active", gpu)
    yield gpu
    gpu.unload()


def tensor(size: int = 64, offset: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor whose address is a multiple of 16, and ``offset`` elements more."""
    whole = torch.zeros(size + 16, dtype=dtype)
    first = -whole.data_ptr() % 16 // whole.element_size()
    return whole[first + offset :][:size].as_subclass(OnGpu)


def calls_with_everything() -> dict[str, tuple]:
    plain = (tensor(), tensor(), tensor(), tensor(), 40, 3, 0.5)
    changes = {
        "unaligned": {0: tensor(offset=1)},
        "another unaligned": {3: tensor(offset=2)},
        "bfloat16": {0: tensor(dtype=torch.bfloat16)},
        "float16, unaligned": {3: tensor(offset=1, dtype=torch.float16)},
        "none": {1: None},
        "another none": {2: None},
        "one": {4: 1},
        "two ones": {4: 1, 5: 1},
        "zero": {4: 0},
        "sixteen": {4: 16, 5: 32},
        "odd": {4: 17},
        "negative": {5: -16},
        "odd negative": {5: -1},
        "wide": {5: 2**31},
        "wide, odd": {5: 2**40 + 1},
        "negative and wide": {5: -(2**31) - 1},
        "the last of 32 bits": {5: 2**31 - 1},
        "the least of 32 bits": {5: -(2**31)},
        "unsigned": {5: 2**63},
        "unsigned, odd": {5: 2**64 - 1},
        "whole float": {6: 1.0},
        "an integer for a float": {6: 1},
        "truth": {6: True},
        "falsehood": {6: False},
    }
    found = {"plain": plain, "other values": (tensor(), tensor(), tensor(), tensor(), 41, 5, 0.25)}
    for name, changed in changes.items():
        found[name] = tuple(changed.get(place, value) for place, value in enumerate(plain))
    return found


def launchers(grid=(3, 2), **options):
    """The launcher, and Triton's own way: two functions with the same code, so that they share nothing."""
    constants = {"HAS_Y": False, "BLOCK": 64, "num_warps": 2, **options}
    direct = _launching.launcher(JITFunction(add_kernel), grid, **constants)
    kernel = JITFunction(add_kernel)
    return direct, lambda *values: kernel[grid](*values, **constants, **_launching.OPTIONS)


def noted(gpu: Noting, launch, *values) -> tuple:
    """What the GPU gets, with the code itself in place of the handle of the loaded code."""
    gpu.calls.clear()
    launch(*values)
    ((*grid_and_stream, function, metadata, compiled_for, taken),) = gpu.calls
    return (*grid_and_stream, gpu.loaded[function - 1], metadata, compiled_for, taken)


class Counted:
    """Counts what Triton binds itself."""

    def __init__(self, monkeypatch):
        self.times = 0
        original = triton.runtime.jit.compute_cache_key

        def compute_cache_key(*arguments):
            self.times += 1
            return original(*arguments)

        monkeypatch.setattr(triton.runtime.jit, "compute_cache_key", compute_cache_key)


@pytest.fixture
def bound(gpu, monkeypatch) -> Counted:
    return Counted(monkeypatch)


def test_the_driver_gets_the_same(gpu, bound):
    """Whatever came before: each call first, again, and after all others."""
    launch, ordinary = launchers()
    every = calls_with_everything()
    expected = {name: noted(gpu, ordinary, *values) for name, values in every.items()}
    compiled = {compiled_for for *_, compiled_for, _ in expected.values()}
    assert len(compiled) > 15, "nearly all are compiled on their own"
    bound.times = 0
    for _ in range(3):
        for name, values in every.items():
            for _ in range(2):
                assert noted(gpu, launch, *values) == expected[name], name
    assert bound.times == len(compiled)


def test_devices_and_streams(gpu, bound):
    """Each device has loaded the code for itself; the stream is the current one."""
    launch, _ = launchers((5,))
    values = calls_with_everything()["plain"]
    bound.times = 0
    for stream in (7, 8):
        for device in (0, 1):
            gpu.device, gpu.stream = device, stream
            direct = noted(gpu, launch, *values)
            assert direct[:3] == (5, 1, 1)
            assert (direct[3], direct[4][1]) == (stream + device, device)
    assert bound.times == 2


def test_a_launch_that_fails_is_not_remembered(gpu):
    launch, _ = launchers()
    values = calls_with_everything()["plain"]
    gpu.threads = 32
    for _ in range(2):
        with pytest.raises(triton.OutOfResources):
            launch(*values)
    with pytest.raises(TypeError):
        launch(*values[:-1])
    assert not gpu.calls


def test_tensors_elsewhere_are_left_to_triton(gpu, bound):
    """The driver's code refuses addresses that are not a GPU's, but only of tensors."""
    launch, _ = launchers()
    values = calls_with_everything()["plain"]
    launch(*values)
    launch(*values)
    bound.times = 0
    launch(values[0].as_subclass(torch.Tensor), *values[1:])
    assert bound.times == 1


def test_replacing_the_launch_function_is_honoured(gpu, monkeypatch):
    """As tests and benchmarks do to count launches, before and after the first."""
    launch, _ = launchers()
    values = calls_with_everything()["plain"]
    counted = []
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(JITFunction, "run", lambda *args, **kwargs: counted.append(kwargs))
            launch(*values)
            launch(*values)
        assert not gpu.calls
        launch(*values)
        launch(*values)
        assert len(gpu.calls) == 2
        gpu.calls.clear()
    assert [kwargs["grid"] for kwargs in counted] == [(3, 2)] * 4


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_are_called(gpu, hook, monkeypatch):
    launch, _ = launchers()
    values = calls_with_everything()["plain"]
    seen = []

    def note(metadata):
        seen.append(metadata.get()["name"])

    launch(*values)
    launch(*values)
    chain = getattr(triton.knobs.runtime, hook)
    chain.add(note)
    launch(*values)
    chain.remove(note)
    launch(*values)
    assert seen == ["add_kernel"]
    launch._kernel.add_pre_run_hook(lambda *args, **kwargs: seen.append(kwargs["BLOCK"]))
    launch(*values)
    assert seen == ["add_kernel", 64]


@pytest.mark.parametrize(
    ("knobs", "name", "value"), [("runtime", "debug", True), ("compilation", "instrumentation_mode", "consan")]
)
def test_debugging_is_left_to_triton(gpu, bound, monkeypatch, knobs, name, value):
    launch, _ = launchers()
    launch(*calls_with_everything()["plain"])
    monkeypatch.setattr(getattr(triton.knobs, knobs), name, value)
    monkeypatch.setattr(JITFunction, "_do_compile", lambda *_: None)
    bound.times = 0
    launch(*calls_with_everything()["plain"])
    launch(*calls_with_everything()["plain"])
    assert bound.times == 2


def test_another_driver_is_left_to_triton(gpu, bound, monkeypatch):
    """As one that only compiles, or one of another maker."""
    launch, _ = launchers()
    values = calls_with_everything()["plain"]
    launch(*values)

    class Other:
        get_current_device, get_current_stream = gpu.get_current_device, gpu.get_current_stream

    monkeypatch.setattr(triton.runtime.driver, "_active", Other())
    bound.times = 0
    launch(*values)
    assert bound.times == 1


def test_what_triton_does_not_compile_is_left_to_it(gpu, bound, monkeypatch):
    """A compiler that something else has taken the place of, and one that is not ready yet."""
    launch, _ = launchers()
    other = SimpleNamespace(launch_metadata=lambda *_: None, run=lambda *_: None, function=1, packed_metadata=())
    monkeypatch.setattr(JITFunction, "_do_compile", lambda *_: other)
    for times in (1, 2):
        launch(*calls_with_everything()["plain"])
        assert bound.times == times


def test_defaults_are_left_to_triton(gpu, bound):
    launch = _launching.launcher(JITFunction(add_kernel), (1,), HAS_Y=True)
    for times in (1, 2):
        launch(*calls_with_everything()["plain"])
        assert bound.times == times


def test_constants_come_last(gpu):
    for constant in ({"x_ptr": None}, {"stride": 3}):
        launch = _launching.launcher(JITFunction(add_kernel), (1,), **constant, HAS_Y=True, BLOCK=64)
        for _ in range(2):
            with pytest.raises(TypeError, match="multiple values"):
                launch(*calls_with_everything()["plain"][1:])


def test_several_threads(gpu):
    launch, ordinary = launchers()
    every = list(calls_with_everything().values())
    for values in every:
        ordinary(*values)
    expected = sorted(map(repr, [call[6:] for call in gpu.calls] * 5))
    gpu.calls.clear()

    def launch_all():
        for values in every:
            launch(*values)

    threads = [threading.Thread(target=launch_all) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(repr, [call[6:] for call in gpu.calls])) == expected
