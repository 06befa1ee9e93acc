"""Twin runs: a student trains with the operators as they serve the CPU, and once more with the Triton kernels."""

import contextlib
import copy
from collections import Counter
from unittest import mock

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("triton")

from rbm import RbMStudent
from rbm.nn import losses
from rbm_kernels.cosine_topk import op as cosine_topk
from rbm_kernels.expert_matmul import op as expert_matmul
from rbm_kernels.expert_order import op as expert_order
from rbm_kernels.routed_matmul import op as routed_matmul

KERNELS = {
    "cosine_topk": cosine_topk._cuda,
    "cosine_topk_backward": cosine_topk._cuda_backward,
    "expert_order": expert_order._cuda,
    "expert_matmul": expert_matmul._cuda,
    "expert_matmul_backward_input": expert_matmul._cuda_backward_input,
    "expert_matmul_backward_weight": expert_matmul._cuda_backward_weight,
    "routed_matmul": routed_matmul._cuda,
}
ROWS, FEATURES, CLASSES, STEPS = 32, 12, 3, 6


@contextlib.contextmanager
def kernels_serve_the_cpu():
    """Let the dispatcher send CPU tensors where it sends CUDA tensors, and count how often it does."""
    calls = Counter()

    def counted(name, implementation):
        def call(*args, **kwargs):
            calls[name] += 1
            return implementation(*args, **kwargs)

        return call

    library = torch.library.Library("rbm", "IMPL")
    try:
        for name, implementation in KERNELS.items():
            library.impl(name, counted(name, implementation), "CPU")
        with mock.patch.object(expert_matmul, "_kernels_serve", lambda x: x.dtype != torch.float64):
            yield calls
    finally:
        library._destroy()


def train(student, device):
    """A few steps of distillation from true classes, a teacher's, and the three embedding losses, then an answer.

    Returns:
        The losses ``[STEPS]``, for each step the memories that it ran with, and the final logits.
    """
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(ROWS) % CLASSES
    x = torch.randn(ROWS, FEATURES, generator=generator) + 2 * F.one_hot(labels, FEATURES)
    teacher = torch.randn(ROWS, CLASSES, generator=generator) + 3 * F.one_hot(labels, CLASSES)
    x, labels, teacher = x.to(device), labels.to(device), teacher.to(device)
    optimizer = torch.optim.Adam(student.parameters(), lr=0.02)
    history, memories = [], []
    for _ in range(STEPS):
        logits, trace = student(x, return_trace=True)
        loss = 0.5 * losses.hard_label_loss(logits, labels) + 0.5 * losses.soft_label_loss(logits, teacher)
        loss = loss + losses.embedding_loss(
            trace.routings,
            student.memories(),
            commitment_weight=0.3,
            self_similarity_weight=0.1,
            load_balance_weight=0.1,
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(loss.item())
        memories.append(torch.cat([memory.flatten() for memory in student.memories()]).cpu())
    student.eval()
    with torch.no_grad():
        return torch.tensor(history), torch.stack(memories), student(x).cpu()


@pytest.mark.parametrize("detach_gates", [True, False])
def test_a_student_trains_alike(detach_gates, device):
    """Both runs are float32 and differ in the order of their sums alone.

    Tolerance: 1e-5 of a loss; 1e-5 for memories (their length is one), parameters and logits, where a step of Adam is
    0.02. No norm stands between the layers: one would make the first layer's bias (batch) or scale (layer) matter to
    nothing, and Adam makes whole steps of the rounding that is then all of its gradient.
    """
    torch.manual_seed(0)
    student = RbMStudent(FEATURES, 16, CLASSES, num_experts=5, top_k=2, detach_gates=detach_gates)
    twin = copy.deepcopy(student).to(device)
    expected, expected_memories, expected_logits = train(student, "cpu")
    with kernels_serve_the_cpu() if device == "cpu" else contextlib.nullcontext() as calls:
        got, got_memories, got_logits = train(twin, device)

    torch.testing.assert_close(got, expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(got_memories, expected_memories, rtol=0, atol=1e-5)
    torch.testing.assert_close(got_logits, expected_logits, rtol=1e-5, atol=1e-5)
    for (name, value), other in zip(twin.state_dict().items(), student.state_dict().values(), strict=True):
        torch.testing.assert_close(value.cpu(), other, rtol=1e-5, atol=1e-5, msg=name)

    # It was a run: the losses fall, and every step moved the memories.
    assert expected[-1] < 0.8 * expected[0]
    assert (expected_memories.diff(dim=0).norm(dim=-1) > 0.01).all()
    if calls is not None:
        # In each of two layers; the input of the first needs no gradient.
        once = dict.fromkeys(("cosine_topk_backward", "expert_matmul_backward_input"), STEPS)
        assert calls == {**dict.fromkeys(KERNELS, 2 * STEPS), **once, "routed_matmul": 2}
