r"""TINED: an MLP with one layer per operation of the teacher (Zhou et al., GNNs-to-MLPs by Teacher Injection and
Dirichlet Energy Distillation, ICML 2025).

A layer of the teacher is a feature transformation (FT, a linear map) and a propagation along edges (GP). FT comes first
if its input is wider than its output, GP otherwise. The student has a linear layer for each. *Teacher injection* copies
the weights of FT, whose learning rate is ``injected_lr`` times that of the rest. Layers for GP start as the identity or
at random. With the Dirichlet energy of rows on the edges, and the root of the ratio of an operation's output energy to
its input energy,

.. math:: E(H) = \frac{1}{N} \sum_{(u, v)} \Big\| \frac{h_u}{\|h_u\|} - \frac{h_v}{\|h_v\|} \Big\|^2, \quad
    R = \sqrt{\frac{E(H_{out})}{E(H_{in})}}

*Dirichlet energy distillation* trains each layer to match the ratio of its operation, in addition to labels and soft
labels:

.. math:: L = \lambda \, CE + (1 - \lambda) \, KL + \beta \sum_{l} (\log R_l - \log R_l^{teacher})^2

Labels and soft labels use GLNN's two passes. The energies have a separate step after them, as in the released code. No
gradient flows through the norms. *TINED+* adds the parts of NOSMOG (:mod:`rbm.distillation.methods.nosmog`): random
walk coordinates as inputs, adversarial features and similarity to the teacher's hidden rows.

Differences from the released code (scottjiao/TINED_ICML25): the best epoch is that of the best validation accuracy, not
of the lowest validation loss, and patience counts from the first epoch, whereas the code does not stop in the first
half of the epochs. An operation with zero energy before or after it is ignored, whereas the code takes one for
the logarithm of the student's squared ratio. Batches are shuffled and of equal size, so that an epoch leaves out the
remaining nodes; in the code, the last batch is smaller. Teachers can be ``sage``, ``gcn``, ``appnp`` and ``mlp``. The
student always has the width and the number of layers of the teacher, whatever ``inflate`` is.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch_geometric.utils import remove_self_loops

from rbm.config import TINEDConfig
from rbm.datasets.encodings import Encodings
from rbm.datasets.splits import GraphSplit
from rbm.distillation.methods.glnn import GLNNTrainer
from rbm.distillation.methods.nosmog import NOSMOGTrainer
from rbm.distillation.task import DistillationTask, TrainedStudent
from rbm.nn.evaluation import evaluating
from rbm.nn.sparse_rows import Rows, SparseRows, in_single_precision, to_dense
from rbm.nn.tined import TINEDStudent
from rbm.teachers import APPNP, GCN, MLP, GraphSAGE, Teacher, edges_for
from rbm.teachers.aggregation import sparse_adjacency
from rbm.teachers.outputs import TeacherOutputs
from rbm.utils.precision import wide

_EDGES_AT_ONCE, _NUMBERS_AT_ONCE = 2**14, 2**22


def check_layers(teacher: type[nn.Module] | None) -> None:
    """Raise ValueError unless the layers of teachers of this class are known; None stands for logits alone."""
    if teacher is None or not issubclass(teacher, (GraphSAGE, GCN, MLP)):
        what = "logits alone" if teacher is None else f"a {teacher.__name__}"
        raise ValueError(
            "methods: tined and tined_plus copy the layers of a teacher sage, gcn, appnp or mlp of this package, and"
            f" this one is {what}; name one of those, or leave these methods out"
        )


def feature_transformations(teacher: nn.Module | None) -> tuple[list[tuple[Tensor, Tensor]], str]:
    """Weight and bias of each layer of a teacher, and where it propagates: ``layers``, ``end`` or ``none``.

    Raises:
        ValueError: see :func:`check_layers`.
    """
    check_layers(None if teacher is None else type(teacher))
    if isinstance(teacher, GraphSAGE):
        return [(conv.lin_l.weight, conv.lin_l.bias) for conv in teacher.convs], "layers"
    if isinstance(teacher, GCN):
        return [(conv.lin.weight, conv.bias) for conv in teacher.convs], "layers"
    place = "end" if isinstance(teacher, APPNP) else "none"
    return [(conv.weight, conv.bias) for conv in teacher.convs], place


@torch.no_grad()
def teacher_operations(teacher: Teacher, x: Tensor, edges: Any) -> list[tuple[Tensor, Tensor]]:
    """Input and output of every transformation and propagation, in the order of :meth:`TINEDStudent.plan`.

    Args:
        teacher: teacher in eval mode.
        x: dense ``[N, F]``.
        edges: result of :func:`rbm.teachers.edges_for`.
    """
    weights, place = feature_transformations(teacher)
    found, h = [], x
    for layer, (weight, bias) in enumerate(weights):
        if place != "layers":
            found.append((h, F.linear(h, weight, bias)))
        elif weight.shape[1] > weight.shape[0]:
            transformed = F.linear(h, weight, bias if isinstance(teacher, GraphSAGE) else None)
            found += [(h, transformed), (transformed, edges @ transformed)]
        else:
            propagated = edges @ h
            found += [(h, propagated), (propagated, F.linear(propagated, weight, bias))]
        if layer < len(weights) - 1:
            _, h = teacher.hidden(layer, teacher.convs[layer](h, edges))
    if place == "end":
        logits = found[-1][1]
        found.append((logits, teacher.propagate(logits, edges)))
    return found


def edge_energies(rows: Rows, edges: Tensor) -> Tensor:
    """Squared distance of the unit rows at the ends of each edge of ``[2, M]``, ``[M]``; rows of zeros stay zero."""
    if isinstance(rows, SparseRows):

        def energies(pairs: Tensor) -> Tensor:
            return _distances(*(rows[ends].to_dense() for ends in pairs))
    else:
        norms = rows.norm(dim=1, keepdim=True).detach()
        unit = rows / torch.where(norms > 0, norms, 1.0)

        def energies(pairs: Tensor) -> Tensor:
            return (unit[pairs[0]] - unit[pairs[1]]).square().sum(-1)

    # All differences together have one row per edge: 16 GB on the features of Coauthor Physics.
    at_once = max(1, min(_EDGES_AT_ONCE, _NUMBERS_AT_ONCE // rows.shape[1]))
    return torch.cat([energies(pairs) for pairs in edges.split(at_once, dim=1)])


class EdgeSum:
    """Differentiable sum of :func:`edge_energies` over edges ``[2, M]`` of ``N`` nodes by one sparse product.

    With the degrees ``d`` and the symmetric matrix ``S`` of the edges in both directions, it is the sum over columns
    ``x`` of the unit rows of ``x^T (diag(d) - S) x``. Gathering rows along edges gives the same sum, but its derivative
    is many times slower.
    """

    def __init__(self, edges: Tensor, num_nodes: int) -> None:
        both = torch.cat([edges, edges.flip(0)], dim=1)
        ones = torch.ones(both.shape[1], device=edges.device)
        self.degrees = torch.bincount(both[1], minlength=num_nodes).float()[:, None]
        self.matrix = sparse_adjacency(both, ones, num_nodes)

    def __call__(self, rows: Tensor) -> Tensor:
        return _EdgeSum.apply(rows, self.degrees, self.matrix).clamp_min(0)


class _EdgeSum(torch.autograd.Function):
    """The forward pass also yields the derivative: ``2 (diag(d) - S) x`` divided by the norms of the rows."""

    @staticmethod
    def forward(ctx, rows: Tensor, degrees: Tensor, matrix: Tensor) -> Tensor:
        norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        norms = torch.where(norms > 0, norms, 1.0)
        unit = rows / norms
        slope = (matrix @ unit).neg_().addcmul_(degrees, unit)
        total = torch.linalg.vecdot(unit, slope).sum()
        ctx.save_for_backward(slope.div_(norms))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        return 2 * gradient * ctx.saved_tensors[0], None, None


def _distances(first: Tensor, second: Tensor) -> Tensor:
    return (F.normalize(first) - F.normalize(second)).square().sum(-1)


def energy_loss(student: list[tuple[Tensor, Tensor]], teacher: list[tuple[float, float]], *, log: bool) -> Tensor:
    """Sum over operations of the squared difference of the roots of energy ratios, or of their logarithms.

    Args:
        student: energy before and after each operation; scalars.
        teacher: likewise. Operations with an energy of zero, in either, are ignored.
        log: compare logarithms.
    """
    total = student[0][1].new_zeros(())
    for (before, after), (base, target) in zip(student, teacher, strict=True):
        if min(before.item(), after.item(), base, target) > 0:
            ours, theirs = (after / before).sqrt(), after.new_tensor(target / base).sqrt()
            total = total + ((ours.log() - theirs.log()) if log else (ours - theirs)).square()
    return total


class _EnergyDistillation:
    """Mixin that adds the step on energies to the epochs of the next base class, a trainer."""

    def __init__(
        self,
        model: TINEDStudent,
        split: GraphSplit,
        teacher_outputs: TeacherOutputs,
        config: TINEDConfig,
        encodings: Encodings | None = None,
    ) -> None:
        super().__init__(model, split, teacher_outputs, config, encodings)
        self.edges, _ = remove_self_loops(split.observed.edge_index)
        self.has_energy_step = config.energy_weight > 0 and self.edges.shape[1] > 0
        if not self.has_energy_step:
            return
        self.num_nodes = split.observed.num_nodes
        self.whole = EdgeSum(self.edges, self.num_nodes)
        # Without BatchNorm, a row's outputs do not depend on other rows, and the ends of the drawn edges suffice.
        self.normalizes_batches = any(isinstance(norm, nn.BatchNorm1d) for norm in model.norms)
        self.input_energies = edge_energies(in_single_precision(self.observed_x), self.edges)
        module, observed = teacher_outputs.module, split.observed
        x = in_single_precision(observed.x)
        with evaluating(module):
            operations = teacher_operations(module, to_dense(x), edges_for(module, observed))
        self.targets = [
            tuple(float(edge_energies(rows, self.edges).sum()) for rows in operation) for operation in operations
        ]

    def train_epoch(self, epoch: int) -> float:
        total = super().train_epoch(epoch)
        if not self.has_energy_step:
            return total
        self.optimizer.zero_grad()
        loss = self.config.energy_weight * self.energies()
        if loss.requires_grad:
            loss.backward()
            self.optimizer.step()
        return total + loss.item()

    def energies(self) -> Tensor:
        """The loss on the energies of all edges, or of a newly drawn share of them."""
        count, rows = self.edges.shape[1], self.observed_x
        drawn = torch.arange(count, device=self.edges.device)
        if self.config.energy_share < 1:
            drawn = torch.randperm(count, device=self.edges.device)[: max(1, int(self.config.energy_share * count))]
        if len(drawn) == count:
            energy = self.whole
        elif self.normalizes_batches:
            energy = EdgeSum(self.edges[:, drawn], self.num_nodes)
        else:
            nodes, edges = self.edges[:, drawn].unique(return_inverse=True)
            energy, rows = EdgeSum(edges, len(nodes)), rows[nodes]
        found: list[tuple[Tensor, Tensor]] = []
        for before, after in self.forward(list, self.model.operations(in_single_precision(rows))):
            known = energy(wide(before)) if found else self.input_energies[drawn].sum()
            found.append((known, energy(wide(after))))
        return energy_loss(found, self.targets, log=self.config.energy_log)

    def parameter_groups(self) -> list[dict[str, Any]]:
        injected = [parameter for layer in self.model.transformations() for parameter in layer.parameters()]
        return [
            {"params": self.parameters_without(injected)},
            {"params": injected, "lr": self.config.lr * self.config.injected_lr},
        ]


class TINEDTrainer(_EnergyDistillation, GLNNTrainer):
    """GLNN's two passes, then a step on the energies."""


