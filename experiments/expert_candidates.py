"""A plug-in with RbM students that differ by one change each. None is known to be an improvement.

    rbm --plugin experiments/expert_candidates.py experiment experiments/searches/experts_untried.yaml --root PATH

All start routing with the function that pretraining ended with, like ``start_1``, the control, which has no other
change. ``CANDIDATES`` describes each change at its name; docs/experts-evidence.md has the results.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from sklearn.isotonic import IsotonicRegression
from torch import Tensor, nn

from rbm.distillation.methods.rbm import RbMTrainer
from rbm.distillation.registry import METHODS, Method
from rbm.distillation.soft_targets import Pairs, SoftTargets, weigh_pairs
from rbm.distillation.task import DistillationTask, TrainedStudent
from rbm.nn.rbm_layer import FusedRbMLayer, Routing
from rbm.nn.sparse_rows import Features, Rows, SparseRows, as_rows, cosine_topk
from rbm.nn.students import RbMStudent
from rbm.training.metrics import accuracy
from rbm.training.selection import Accuracies

START = {"init_scale": 1.0, "init_attention": 1.0, "select_pretraining": True}
WALKS = {"encoding": {"deepwalk": True}}
RANK = 4
MAX_NORM = 0.1


class LowRankExperts:
    """Trains each expert's matrix as ``W_e = S + U_e V_e``, where ``S`` is shared and ``U_e V_e`` has a low rank.

    Low-rank corrections of one matrix are known from LoRA (Hu et al., ICLR 2022); here each expert has its own. ``U_e``
    starts at zero, so that cloned experts are unchanged. Biases have a shared and an individual part, without factors;
    the input's attention is shared by all experts. The layer keeps the sums, as with
    :class:`rbm.distillation.experts.SharedExpert`, which has the same methods.

    Args:
        layers: the mixture layers, with equal experts.
        rank: rank of the corrections.
    """

    @torch.no_grad()
    def __init__(self, layers: list[FusedRbMLayer], rank: int) -> None:
        self.layers, self.shared, self.own = layers, [], []
        for layer in layers:
            experts, outputs, inputs = layer.weight.shape
            bound = 1 / math.sqrt(inputs)
            self.shared.append({name: nn.Parameter(weights[0].clone()) for name, weights in _experts_of(layer).items()})
            self.own.append(
                {
                    "up": nn.Parameter(layer.weight.new_zeros(experts, outputs, rank)),
                    "down": nn.Parameter(layer.weight.new_empty(experts, rank, inputs).uniform_(-bound, bound)),
                    "bias": nn.Parameter(torch.zeros_like(layer.bias)),
                }
            )

    def parameters(self) -> list[nn.Parameter]:
        """What the optimiser trains instead of the experts."""
        return [parameter for part in (*self.shared, *self.own) for parameter in part.values()]

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Move the experts' gradients to the parts."""
        for layer, shared, own in zip(self.layers, self.shared, self.own, strict=True):
            for name, parameter in _experts_of(layer).items():
                shared[name].grad = parameter.grad.sum(0)
            own["up"].grad = layer.weight.grad @ own["down"].mT
            own["down"].grad = own["up"].mT @ layer.weight.grad
            own["bias"].grad = layer.bias.grad
            for parameter in _experts_of(layer).values():
                parameter.grad = None

    @torch.no_grad()
    def write_experts(self) -> None:
        """Write the sums into the layers."""
        for layer, shared, own in zip(self.layers, self.shared, self.own, strict=True):
            layer.weight.copy_(torch.baddbmm(shared["weight"], own["up"], own["down"]))
            layer.bias.copy_(shared["bias"] + own["bias"])
            if layer.attention is not None:
                layer.attention.copy_(shared["attention"].expand_as(layer.attention))

    def state(self) -> dict[str, Any]:
        """State for :meth:`restore`."""
        return {"parts": [parameter.detach() for parameter in self.parameters()]}

    @torch.no_grad()
    def restore(self, state: dict[str, Any]) -> None:
        """Restore the parts from :meth:`state`."""
        for parameter, saved in zip(self.parameters(), state["parts"], strict=True):
            parameter.copy_(saved)


