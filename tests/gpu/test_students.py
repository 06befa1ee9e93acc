"""Students on a GPU: runs compared with the CPU's, graphs and compilers, and ``rbm distill --device cuda``."""

import copy
import json
import sys
from unittest import mock

import pytest
import torch
from on_gpu import check_no_wait, check_repeats, same_bits
from torch.nn import functional as F

from rbm import MLPStudent, RbMStudent
from rbm.nn import losses

ROWS, FEATURES, CLASSES, STEPS = 32, 12, 3, 6


def task(device):
    """Rows, true classes, a teacher's logits."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(ROWS) % CLASSES
    x = torch.randn(ROWS, FEATURES, generator=generator) + 2 * F.one_hot(labels, FEATURES)
    teacher = torch.randn(ROWS, CLASSES, generator=generator) + 3 * F.one_hot(labels, CLASSES)
    return x.to(device), labels.to(device), teacher.to(device)


def loss_of(student, x, labels, teacher):
    """Distillation from true classes, a teacher's, and where rows are routed the three embedding losses."""
    logits, trace = student(x, return_trace=True)
    loss = 0.5 * losses.hard_label_loss(logits, labels) + 0.5 * losses.soft_label_loss(logits, teacher)
    if not trace.routings:
        return loss
    weights = dict(commitment_weight=0.3, self_similarity_weight=0.1, load_balance_weight=0.1)
    return loss + losses.embedding_loss(trace.routings, student.memories(), **weights)


def train(student, device):
    """A few steps of Adam, then an answer.

    Returns:
        The losses ``[STEPS]``, for each step the memories that it ran with (none for an MLP), and the final logits.
    """
    x, labels, teacher = task(device)
    optimizer = torch.optim.Adam(student.parameters(), lr=0.02)
    history, memories = [], []
    for _ in range(STEPS):
        loss = loss_of(student, x, labels, teacher)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(loss.item())
        if isinstance(student, RbMStudent):
            memories.append(torch.cat([memory.flatten() for memory in student.memories()]).cpu())
    student.eval()
    with torch.no_grad():
        return torch.tensor(history), memories, student(x).cpu()


