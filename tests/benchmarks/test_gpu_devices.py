"""Two devices simulated on one: a rehearsal rejects and accepts the same calls as CUDA."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import rbm_kernels
from benchmarks.gpu import devices
from benchmarks.gpu.devices import GPU, HOST, two_devices

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def watch():
    with two_devices() as found:
        yield found


@pytest.fixture
def there(watch) -> torch.Tensor:
    return torch.arange(6.0, device="cpu:0").view(2, 3)


@pytest.fixture
def here(watch) -> torch.Tensor:
    return torch.arange(6.0).view(2, 3)


REFUSED = {
    "a difference": lambda there, here: there.double() - here,
    "a product": lambda there, here: here @ there.T,
    "an index of the GPU": lambda there, here: here.gather(0, there.long()),
    "a list": lambda there, here: torch.cat([there, here]),
    "a comparison": lambda there, here: torch.equal(there, here),
    "an answer by .cpu()": lambda there, here: there - there.cpu(),
    "a number of the GPU": lambda there, here: here * there.sum(),
    "an operator of ours": lambda there, here: rbm_kernels.cosine_topk(there, here, 1),
    "a compiled function": lambda there, here: torch.compile(torch.add)(there, here),
    "a module left behind": lambda there, here: torch.nn.Linear(3, 2)(there),
    "a gradient": lambda there, here: torch.autograd.grad((there.requires_grad_() * 2).sum(), there, here.sum(0)),
}


@pytest.mark.parametrize("meeting", REFUSED.values(), ids=REFUSED)
def test_tensors_of_two_devices_do_not_meet(there, here, meeting):
    with pytest.raises(RuntimeError, match="tensors of two devices meet"):
        meeting(there, here)


ALLOWED = {
    "one device": lambda there, here: there.double() - there,
    "a number of the host": lambda there, here: there * here.sum(),
    "a copy": lambda there, here: there.copy_(here),
    "indices of the host": lambda there, here: there[torch.tensor([1, 0])],
    "what is made like it": lambda there, here: there + torch.zeros(2, 3, device=there.device),
    "a module that was moved": lambda there, here: torch.nn.Linear(3, 2).to("cpu:0")(there),
    "a tensor that was moved": lambda there, here: there + here.to("cpu:0"),
    "a tensor that was moved to another": lambda there, here: there + here.to(there),
    "a compiled function": lambda there, here: torch.compile(torch.add)(there, there) + there,
    "a view": lambda there, here: there + torch.ones(6, device="cpu:0").view(3, 2).T,
    "a parameter": lambda there, here: torch.nn.Parameter(there) + there,
}


@pytest.mark.parametrize("meeting", ALLOWED.values(), ids=ALLOWED)
def test_all_else_is_let_through(watch, there, here, meeting):
    assert watch.is_on_gpu(meeting(there, here))


def test_the_host_reads_nothing_of_a_gpu(there, here):
    with pytest.raises(TypeError, match=r"copy it with \.cpu\(\) first"):
        there.numpy()
    with pytest.raises(TypeError, match=r"copy it with \.cpu\(\) first"):
        np.asarray(there)
    assert there.cpu().numpy().sum() == here.numpy().sum() == 15
    assert float(there.sum()) == 15


def test_devices_are_told_apart_and_copies_are_copies(there, here):
    assert (there.device, here.device) == (GPU, HOST) == (torch.device("cpu:0"), torch.device("cpu"))
    copied = there.cpu()
    copied.zero_()
    assert float(there.sum()) == 15
    back = here.to("cpu:0")
    assert back.device == GPU
    assert here.device == HOST
    gradients = torch.autograd.grad((there.requires_grad_() ** 2).sum(), there)
    assert gradients[0].device == GPU
    (there**2).sum().backward()
    assert there.grad.device == GPU


def test_what_is_freed_is_forgotten(monkeypatch, watch):
    monkeypatch.setattr(devices, "PURGE_AT", 50)
    watch._purge_at = 50
    for _ in range(500):
        torch.zeros(3, device="cpu:0")
    assert len(watch._on_gpu) < 100
    assert not watch.is_on_gpu(torch.zeros(3))


@pytest.mark.slow
def test_the_suite_that_compared_a_gpu_with_the_host_would_have_failed(tmp_path):
    """``test_expert_order.py`` once made its reference of ``first.cpu()``: on a GPU it failed, and nowhere else."""
    suite = (ROOT / "benchmarks" / "test_expert_order.py").read_text()
    broken = suite.replace("reference.expert_order(first, ", "reference.expert_order(first.cpu(), ")
    assert broken != suite
    outcomes = {}
    (tmp_path / "conftest.py").write_text("from benchmarks.conftest import *\n")
    for name, text in {"mended": suite, "broken": broken}.items():
        path = tmp_path / f"test_{name}.py"
        path.write_text(text)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "benchmarks.gpu.rehearsing", str(path)]
        command += [f"--results={tmp_path / name}.csv", f"--confcutdir={tmp_path}", "-k", "skewed"]
        environment = {**os.environ, "RBM_REHEARSE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT)
        outcomes[name] = run.returncode, run.stdout
    assert outcomes["mended"][0] == 0, outcomes["mended"][1]
    assert outcomes["broken"][0] == 1
    assert "tensors of two devices meet, as CUDA does not allow" in outcomes["broken"][1]
