"""The mixture of experts with a learned router (:mod:`rbm.nn.moe`), trained with the recipe of the RbM student."""

from torch import Tensor

from rbm.config import Config, MoEConfig
from rbm.datasets.encodings import Encodings
from rbm.datasets.splits import GraphSplit
from rbm.distillation.task import DistillationTask, TrainedStudent
from rbm.distillation.trainer import StudentTrainer
from rbm.nn.moe import MoEStudent, balance_loss
from rbm.nn.students import Trace
from rbm.teachers.outputs import TeacherOutputs


class MoETrainer(StudentTrainer):
    """RbM's recipe with the load balance of the experts as the auxiliary loss."""

    def __init__(
        self,
        model: MoEStudent,
        split: GraphSplit,
        teacher_outputs: TeacherOutputs,
        config: Config,
        encodings: Encodings | None,
    ) -> None:
        super().__init__(model, split, teacher_outputs, config, encodings, config.moe)
        model.pretraining = config.moe.pretraining > 0

    def begin_epoch(self, epoch: int) -> None:
        settings = self.config.moe
        if epoch != settings.pretraining or epoch == 0:
            return
        self.model.pretraining = False
        if settings.pretrain == "first":
            self.model.clone_experts()
            self.optimizer = self.build_optimizer()

    def auxiliary_loss(self, trace: Trace, share: float) -> Tensor | None:
        settings = self.config.moe
        if not trace.routings or settings.load_balance_weight == 0:
            return None
        balance = [balance_loss(routing, settings.num_experts) for routing in trace.routings]
        return settings.load_balance_weight * sum(balance)

    def resume_at(self, epoch: int) -> None:
        if epoch > self.config.moe.pretraining:
            self.model.pretraining = False


def train_moe(task: DistillationTask) -> TrainedStudent:
    """Train a mixture with a learned router on the same inputs and targets as the RbM student."""
    config: MoEConfig = task.config.moe
    encodings = task.encode(task.config.encoding)
    student = task.new_student(MoEStudent, config, encodings, top_k=config.top_k + config.extra_experts)
    trainer = MoETrainer(student, task.split, task.teacher_outputs, task.config, encodings)
    result = task.fit("moe", trainer, config, warmup=config.pretraining)
    return TrainedStudent(student, result, encodings)
