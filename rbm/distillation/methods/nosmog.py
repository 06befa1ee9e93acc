r"""NOSMOG: GLNN with positions, robustness and similarity (Tian et al., Learning MLPs on Graphs, ICLR 2023).

.. math:: L = L_{target}(x) + w_a L_{target}(x + \delta) + w_s \| E E^T - T T^T \|^2 / B^2

The input is the features and DeepWalk coordinates, ``delta`` is a perturbation by projected gradient ascent, ``E`` a
projection of the student's last hidden layer and ``T`` the teacher's hidden rows *of the same nodes* (the released code
mixes up rows in the inductive setting). Both of GLNN's passes use this loss; the label pass has a weight of zero
by default.
"""

from torch import Tensor

from rbm.config import NOSMOGConfig
from rbm.datasets.encodings import Encodings
from rbm.datasets.splits import GraphSplit
from rbm.distillation.adversarial import pgd_perturb
from rbm.distillation.methods.glnn import GLNNTrainer, NodeLoss
from rbm.distillation.task import DistillationTask, TrainedStudent
from rbm.nn.sparse_rows import to_dense
from rbm.nn.students import MLPStudent, width_of_last
from rbm.teachers.outputs import TeacherOutputs


class NOSMOGTrainer(GLNNTrainer):
    """GLNN's schedule with NOSMOG's loss."""

    def __init__(
        self,
        model: MLPStudent,
        split: GraphSplit,
        teacher_outputs: TeacherOutputs,
        config: NOSMOGConfig,
        encodings: Encodings | None = None,
    ) -> None:
        super().__init__(model, split, teacher_outputs, config, encodings)
        if config.similarity_weight > 0:
            self.compare_with_teacher(teacher_outputs, width_of_last(model), "nosmog.similarity_weight is set")

    def batch_loss(self, nodes: Tensor, target: NodeLoss) -> Tensor:
        rows, config = self.observed_x[nodes], self.config
        logits, trace = self.forward(self.model, rows, return_trace=True)
        loss = target(logits, nodes)
        if config.adversarial_weight > 0:
            perturbed = pgd_perturb(
                to_dense(rows),
                lambda x: target(self.forward(self.model, x), nodes),
                eps=config.adversarial_eps,
                steps=config.adversarial_steps,
            )
            loss = loss + config.adversarial_weight * target(self.forward(self.model, perturbed), nodes)
        if self.projection is not None:
            loss = loss + config.similarity_weight * self.similarity_loss(trace.last, nodes)
        return loss


def train_nosmog(task: DistillationTask) -> TrainedStudent:
    """Train an MLP on features and positions."""
    config = task.config.nosmog
    encodings = task.encode(config.encoding)
    student = task.new_student(MLPStudent, config, encodings)
    trainer = NOSMOGTrainer(student, task.split, task.teacher_outputs, config, encodings)
    return TrainedStudent(student, task.fit("nosmog", trainer, config), encodings)