class TINEDPlusTrainer(_EnergyDistillation, NOSMOGTrainer):
    """NOSMOG's two passes, then a step on the energies."""


def injected_student(task: DistillationTask, config: TINEDConfig, encodings: Encodings | None) -> TINEDStudent:
    """A student with the shape and the transformations of the task's teacher."""
    weights, place = feature_transformations(task.teacher_outputs.module)
    student = task.new_student(
        TINEDStudent,
        config,
        encodings,
        hidden_channels=weights[0][0].shape[0],
        num_layers=len(weights),
        propagation=place,
        features=weights[0][0].shape[1],
    )
    student.inject(weights, identity=config.propagation_init == "identity")
    return student


def train_tined(task: DistillationTask) -> TrainedStudent:
    """Train TINED on features only."""
    config = task.config.tined
    student = injected_student(task, config, None)
    trainer = TINEDTrainer(student, task.split, task.teacher_outputs, config)
    return TrainedStudent(student, task.fit("tined", trainer, config), None)


def train_tined_plus(task: DistillationTask) -> TrainedStudent:
    """Train TINED+ on features and positions."""
    config = task.config.tined_plus
    encodings = task.encode(config.encoding)
    student = injected_student(task, config, encodings)
    trainer = TINEDPlusTrainer(student, task.split, task.teacher_outputs, config, encodings)
    return TrainedStudent(student, task.fit("tined_plus", trainer, config), encodings)
