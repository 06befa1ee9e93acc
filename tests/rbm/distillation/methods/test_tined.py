"""TINED: the teacher's operations as layers, and the energies of their inputs and outputs."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

import rbm
from rbm.config import Config, TINEDConfig, TINEDPlusConfig
from rbm.datasets.encodings import Encodings
from rbm.datasets.splits import split_graph
from rbm.distillation.methods import tined
from rbm.distillation.methods.tined import (
    EdgeSum,
    TINEDPlusTrainer,
    TINEDTrainer,
    edge_energies,
    energy_loss,
    feature_transformations,
    teacher_operations,
)
from rbm.distillation.task import DistillationTask
from rbm.nn.sparse_rows import SparseRows
from rbm.nn.tined import TINEDStudent
from rbm.teachers import GAT, build_teacher, edges_for
from rbm.teachers.outputs import outputs_from_logits, outputs_from_module
from rbm.utils.progress import Progress

TEACHERS = ("sage", "gcn", "appnp", "mlp")


def teacher_of(name: str, hidden: int = 8, **options) -> torch.nn.Module:
    return build_teacher(name, 6, 4, hidden_channels=hidden, **options).eval()


def student_of(teacher, *, identity: bool = True, in_channels: int = 6) -> TINEDStudent:
    weights, place = feature_transformations(teacher)
    hidden = weights[0][0].shape[0]
    student = TINEDStudent(in_channels, hidden, 4, num_layers=len(weights), propagation=place, features=6)
    student.inject(weights, identity=identity)
    return student.eval()


@pytest.mark.parametrize("name", TEACHERS)
@pytest.mark.parametrize("hidden", [3, 8])
def test_operations_are_those_that_the_teacher_does(directed_graph, name, hidden):
    teacher = teacher_of(name, hidden, num_layers=3, norm="batch")
    with torch.no_grad():  # a new teacher has biases of zero and norms that change nothing
        for key, tensor in teacher.state_dict().items():
            if key.endswith(("bias", "running_mean", "running_var")):
                tensor.uniform_(0.5, 1.5)
    edges = edges_for(teacher, directed_graph)
    found = teacher_operations(teacher, directed_graph.x, edges)
    kinds, sizes = TINEDStudent.plan(6, hidden, 4, 3, feature_transformations(teacher)[1])
    assert len(found) == len(kinds) == {"sage": 6, "gcn": 6, "appnp": 4, "mlp": 3}[name]
    assert [(before.shape[1], after.shape[1]) for before, after in found] == sizes
    last = found[-1][1]
    if name == "gcn" and kinds[-1] == "propagate":
        last = last + teacher.convs[-1].bias  # added after the propagation
    torch.testing.assert_close(last, teacher(directed_graph.x, directed_graph.edge_index), atol=1e-5, rtol=1e-5)
    for (before, after), kind in zip(found, kinds, strict=True):
        if kind == "propagate" and name in ("sage", "gcn"):
            torch.testing.assert_close(after, edges @ before, atol=1e-5, rtol=1e-5)


def test_the_wider_side_is_transformed_first():
    kinds, sizes = TINEDStudent.plan(6, 8, 4, 2, "layers")
    assert kinds == ["propagate", "transform", "transform", "propagate"]
    assert sizes == [(6, 6), (6, 8), (8, 4), (4, 4)]


@pytest.mark.parametrize("training", [True, False])
def test_operations_of_the_student_are_those_of_its_forward(training):
    student, x, outputs = TINEDStudent(6, 8, 4, norm="batch", dropout=0.5).train(training), torch.randn(20, 6), []
    for run in (student, lambda x: list(student.operations(x))[-1][1]):
        torch.manual_seed(1)
        outputs.append(run(x))
    assert torch.equal(*outputs)
    assert torch.equal(student(x), outputs[0]) != training, "dropout is for training alone"


@pytest.mark.parametrize("name", TEACHERS)
def test_where_no_edge_joins_others_the_injected_student_is_the_teacher(name):
    """With identity propagation, it equals the teacher on a graph without edges, except for a ReLU in between."""
    teacher = teacher_of(name, 3 if name in ("sage", "gcn") else 8)
    with torch.no_grad():
        for weight, bias in feature_transformations(teacher)[0]:
            weight.abs_()
            bias.uniform_(0.0, 1.0)
    x = torch.rand(5, 6)
    alone = torch.empty(2, 0, dtype=torch.int64)
    torch.testing.assert_close(student_of(teacher)(x), teacher(x, alone), atol=1e-5, rtol=1e-5)
    with_encodings = student_of(teacher, in_channels=9)
    rows = torch.cat([x, torch.zeros(5, 3)], dim=1)
    torch.testing.assert_close(with_encodings(rows), teacher(x, alone), atol=1e-5, rtol=1e-5)


def test_what_is_not_copied_starts_at_random():
    teacher = teacher_of("sage", 3)
    student = student_of(teacher, identity=False)
    assert not torch.equal(student.layers[1].weight, torch.eye(3))
    assert torch.equal(student.layers[0].weight, teacher.convs[0].lin_l.weight)


@pytest.mark.parametrize("at_once", [2, 2**14])
@pytest.mark.parametrize("sparse", [False, True])
def test_energies_equal_a_loop_over_edges(directed_graph, sparse, at_once, monkeypatch):
    monkeypatch.setattr(tined, "_EDGES_AT_ONCE", at_once)
    x = directed_graph.x.clone()
    x[3] = 0.0
    unit = [row / row.norm() if row.norm() > 0 else row for row in x]
    expected = torch.stack([(unit[u] - unit[v]).square().sum() for u, v in directed_graph.edge_index.T.tolist()])
    rows = SparseRows(x.to_sparse_csr()) if sparse else x
    torch.testing.assert_close(edge_energies(rows, directed_graph.edge_index), expected)


@pytest.mark.parametrize(
    "energy", [lambda rows, edges: edge_energies(rows, edges).sum(), lambda rows, edges: EdgeSum(edges, 2)(rows)]
)
def test_no_gradient_flows_through_the_norms(energy):
    rows = torch.tensor([[2.0, 0.0], [0.0, 4.0]], requires_grad=True)
    energy(rows, torch.tensor([[0], [1]])).backward()
    torch.testing.assert_close(rows.grad, torch.tensor([[1.0, -1.0], [-0.5, 0.5]]))


def test_the_sum_over_edges_and_its_gradient(directed_graph):
    rows = directed_graph.x.clone()
    rows[3] = 0.0
    rows.requires_grad_()
    plain = edge_energies(rows, directed_graph.edge_index).sum()
    found = EdgeSum(directed_graph.edge_index, 40)(rows)
    torch.testing.assert_close(found, plain)
    torch.testing.assert_close(torch.autograd.grad(found, rows)[0], torch.autograd.grad(plain, rows)[0])
    for _ in range(20):
        assert EdgeSum(directed_graph.edge_index, 40)(torch.randn(6).expand(40, -1)) >= 0, "rounding is no energy"


@pytest.mark.parametrize("log", [True, False])
def test_the_loss_of_energies(log):
    found = [
        (torch.tensor(2.0), torch.tensor(1.0)),
        (torch.tensor(0.0), torch.tensor(1.0)),
        (torch.tensor(1.0), torch.tensor(3.0)),
        (torch.tensor(1.0), torch.tensor(3.0)),
        (torch.tensor(1.0), torch.tensor(3.0)),
    ]
    targets = [(4.0, 1.0), (1.0, 1.0), (1.0, 1.0), (0.0, 1.0), (1.0, 0.0)]  # an energy of zero leaves one out
    ratios = [(0.5, 0.25), (3.0, 1.0)]
    roots = [(math.sqrt(a), math.sqrt(b)) for a, b in ratios]
    expected = sum((math.log(a) - math.log(b)) ** 2 if log else (a - b) ** 2 for a, b in roots)
    assert energy_loss(found, targets, log=log).item() == pytest.approx(expected)


@pytest.fixture
def taught(split):
    torch.manual_seed(5)
    teacher = teacher_of("sage", 3)
    return teacher, outputs_from_module(teacher, split, 4)


def test_an_epoch_is_glnns_and_a_step_on_energies(split, taught):
    teacher, outputs = taught
    config = TINEDConfig(
        batch_size=100, energy_weight=0.7, injected_lr=0.1, lr=0.02, weight_decay=0.01, label_weight=0.4
    )
    ours, other = (TINEDTrainer(student_of(teacher), split, outputs, config) for _ in range(2))
    other.model.load_state_dict(ours.model.state_dict())
    loss = ours.train_epoch(0)
    optimizer = torch.optim.Adam(
        [
            {"params": [p for layer in (1, 2) for p in other.model.layers[layer].parameters()], "lr": 0.02},
            {"params": [p for layer in (0, 3) for p in other.model.layers[layer].parameters()], "lr": 0.002},
        ],
        weight_decay=0.01,
    )
    x, y, nodes = split.observed.x, split.observed.y, split.observed.train_mask
    p, model = outputs.soft_labels.softmax(-1), other.model
    edges = [(u, v) for u, v in split.observed.edge_index.T.tolist() if u != v]

    def energy(h):
        unit = h / h.norm(dim=1, keepdim=True).detach().clamp_min(1e-12)
        return sum((unit[u] - unit[v]).square().sum() for u, v in edges)

    def ratios(operations):
        return [(energy(before), energy(after)) for before, after in operations]

    def student_operations():
        h, found = x, []
        for i, layer in enumerate(model.layers):
            h = h.relu() if i else h
            found.append((h, layer(h)))
            h = found[-1][1]
        return found

    def step(loss):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    targets = ratios(teacher_operations(teacher, x, edges_for(teacher, split.observed)))
    total = step(0.4 * F.cross_entropy(model(x[nodes]), y[nodes]))
    total += step(0.6 * (p * (p.log() - model(x).log_softmax(-1))).sum(-1).mean())
    differences = [
        (after / before).sqrt().log() - (end / start).sqrt().log()
        for (before, after), (start, end) in zip(ratios(student_operations()), targets, strict=True)
        if min(before, after, start, end) > 0
    ]
    assert len(differences) >= 3
    total += step(0.7 * sum(difference.square() for difference in differences))
    assert loss == pytest.approx(total, rel=1e-4)
    for mine, plain in zip(ours.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(mine, plain, atol=1e-5, rtol=1e-4)


def test_a_share_of_the_edges_is_drawn_anew(split, taught):
    teacher, outputs = taught
    config = TINEDConfig(energy_share=0.3, energy_weight=1.0)
    ours = TINEDTrainer(student_of(teacher), split, outputs, config)
    values = {ours.energies().item() for _ in range(4)}
    assert len(values) == 4
    few = TINEDTrainer(student_of(teacher), split, outputs, TINEDConfig(energy_share=1e-9, energy_weight=1.0))
    assert few.energies().item() > 0, "at least one edge is drawn"


def test_energies_are_those_of_the_teacher_in_eval_mode(split):
    """A given teacher may be in training mode."""
    teacher = teacher_of("sage", 3, norm="batch")
    outputs, config = outputs_from_module(teacher, split, 4), TINEDConfig()
    expected = TINEDTrainer(student_of(teacher), split, outputs, config).targets
    assert TINEDTrainer(student_of(teacher.train()), split, outputs, config).targets == expected
    assert teacher.training


def test_without_a_weight_no_energy_is_computed(split, taught, monkeypatch):
    """On the features of Coauthor Physics, the energies take longer than many epochs."""
    teacher, outputs = taught
    monkeypatch.setattr(tined, "edge_energies", None)
    monkeypatch.setattr(tined, "teacher_operations", None)
    ours = TINEDTrainer(student_of(teacher), split, outputs, TINEDConfig(energy_weight=0.0))
    assert math.isfinite(ours.train_epoch(0))


@pytest.mark.parametrize("log", [True, False])
def test_the_ends_of_drawn_edges_suffice(split, taught, log):
    teacher, outputs = taught
    ours = TINEDTrainer(student_of(teacher), split, outputs, TINEDConfig(energy_share=0.1, energy_log=log))
    found = []
    for all_rows in (False, True):
        ours.normalizes_batches = all_rows
        torch.manual_seed(7)
        loss = ours.energies()
        found.append((loss, *torch.autograd.grad(loss, list(ours.model.parameters())[:-1])))
    torch.testing.assert_close(*found)
    torch.manual_seed(7)
    count = ours.edges.shape[1]
    edges = ours.edges[:, torch.randperm(count)[: int(0.1 * count)]]
    energies = [
        tuple(edge_energies(rows, edges).sum() for rows in operation)
        for operation in ours.model.operations(split.observed.x)
    ]
    torch.testing.assert_close(found[0][0], energy_loss(energies, ours.targets, log=log))


def test_propagations_start_as_the_settings_ask(split):
    outputs, seen, sizes = outputs_from_module(teacher_of("sage", 3, num_layers=3), split, 4), [], []
    student = SimpleNamespace(inject=lambda weights, *, identity: seen.append(identity))
    task = SimpleNamespace(teacher_outputs=outputs, new_student=lambda *_, **given: sizes.append(given) or student)
    for start in ("identity", "random"):
        tined.injected_student(task, TINEDConfig(propagation_init=start), None)
    assert seen == [True, False]
    assert sizes[0] == {"hidden_channels": 3, "num_layers": 3, "propagation": "layers", "features": 6}


def test_norms_of_batches_take_all_rows(split, taught):
    _, outputs = taught
    student = TINEDStudent(6, 3, 4, norm="batch")
    ours = TINEDTrainer(student, split, outputs, TINEDConfig(energy_share=0.1))
    seen = []
    student.norms[0].register_forward_hook(lambda module, rows, out: seen.append(len(out)))
    ours.energies()
    assert seen == [split.observed.num_nodes]


@pytest.fixture
def encodings(split) -> Encodings:
    rows = torch.randn(split.graph.num_nodes, 2)
    return Encodings(rows[split.observed_nodes], rows)


def test_the_plus_is_nosmogs_loss_on_it(split, taught, encodings):
    teacher, outputs = taught
    config = TINEDPlusConfig(batch_size=100, similarity_weight=0.5, adversarial_weight=0.0, energy_weight=0.0)
    ours = TINEDPlusTrainer(student_of(teacher, in_channels=8), split, outputs, config, encodings)
    nodes = torch.arange(split.observed.num_nodes)
    x = torch.cat([split.observed.x, encodings.observed], dim=1)
    logits, trace = ours.model(x, return_trace=True)
    shown = ours.projection(trace.last).relu()
    embedded = outputs.embedding("")
    similarity = (shown @ shown.T - embedded @ embedded.T).square().mean()
    expected = ours.soft_loss(logits, nodes) + 0.5 * similarity
    torch.testing.assert_close(ours.batch_loss(nodes, ours.soft_loss), expected)
    assert sum(len(group["params"]) for group in ours.parameter_groups()) == 8 + 2


def test_the_plus_compares_its_energies_with_those_of_the_features_alone(split, taught, encodings):
    """The student's first operation takes features and encodings; the teacher has no encodings."""
    teacher, outputs = taught
    config = TINEDPlusConfig(energy_weight=0.7)
    ours = TINEDPlusTrainer(student_of(teacher, in_channels=8), split, outputs, config, encodings)
    energies = [
        tuple(edge_energies(rows, ours.edges).sum() for rows in operation)
        for operation in ours.model.operations(torch.cat([split.observed.x, encodings.observed], dim=1))
    ]
    targets = TINEDTrainer(student_of(teacher), split, outputs, config).targets
    torch.testing.assert_close(ours.energies(), energy_loss(energies, targets, log=True))


