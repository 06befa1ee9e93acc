"""The fixture ``gpu``: each test of this folder runs on an NVIDIA GPU, and once more as a rehearsal on CPU tensors."""

from collections.abc import Iterator

import pytest
import torch
from on_gpu import RealGpu, RehearsedGpu

REAL = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.fixture(params=[pytest.param(RealGpu, id="gpu", marks=REAL), pytest.param(RehearsedGpu, id="rehearsal")])
def bare_gpu(request, device) -> Iterator[RealGpu | RehearsedGpu]:
    """The GPU, or CPU tensors with the CPU's own operators until a test calls ``kernels()``."""
    under_test = request.param()
    if not under_test.rehearses:
        yield under_test
        torch.cuda.empty_cache()  # other processes test on the same GPU
        return
    pytest.importorskip("triton")
    if device != "cpu":
        pytest.skip("Triton compiles in this process: rehearsals need one that interprets, without a GPU")
    yield under_test


@pytest.fixture
def gpu(bare_gpu) -> Iterator[RealGpu | RehearsedGpu]:
    """The GPU, or the rehearsal with every Triton operator run by the interpreter."""
    with bare_gpu.kernels():
        yield bare_gpu


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """Leave out the rehearsals of parameters that are for a GPU alone (``full_only``)."""
    report = yield
    report.result = [node for node in report.result or [] if not (_rehearses(node) and node.get_closest_marker("gpu"))]
    return report


def _rehearses(node: pytest.Item | pytest.Collector) -> bool:
    return hasattr(node, "callspec") and node.callspec.params.get("bare_gpu") is RehearsedGpu