def _experts_of(layer: FusedRbMLayer) -> dict[str, nn.Parameter]:
    found = {name: getattr(layer, name) for name in ("weight", "bias", "attention")}
    return {name: parameter for name, parameter in found.items() if parameter is not None}


class LowRankTrainer(RbMTrainer):
    """From the first routed epoch on, experts are one matrix plus corrections of rank :data:`RANK`."""

    def parameter_groups(self) -> list[dict[str, Any]]:
        if self.model.pretraining:
            return super().parameter_groups()
        layers = list(self.model.layers)
        others = self.parameters_without([parameter for layer in layers for parameter in _experts_of(layer).values()])
        self.shared_expert = LowRankExperts(layers, RANK)
        return [{"params": [*others, *self.shared_expert.parameters()]}]


class ApartLayer(FusedRbMLayer):
    """A layer whose router sees some columns of a row and whose experts see the others, with zeros elsewhere.

    Attributes:
        encoded: number of columns, at the end, that are encodings.
        routed_by: ``encodings`` (experts see the features) or ``features`` (experts see the encodings).
    """

    encoded: int
    routed_by: str

    def for_router(self, h: Features) -> Rows:
        """Rows ``[B, in_features]`` as the router sees them."""
        return _only(as_rows(h), self.encoded, encodings=self.routed_by == "encodings")

    def for_experts(self, h: Features) -> Rows:
        """Rows ``[B, in_features]`` as the experts see them."""
        return _only(as_rows(h), self.encoded, encodings=self.routed_by == "features")

    def forward(self, h: Features, *, return_routing: bool = False):
        routed = self.for_router(h)
        records = self.training and self.track_memory
        if records:
            self.update_memory()
        routing = cosine_topk(routed, self.memory.detach(), self.top_k, temperature=self.gate_temperature)
        gates, experts, _ = routing
        if records:
            self._record(routed, gates, experts)
        y = self._combine(self.for_experts(h), gates.detach() if self.detach_gates else gates, experts)
        return (y, Routing(*routing)) if return_routing else y

    def expert_forward(self, h: Features, expert: int = 0) -> Tensor:
        return super().expert_forward(self.for_experts(h), expert)


def _only(rows: Rows, encoded: int, *, encodings: bool) -> Rows:
    """Rows with zeros in place of their features, or of their ``encoded`` last columns."""
    if isinstance(rows, SparseRows):
        if encodings:
            return rows._with(values=torch.zeros_like(rows.values))
        return rows._with(dense=torch.zeros_like(rows.dense))
    width = rows.shape[-1] - encoded
    mask = (torch.arange(rows.shape[-1], device=rows.device) >= width) == encodings
    return rows * mask


