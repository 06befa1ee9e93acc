"""The mixture of experts with a learned router (:mod:`rbm.nn.moe`), trained by the recipe of the RbM student."""

from dataclasses import asdict

from torch import Tensor

from rbm.config import Config, MoEConfig
from rbm.datasets.encodings import Encodings
from rbm.datasets.splits import GraphSplit
from rbm.distillation.task import Learned, Lesson
from rbm.distillation.trainer import StudentTraining
from rbm.nn.moe import MoEStudent, balance_loss
from rbm.nn.students import Trace
from rbm.teachers.outputs import Teaching


class MoETraining(StudentTraining):
    """RbM's recipe, with the balance of the experts as the loss inside."""

    def __init__(
        self, model: MoEStudent, split: GraphSplit, teaching: Teaching, config: Config, encodings: Encodings | None
    ) -> None:
        super().__init__(model, split, teaching, config, encodings, config.moe)
        model.pretraining = config.moe.pretrain_epochs > 0

    def begin_epoch(self, epoch: int) -> None:
        settings = self.config.moe
        if epoch != settings.pretrain_epochs or epoch == 0:
            return
        self.model.pretraining = False
        if settings.pretrain == "first":
            self.model.clone_experts()
            self.optimizer = self.build_optimizer()

    def inner_loss(self, trace: Trace, share: float) -> Tensor | None:
        settings = self.config.moe
        if not trace.routings or settings.load_balance_weight == 0:
            return None
        balance = [balance_loss(routing, settings.num_experts) for routing in trace.routings]
        return settings.load_balance_weight * sum(balance)

    def resume_at(self, epoch: int) -> None:
        if epoch > self.config.moe.pretrain_epochs:
            self.model.pretraining = False


def learn_moe(lesson: Lesson) -> Learned:
    """Train a mixture with a learned router on what the RbM student learns from."""
    config: MoEConfig = lesson.config.moe
    encodings = lesson.encode(lesson.config.encoding)
    settings = asdict(config)
    arguments = {
        "in_channels": lesson.width(encodings),
        "hidden_channels": lesson.hidden(config),
        "out_channels": lesson.classes,
        "top_k": config.top_k + config.extra_experts,
        **{name: settings[name] for name in ("num_layers", "num_experts", "norm", "dropout")},
        **{name: settings[name] for name in ("gates_over", "noise", "pretrain")},
    }
    student = lesson.start(MoEStudent, arguments)
    learner = MoETraining(student, lesson.split, lesson.teaching, lesson.config, encodings)
    result = lesson.fit("moe", learner, config, warmup=config.pretrain_epochs)
    return Learned(student, arguments, result, encodings)
