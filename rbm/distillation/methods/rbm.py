"""Routing-by-Memory: pretraining of one expert, then training of the whole mixture (section 4.3 of the paper)."""

from typing import Any

import torch
from torch import Tensor

from rbm.config import Config, RbMConfig
from rbm.datasets.encodings import Encodings
from rbm.datasets.splits import GraphSplit
from rbm.distillation.experts import SharedExpert, expert_parameters, pull_together
from rbm.distillation.task import DistillationTask, TrainedStudent
from rbm.distillation.trainer import StudentTrainer
from rbm.nn import losses
from rbm.nn.dead_experts import reset_dead_experts
from rbm.nn.kmeans_init import group_nodes, initialize_memory, sample_inputs
from rbm.nn.students import MLPStudent, RbMStudent, Trace
from rbm.teachers.outputs import TeacherOutputs
from rbm.training.selection import Accuracies
from rbm.utils.distributed import broadcast_from_rank0


class RbMTrainer(StudentTrainer):
    """Trainer of an RbM student. Pretraining only trains the first expert of each layer. Then the experts are cloned,
    the memory vectors are initialised by K-means, the optimiser is reset, and routing begins (paper, section 4.3).

    If validation selects an epoch of pretraining, the student consists of clones of the expert of that epoch. Gates sum
    to one, so the mixture computes the same as this expert.

    Attributes:
        shared_expert: splits the experts from the first routed epoch on, if ``rbm.shared_expert`` is set.
        best_pretraining: validation accuracy and model state of the best epoch of pretraining, kept until routing
            begins if ``rbm.route_from_best`` is set.
        groups: group of each observed node, int64 ``[N_observed]``, or None if ``rbm.memory_init`` is ``kmeans``.
    """

    shared_expert: SharedExpert | None = None
    best_pretraining: tuple[float, dict[str, Tensor]] | None = None

    def __init__(
        self,
        model: RbMStudent,
        split: GraphSplit,
        teacher_outputs: TeacherOutputs,
        config: Config,
        encodings: Encodings | None = None,
    ) -> None:
        super().__init__(model, split, teacher_outputs, config, encodings, config.rbm)
        model.pretraining = True
        self.groups = self._groups()

    def begin_epoch(self, epoch: int) -> None:
        routed, interval = epoch - self.config.rbm.pretraining, self.config.rbm.reset_dead_experts
        if routed == 0:
            self._begin_routing()
        elif routed > 0 and interval and routed % interval == 0:
            self._reset_dead_experts()
        self.model.set_decay(annealed_decay(self.config.rbm, epoch))

    def auxiliary_loss(self, trace: Trace, share: float) -> Tensor | float | None:
        if not trace.routings:
            return None
        rbm = self.config.rbm
        return losses.embedding_loss(
            trace.routings,
            self.model.memories(),
            commitment_weight=rbm.commitment_weight * share,
            self_similarity_weight=rbm.self_similarity_weight,
            load_balance_weight=rbm.load_balance_weight,
        )

    def optimizer_step(self) -> None:
        if self.shared_expert:
            self.shared_expert.take_gradients()
        super().optimizer_step()
        if self.shared_expert:
            self.shared_expert.write_experts()
        if not self.model.pretraining:
            pull_together(expert_parameters(self.model.layers), self.config.rbm.expert_pull)

    def evaluate(self) -> Accuracies:
        found = super().evaluate()
        remembers = self.config.rbm.route_from_best and self.model.pretraining
        # Of equal epochs the later one counts, as in the selection of training.
        if remembers and (self.best_pretraining is None or found.val >= self.best_pretraining[0]):
            state = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
            self.best_pretraining = (found.val, state)
        return found

    def freeze_memory(self, frozen: bool) -> None:
        self.model.set_track_memory(not frozen)

    def resume_at(self, epoch: int) -> None:
        # The epoch determines the optimiser's groups and the routing switch; states are loaded afterwards.
        if epoch > self.config.rbm.pretraining:
            self.model.pretraining = False

    def state(self) -> dict[str, Any]:
        extra_state = {
            "shared_expert": self.shared_expert.state() if self.shared_expert else None,
            "best_pretraining": self.best_pretraining,
        }
        return super().state() | {name: value for name, value in extra_state.items() if value is not None}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        if self.shared_expert:
            self.shared_expert.restore(state["shared_expert"])
        self.best_pretraining = state.get("best_pretraining")

    @torch.no_grad()
    def at_best_epoch(self, epoch: int) -> None:
        if epoch >= self.config.rbm.pretraining:
            return
        for layer in self.model.layers:
            layer.log_scale.zero_()
            if layer.attention is not None:
                layer.attention.zero_()
        self.model.clone_experts()
        self._place_memory()

    def _begin_routing(self) -> None:
        rbm = self.config.rbm
        if self.best_pretraining is not None:
            self.model.load_state_dict(self.best_pretraining[1])
            self.best_pretraining = None
        if rbm.pretraining > 0:
            self.model.clone_experts()
        self.model.pretraining = False
        self._place_memory()
        if rbm.reset_optimizer:
            self.optimizer = self.build_optimizer()

    @torch.no_grad()
    def _reset_dead_experts(self) -> None:
        """:func:`rbm.reset_dead_experts` with the observed nodes. Rank 0 computes the result for all ranks."""
        for layer in self.model.layers:
            layer.update_memory()
        experts = [tensor for layer in self.model.layers for tensor in (layer.memory, *layer.expert_parameters())]

        def renewed() -> list[Tensor] | None:
            max_rows = self.config.rbm.kmeans_max_rows
            rows = sample_inputs(self.observed_x, max_rows, self.config.seed) if max_rows else self.observed_x
            return [tensor.detach() for tensor in experts] if reset_dead_experts(self.model, rows) else None

        if (found := broadcast_from_rank0(renewed)) is None:
            return
        for tensor, new in zip(experts, found, strict=True):
            tensor.copy_(new)
        if self.shared_expert:
            self.shared_expert.read_residuals()

    def _place_memory(self) -> None:
        for memory, placed in zip(self.model.memories(), broadcast_from_rank0(self._centers), strict=True):
            memory.detach().copy_(placed)

    def _centers(self) -> list[Tensor]:
        max_rows = self.config.rbm.kmeans_max_rows or None
        initialize_memory(self.model, self.observed_x, seed=self.config.seed, max_rows=max_rows, groups=self.groups)
        return [memory.detach() for memory in self.model.memories()]

    def _groups(self) -> Tensor | None:
        """Groups of nodes, ``[N_observed]``, whose mean directions initialise the memory; None for K-means."""
        rbm = self.config.rbm
        if rbm.memory_init == "kmeans":
            return None
        if rbm.memory_init == "classes":
            rows = self.teacher_outputs.soft_labels.softmax(-1)
        else:
            rows = self.teacher_outputs.embedding("rbm.memory_init is teacher")
        return group_nodes(rows, rbm.num_experts, seed=self.config.seed)

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Parameter groups with one for the routed experts; with ``rbm.shared_expert``, the experts are split first."""
        rbm = self.config.rbm
        if self.model.pretraining or not (rbm.shared_expert or rbm.routed_lr != 1):
            return super().parameter_groups()
        experts, lr = expert_parameters(self.model.layers), rbm.lr * rbm.routed_lr
        others = self.parameters_without(experts)
        if not rbm.shared_expert:
            return [{"params": others}, {"params": experts, "lr": lr}]
        self.shared_expert = SharedExpert(experts)
        return [
            {"params": [*others, *self.shared_expert.shared]},
            {"params": self.shared_expert.residuals, "lr": lr, "weight_decay": rbm.residual_weight_decay},
        ]

    def further_groups(self) -> list[dict[str, Any]]:
        rbm = self.config.rbm
        if rbm.self_similarity_weight == 0:
            return []
        # Only the self-similarity loss moves memory vectors by gradient. Adam rescales that gradient, so weight decay
        # alone would steer the memory: it is off unless the configuration sets it.
        memories = [memory.requires_grad_() for memory in self.model.memories()]
        return [{"params": memories, "weight_decay": rbm.weight_decay if rbm.memory_weight_decay else 0.0}]


def train_rbm(task: DistillationTask) -> TrainedStudent:
    """Train the student: ``rbm.pretrain_epochs`` epochs without routing, then all experts."""
    config = task.config
    encodings = task.encode(config.encoding)
    student = task.new_student(RbMStudent, config.rbm, encodings)
    if config.rbm.start_as_mlp:
        start_from(task.new_student(MLPStudent, config.rbm, encodings), student)
    trainer = RbMTrainer(student, task.split, task.teacher_outputs, config, encodings)
    warmup = config.rbm.pretraining
    result = task.fit("rbm", trainer, config.rbm, warmup=warmup, select_warmup=config.rbm.select_pretraining)
    if result["best_epoch"] < warmup:
        task.progress.say("rbm: at validation no routed epoch is as good as its pretraining; its experts are alike")
    for buffer in student.buffers():
        buffer.requires_grad_(False)
    return TrainedStudent(student, result, encodings)


@torch.no_grad()
def start_from(mlp: MLPStudent, student: RbMStudent) -> None:
    """Copy the layers of an MLP of the same shape to the experts that pretraining trains, the first of each layer."""
    for layer, linear in zip(student.layers, mlp.layers, strict=True):
        layer.weight[0].copy_(linear.weight)
        layer.bias[0].copy_(linear.bias)


def annealed_decay(config: RbMConfig, epoch: int) -> float:
    """Decay of the memory at epoch ``t``: ``decay + (1 - decay) * delta * t / T``, at most one (paper, Eq. 14)."""
    return min(1.0, config.decay + (1 - config.decay) * config.anneal_delta * epoch / config.anneal_steps)