def test_each_reads_its_own_section(split, taught, encodings, monkeypatch):
    changes = {"tined": {"dropout": 0.2}, "tined_plus": {"dropout": 0.3, "encoding": {"embedding_dim": 6}}}
    config, phases, asked = Config().updated(changes), [], []
    encode = lambda section: asked.append(section) or encodings  # noqa: E731
    task = DistillationTask(split, taught[1], config, 4, encode, None, Progress(None))
    monkeypatch.setattr(task, "fit", lambda *given: phases.append(given) or {})
    plain, plus = tined.train_tined(task), tined.train_tined_plus(task)
    assert (plain.student.dropout, plus.student.dropout) == (0.2, 0.3)
    assert (plain.encodings, plus.encodings) == (None, encodings)
    assert asked == [config.tined_plus.encoding]
    found = [(phase, trainer.config, network) for phase, trainer, network in phases]
    assert found == [(name, getattr(config, name), getattr(config, name)) for name in ("tined", "tined_plus")]


@pytest.mark.parametrize("teacher", ["label_propagation", "gat", "logits", "tensor", "module"])
def test_other_teachers_are_refused_before_any_training(small_graph, quick, tmp_path, teacher):
    small_graph.teacher_logits = torch.randn(60, 3)
    given = {"tensor": small_graph.teacher_logits, "module": GAT(8, 4, 3)}.get(teacher, teacher)
    with pytest.raises(ValueError, match=r"tined and tined_plus copy the layers of a teacher sage, gcn, appnp or mlp"):
        rbm.distill(small_graph, given, config=quick, methods=["mlp", "tined"], folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", TEACHERS)
def test_learns_from_each_teacher(small_graph, quick, name):
    config = quick.updated({"teacher": {"max_epochs": 40}})
    result = rbm.distill(small_graph, name, config=config, methods=["tined"], labels_alone=False, measure_latency=False)
    assert result.summary["tined"]["test_accuracy"] > 0.6
    assert len(result.student.layers) == {"sage": 4, "gcn": 4, "appnp": 3, "mlp": 2}[name]


@pytest.mark.parametrize("edges", [False, True])
def test_a_graph_without_edges_or_differences_has_no_energies(directed_graph, edges):
    if edges:
        directed_graph.x.fill_(1.0)
    else:
        directed_graph.edge_index = torch.empty(2, 0, dtype=torch.int64)
    split = split_graph(directed_graph)
    teacher = teacher_of("mlp" if edges else "sage", 3)  # of equal rows, a mean differs from them by rounding
    ours = TINEDTrainer(student_of(teacher), split, outputs_from_module(teacher, split, 4), TINEDConfig(max_epochs=2))
    assert math.isfinite(ours.train_epoch(0))
    assert outputs_from_logits(torch.randn(40, 4), split).module is None