class ApartStudent(RbMStudent):
    """An RbM student whose first layer is an :class:`ApartLayer`; deeper layers route their hidden rows as usual.

    Args:
        encoded, routed_by: see :class:`ApartLayer`. The other arguments are those of :class:`rbm.RbMStudent`.
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        *,
        encoded: int,
        routed_by: str,
        **options,
    ) -> None:
        super().__init__(in_channels, hidden_channels, out_channels, **options)
        whole = self.layers[0]
        of_stack = ("num_layers", "norm", "dropout_first_layer")
        of_layer = {name: value for name, value in options.items() if name not in of_stack}
        first = ApartLayer(in_channels, whole.out_features, **of_layer | {"dropout": whole.dropout})
        first.load_state_dict(whole.state_dict())
        first.encoded, first.routed_by = encoded, routed_by
        self.layers[0] = first

    def router_inputs(self, x: Features) -> Iterator[tuple[nn.Module, Rows]]:
        for layer, rows in super().router_inputs(x):
            yield layer, layer.for_router(rows) if isinstance(layer, ApartLayer) else rows


class FadingLayer(FusedRbMLayer):
    """A layer whose gates fade to zero where a row changes its experts, so that its output is continuous in the row.

    The gates of the ``k`` nearest experts are ``exp(c_j / T) - exp(c_{k+1} / T)``, divided by their sum, where
    ``c_{k+1}`` is the cosine of the next expert. With the softmax, an expert has at least a ``k``-th of the nearest
    one's gate whenever cosines are alike, and a row that changes it gets an output that differs by as much.
    """

    def forward(self, h: Features, *, return_routing: bool = False):
        return self._forward(as_rows(h), return_routing)

    def network_layer(self) -> None:
        return None

    def _nearest(self, rows: Rows) -> Routing:
        if self.top_k == self.num_experts:
            return super()._nearest(rows)
        gates, experts, cosines = cosine_topk(
            rows, self.memory.detach(), self.top_k + 1, temperature=self.gate_temperature
        )
        nearest, next_ = gates.split([self.top_k, 1], dim=-1)
        faded = nearest - next_ + torch.finfo(gates.dtype).eps  # some gates remain if all cosines are equal
        kept = (each[..., : self.top_k].contiguous() for each in (experts, cosines))
        return Routing(faded / faded.sum(-1, keepdim=True), *kept)


class FadingStudent(RbMStudent):
    """An RbM student of :class:`FadingLayer`."""

    layer_type = FadingLayer


class AgreementTrainer(RbMTrainer):
    """Selects epochs and stops training by the student's agreement with the teacher instead of its accuracy.

    Agreement is measured on the validation nodes, which are therefore excluded from the soft-label loss: on nodes that
    are taught, agreement would only show how long the training was.
    """

    agreement = 0.0

    def update_targets(self) -> None:
        before = self.targets
        super().update_targets()
        if self.targets is not before:
            teach = (~self.split.observed.val_mask).to(self.targets.mass.dtype)
            self.targets = SoftTargets(self.targets.mass * teach[:, None], self.targets.constant * teach)

    def on_epoch_end(self, logits: Tensor) -> None:
        super().on_epoch_end(logits)
        is_validation = self.split.observed.val_mask
        self.agreement = accuracy(logits[is_validation], self.teacher_outputs.soft_labels[is_validation].argmax(-1))

    def evaluate(self) -> Accuracies:
        return super().evaluate()._replace(val=self.agreement)

    def accuracies(self) -> Accuracies:
        """Accuracies of the current model, in place of agreement."""
        return super().evaluate()


class CutTrainer(RbMTrainer):
    """Drops soft labels that are more likely wrong than right, for their node and for its neighbours."""

    def update_targets(self) -> None:
        if self.pairs is not None:
            return
        kept = (chance_of_being_right(self.teacher_outputs.soft_labels, self.split.observed) >= 0.5).float()
        trust = self.reliability.probabilities() * kept if self.reliability else None
        self.pairs = weigh_pairs(self.graph, trust, mean=self.config.distill.mean, draw=self.config.distill.draw)
        neighbor_targets = SoftTargets.of(self.pairs._replace(own=0.0), self.graph, self.teacher_logs)
        no_neighbors = torch.zeros_like(self.pairs.neighbors)
        own = SoftTargets.of(Pairs(self.pairs.own, no_neighbors), self.graph, self.teacher_logs)
        self.targets = SoftTargets(
            neighbor_targets.mass + own.mass * kept[:, None], neighbor_targets.constant + own.constant * kept
        )


def chance_of_being_right(soft_labels: Tensor, observed) -> Tensor:
    """Probability that the teacher is right, by its confidence, ``[N_observed]`` in [0, 1].

    Isotonic regression (Zadrozny and Elkan, KDD 2002) on the validation nodes that select the epoch, whose labels the
    teacher has not learned. ``soft_labels`` are logits ``[N_observed, C]``.
    """
    confidence, answers = (values.cpu() for values in soft_labels.softmax(-1).max(-1))
    held_out = observed.val_mask.cpu()
    right = (answers == observed.y.cpu())[held_out].double()
    fitted = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip").fit(confidence[held_out].numpy(), right.numpy())
    return torch.from_numpy(fitted.predict(confidence.numpy())).float().to(soft_labels.device)


def smoothed(soft_labels: Tensor, observed) -> Tensor:
    """Logits of soft labels mixed with the uniform distribution, depending on how likely they are wrong.

    ``q p + (1 - q) / C`` with :func:`chance_of_being_right`: label smoothing with a weight per node.
    """
    chance = chance_of_being_right(soft_labels, observed)[:, None]
    return (chance * soft_labels.softmax(-1) + (1 - chance) / soft_labels.shape[1]).clamp_min(1e-12).log()


class MaximumTrainer(RbMTrainer):
    """AMSGrad (Reddi, Kale and Kumar, ICLR 2018): a step is divided by the largest second moment so far. With Adam, a
    moment that has shrunk during epochs of small gradients lets one large gradient throw the parameters far away.
    """

    def build_optimizer(self) -> torch.optim.Optimizer:
        groups = [*self.parameter_groups(), *self.further_groups()]
        return torch.optim.Adam(
            groups, lr=self.network.lr, weight_decay=self.network.weight_decay, amsgrad=True, fused=True
        )


class ClippedTrainer(RbMTrainer):
    """The gradient of a routed step has a norm of at most :data:`MAX_NORM`."""

    def optimizer_step(self) -> None:
        if not self.model.pretraining:
            trained = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
            nn.utils.clip_grad_norm_(trained, MAX_NORM)
        super().optimizer_step()


@dataclass(frozen=True)
class Candidate:
    """What a student changes: settings, trainer, columns of the router, or soft labels."""

    about: str
    changes: dict[str, Any] = field(default_factory=dict)
    trainer: type[RbMTrainer] = RbMTrainer
    student: type[RbMStudent] = RbMStudent
    routed_by: str = ""
    smooths: bool = False


CANDIDATES = {
    "start_1": Candidate("RbM, start 1"),
    "low_rank": Candidate(f"one matrix, corrections of rank {RANK}", trainer=LowRankTrainer),
    "agreement": Candidate("chosen by agreement with the teacher", trainer=AgreementTrainer),
    "smoothed": Candidate("soft labels smoothed where the teacher is often wrong", smooths=True),
    "cut": Candidate("soft labels cut where the teacher is more often wrong", trainer=CutTrainer),
    "fading": Candidate("gates that fade to zero where a row changes its experts", student=FadingStudent),
    "amsgrad": Candidate("steps divided by the largest second moment", trainer=MaximumTrainer),
    "clipped": Candidate(f"gradients of a norm up to {MAX_NORM}", trainer=ClippedTrainer),
    "walks": Candidate("random walks beside features", WALKS),
    "route_by_encodings": Candidate("router sees encodings, experts features", WALKS, routed_by="encodings"),
    "route_by_features": Candidate("router sees features, experts encodings", WALKS, routed_by="features"),
}


def train(name: str, task: DistillationTask) -> TrainedStudent:
    """Train a candidate's student."""
    candidate = CANDIDATES[name]
    config = task.config.updated({"rbm": START}).updated(candidate.changes)
    encodings, outputs = task.encode(config.encoding), task.teacher_outputs
    kind, further = candidate.student, {}
    if candidate.routed_by:
        kind, further = ApartStudent, {"encoded": encodings.full.shape[1], "routed_by": candidate.routed_by}
    if candidate.smooths:
        outputs = replace(outputs, soft_labels=smoothed(outputs.soft_labels, task.split.observed))
    student = task.new_student(kind, config.rbm, encodings, **further)
    trainer = candidate.trainer(student, task.split, outputs, config, encodings)
    result = task.fit(name, trainer, config.rbm, warmup=config.rbm.pretraining, select_warmup=True)
    if isinstance(trainer, AgreementTrainer):
        result = result | {"val_accuracy": trainer.accuracies().val}
    for buffer in student.buffers():
        buffer.requires_grad_(False)
    return TrainedStudent(student, result, encodings)


for name, candidate in CANDIDATES.items():
    sections = ("teacher", "rbm", "distill", "reliability", "encoding")
    METHODS[name] = Method(candidate.about, sections, lambda task, name=name: train(name, task))
