"""Fixtures shared by the whole test suite."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from torch_geometric.data import Data

REPOSITORY = Path(__file__).resolve().parent.parent

# An architecture, such as 90: Triton compiles for it, and ptx_executor runs the compiled code on CPU tensors.
EXECUTED_ARCHITECTURE = os.environ.get("RBM_EXECUTE_PTX")

if not torch.cuda.is_available() and EXECUTED_ARCHITECTURE is None:
    # Triton kernels run in Triton's interpreter. Triton decides when it is imported, and other packages import it too:
    # this must come before any of them.
    os.environ["TRITON_INTERPRET"] = "1"

if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    # Parallel workers share the cores; several threads per worker would spend most of the time waiting for each other.
    _threads = max(1, (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))
    torch.set_num_threads(_threads)
    # Also for processes that tests start: with two threads each on two busy cores, `rbm distill` took four times as
    # long, mostly in threads that spin while they wait for the others.
    os.environ.setdefault("OMP_NUM_THREADS", str(_threads))
    # The process pool that torch.compile starts takes longer than compiling the few kernels of a test.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    # The processor's flags name its vector instructions; PyTorch would compile and load a program for each as well.
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")


# Runs make no plots unless a test asks for them: plots and a report take longer than training a small student.
os.environ["RBM_PLOTS"] = "0"


def pytest_configure(config: pytest.Config) -> None:
    """Keep pytest-xdist from ordering files by their number of tests, which put files with one long test last."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several workers, run files with slow tests first: a long file at the end would leave other workers idle."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        slow = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: item.path not in slow)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that need a compiler or a library if they are missing: wheels are tested like that (.ci/try-wheel)."""
    if item.get_closest_marker("compiler") and not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("needs a C++ compiler")
    if item.get_closest_marker("native"):
        from rbm_kernels import _native

        if _native.is_built_without_libraries():
            pytest.skip(_native.WITHOUT_LIBRARIES)


@pytest.fixture(scope="session")
def data_root() -> Path:
    """Folder of the real datasets: ``RBM_DATA_ROOT``, or ``shared/data`` next to the checkout; skips if missing."""
    root = Path(os.environ.get("RBM_DATA_ROOT", REPOSITORY.parent / "shared" / "data"))
    if not root.is_dir():
        pytest.skip(f"real datasets are not at {root} (RBM_DATA_ROOT names another place)")
    return root


@pytest.fixture(scope="session", autouse=True)
def _own_compile_cache(tmp_path_factory) -> None:
    """torch.compile keeps graphs on disk and does not notice that an operator's derivative has changed since.

    Workers share the folder, which is this run's: PyTorch's C++ headers are compiled once.
    """
    base = tmp_path_factory.getbasetemp()
    run = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(run / "inductor")


@pytest.fixture(scope="session", autouse=True)
def _patched_interpreter() -> None:
    """Patch the interpreter, if it is used, before the first launch, which may import Triton."""
    if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None:
        from patched_interpreter import patch

        patch()


@pytest.fixture(scope="session")
def device() -> Iterator[str]:
    """The device of kernels in this session: the GPU, or the CPU, interpreted or as compiled code."""
    if EXECUTED_ARCHITECTURE is not None:
        from ptx_executor.gpu import Gpu

        with Gpu(int(EXECUTED_ARCHITECTURE)):
            yield "cpu"
    elif os.environ.get("TRITON_INTERPRET") == "1":
        yield "cpu"
    else:
        yield "cuda"


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Use one thread, so that sums have the same order on every machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """A function that sets the number of PyTorch's threads for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _ordered_rows(monkeypatch) -> None:
    """Test the kernels for many (ordered) rows although problems are small without a GPU."""
    if not torch.cuda.is_available():
        _set_few_rows(monkeypatch, -1)


@pytest.fixture
def few_rows(_ordered_rows, monkeypatch) -> None:
    """Use the kernels for few (unordered) rows for any number of rows."""
    _set_few_rows(monkeypatch, 2**62)


def _set_few_rows(monkeypatch, limit: int) -> None:
    """Set all limits below which rows are neither ordered nor listed."""
    module = "rbm_kernels.ops.expert_matmul.config"
    monkeypatch.setattr(f"{module}._WASTE", dict.fromkeys(("half", "tf32", "ieee"), limit))
    monkeypatch.setattr(f"{module}._FEW_ROWS", limit)
    monkeypatch.setattr(f"{module}._MOST_WASTE", limit)


@pytest.fixture
def small_graph() -> Data:
    """60 nodes in three noisy, well-connected classes: a few epochs separate them."""
    from torch_geometric.data import Data

    generator = torch.Generator().manual_seed(7)
    labels = torch.arange(60) % 3
    x = torch.randn(60, 12, generator=generator) + 3.0 * torch.nn.functional.one_hot(labels, 12)
    same = torch.randint(0, 20, (2, 150), generator=generator) * 3
    pairs = same + torch.randint(0, 3, (1, 150), generator=generator)
    other = torch.randint(0, 60, (2, 20), generator=generator)
    edges = torch.cat([pairs, other], dim=1)
    edges = edges[:, edges[0] != edges[1]]
    edges = torch.cat([edges, edges.flip(0)], dim=1).unique(dim=1)
    position = torch.arange(60)
    return Data(
        x=x,
        edge_index=edges,
        y=labels,
        train_mask=position < 15,
        val_mask=(position >= 15) & (position < 30),
        test_mask=position >= 30,
    )