def same_state(got, expected):
    for (name, value), other in zip(got.state_dict().items(), expected.state_dict().values(), strict=True):
        torch.testing.assert_close(value.cpu(), other, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.core
@pytest.mark.parametrize("detach_gates", [True, False])
def test_an_rbm_student_trains_alike(detach_gates, bare_gpu):
    """Both runs are float32 and differ in the order of their sums alone.

    Tolerance: 1e-5 of a loss; 1e-5 for memories (their length is one), parameters and logits, where a step of Adam is
    0.02. No norm stands between the layers: one would make the first layer's bias (batch) or scale (layer) matter to
    nothing, and Adam makes whole steps of the rounding that is then all of its gradient.
    """
    torch.manual_seed(0)
    student = RbMStudent(FEATURES, 16, CLASSES, num_experts=5, top_k=2, detach_gates=detach_gates)
    twin = copy.deepcopy(student).to(bare_gpu.name)
    expected, expected_memories, expected_logits = train(student, "cpu")
    with bare_gpu.kernels() as calls:
        got, got_memories, got_logits = train(twin, bare_gpu.name)

    torch.testing.assert_close(got, expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(torch.stack(got_memories), torch.stack(expected_memories), rtol=0, atol=1e-5)
    torch.testing.assert_close(got_logits, expected_logits, rtol=1e-5, atol=1e-5)
    same_state(twin, student)

    # It was a run: the losses fall, and every step moved the memories.
    assert expected[-1] < 0.8 * expected[0]
    assert (torch.stack(expected_memories).diff(dim=0).norm(dim=-1) > 0.01).all()
    if calls is not None:
        # In each of two layers; the input of the first needs no gradient.
        twice = ("cosine_topk", "expert_order", "expert_matmul", "expert_matmul_backward_weight")
        once = ("cosine_topk_backward", "expert_matmul_backward_input")
        for name in ("memory_statistics", "memory_update_"):  # where librbm_cuda does not serve
            assert calls.pop(name, 2 * STEPS) >= 2 * STEPS
        # Rehearsed on a CPU, the answers come from an operator that only CPUs have.
        answers = {} if bare_gpu.name == "cpu" else {"routed_matmul": 2}
        assert calls == {**dict.fromkeys(twice, 2 * STEPS), **dict.fromkeys(once, STEPS), **answers}


def test_an_mlp_student_trains_alike(bare_gpu):
    """No operator of ours, and the same loop: what differs beside it is the device's."""
    torch.manual_seed(0)
    student = MLPStudent(FEATURES, 16, CLASSES, num_layers=3)
    twin = copy.deepcopy(student).to(bare_gpu.name)
    expected, _, expected_logits = train(student, "cpu")
    got, _, got_logits = train(twin, bare_gpu.name)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(got_logits, expected_logits, rtol=1e-5, atol=1e-5)
    same_state(twin, student)
    assert expected[-1] < 0.8 * expected[0]


STUDENTS = {
    "rbm": lambda: RbMStudent(FEATURES, 16, CLASSES, num_experts=5, top_k=2, norm="batch", detach_gates=False),
    "mlp": lambda: MLPStudent(FEATURES, 16, CLASSES, norm="layer"),
}


@pytest.mark.parametrize("kind", STUDENTS)
class TestStudents:
    """Gradients of a step, and answers, of both students."""

    @pytest.fixture
    def student(self, kind, gpu):
        torch.manual_seed(0)
        return STUDENTS[kind]().to(gpu.name)

    @pytest.fixture
    def step(self, student, gpu):
        def call(x, labels, teacher):
            return torch.autograd.grad(loss_of(student, x, labels, teacher), list(student.parameters()))

        student.eval()  # without a memory or statistics that move between the runs
        return call, lambda seed: task(gpu.name)

    def test_repeats(self, step, gpu):
        check_repeats(*step, gpu.size(20, 2))

    def test_waits_for_nothing(self, step, gpu):
        check_no_wait(gpu, *step)

    def test_answers_in_a_graph(self, student, gpu):
        """Captured once, fed with new rows: the answers of the student itself."""
        student.eval()
        x = torch.randn(20, FEATURES, device=gpu.name)

        def answer():
            with torch.no_grad():
                return student(x)

        graph = gpu.capture([answer])
        for seed in range(2):
            x.copy_(torch.randn(20, FEATURES, generator=torch.Generator().manual_seed(seed)))
            graph.replay()
            same_bits([graph.results[0]], [answer()], f"seed {seed}")

    @pytest.mark.parametrize("mode", ["answers", "training"])
    def test_compiled(self, student, mode, gpu):
        torch._dynamo.reset()
        twin = copy.deepcopy(student.train(mode == "training"))  # before a forward that moves the memory
        compiled = torch.compile(student, fullgraph=True, backend=gpu.compiler)
        rows = task(gpu.name)[0]
        with torch.set_grad_enabled(mode == "training"):
            torch.testing.assert_close(compiled(rows), twin(rows), rtol=1e-4, atol=1e-4)
        torch._dynamo.reset()


QUICK = {
    "encoding.deepwalk": "false",
    **{f"{network}.dropout": 0 for network in ("teacher", "mlp", "rbm")},
    "teacher.hidden_channels": 32,
    "mlp.hidden_channels": 32,
    "rbm.hidden_channels": 16,
    "teacher.max_epochs": 20,
    "mlp.max_epochs": 8,
    "rbm.max_epochs": 8,
    "rbm.pretrain_epochs": 2,
}


@pytest.fixture
def distill(monkeypatch, capsys):
    """Run ``rbm distill`` in this process, with a cache of its own; the records of its run folder.

    A lent machine may lack what settings are made of; the students, which need none, are tested there all the same.
    """
    pytest.importorskip("pydantic")
    from rbm.cli import main
    from rbm.training.run_folder import read_metrics

    def run(folder, device, *arguments, status=0):
        settings = [part for name, value in QUICK.items() for part in ("--set", f"{name}={value}")]
        command = ["rbm", "distill", *settings, "--out", folder, "--cache", f"{folder}-cache", "--device", device]
        monkeypatch.setattr(sys, "argv", [*map(str, command), "--no-plots", *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        assert (stop.value.code or 0) == status, capsys.readouterr().err
        return read_metrics(folder)

    return run


def check_alike(got, expected):
    """Losses of two runs without dropout, epoch by epoch, which round differently and train for few epochs.

    Adam's step does not shrink with its gradient: where a gradient is all rounding, two runs step to opposite sides,
    0.01 each time. Such parameters matter little to the loss. Measured on the CPU, with features that are disturbed by
    1e-6 of themselves, eight float32 roundings: losses change by up to 1.5e-5 of themselves. Allowed are 1e-3.
    """
    phases = [(record["phase"], record["epoch"]) for record in expected]
    assert [(record["phase"], record["epoch"]) for record in got] == phases
    assert {phase for phase, _ in phases} == {"teacher", "labels", "mlp", "rbm"}
    for record, twin in zip(got, expected, strict=True):
        assert record["loss"] == pytest.approx(twin["loss"], rel=1e-3), record
    for phase in ("teacher", "mlp", "rbm"):
        first, *_, last = (record["loss"] for record in expected if record["phase"] == phase)
        assert last < first


# Deterministic algorithms are asked for; where CUDA has none PyTorch says so and goes on.
@pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation:UserWarning")
@pytest.mark.slow
def test_distillation_to_the_end(bare_gpu, distill, tmp_path):
    """On digits: the CPU's losses on the device; then from a checkpoint that the CPU left, to the same end.

    The rehearsal's 1,797 rows are too many for the interpreter: the CPU's operators serve them.
    """
    from rbm import load_student
    from rbm.distillation.methods.rbm import RbMTrainer
    from rbm.distillation.trainer import StudentTrainer
    from rbm.training import loop as training

    expected = distill(tmp_path / "cpu", "cpu")
    check_alike(distill(tmp_path / "device", bare_gpu.name), expected)
    summary = json.loads((tmp_path / "device" / "summary.json").read_text())
    assert summary["rbm"]["test_accuracy"] > 0.5, "a tenth is chance"
    assert next(load_student(tmp_path / "device").parameters()).device.type == "cpu"

    def stop_at_epoch_5(self, epoch):
        if epoch == 5:
            raise KeyboardInterrupt
        return StudentTrainer.train_epoch(self, epoch)

    with (
        mock.patch.object(training, "CHECKPOINT_SECONDS", 0.0),
        mock.patch.object(RbMTrainer, "train_epoch", stop_at_epoch_5),
    ):
        distill(tmp_path / "stopped", "cpu", status=130)
    assert (tmp_path / "stopped" / "checkpoint.pt").exists()
    check_alike(distill(tmp_path / "stopped", bare_gpu.name, "--resume"), expected)
