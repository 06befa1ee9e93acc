r"""SIGN: an MLP on features and their means one, two, ... hops away, computed once and stored (Frasca et al., SIGN:
Scalable Inception Graph Neural Networks, 2020). With one layer it is SGC on all hops (Wu et al., Simplifying Graph
Convolutional Networks, ICML 2019).

.. math:: q_v = MLP\big(x_v, (M x)_v, \dots, (M^K x)_v\big), \quad
    L = \lambda \, CE(q_v, y_v) + (1 - \lambda) \, KL(p_v \,\|\, q_v)

It is not a distilled student: by default it learns only from labels (:math:`\lambda = 1`). Prediction runs no GNN. A
row needs the node's stored hops. For a new node these are means over the stored hops of its neighbours
(:mod:`rbm.datasets.encodings.hops`), which reads the edges of the new node but not those of its neighbours.

Differences from the publication: the only operator is the mean over neighbours, whereas SIGN also uses powers of
PageRank and triangles. The first layer is the sum of one linear map per hop, whereas SIGN concatenates their outputs.
Neither publication has settings for these graphs and labels; the defaults are ours. Full batch.
"""

from torch import Tensor

from rbm.config import SIGNConfig
from rbm.datasets.encodings import Encodings
from rbm.datasets.encodings.hops import hop_encodings
from rbm.datasets.splits import GraphSplit
from rbm.distillation.task import DistillationTask, TrainedStudent
from rbm.distillation.trainer import NodeTrainer
from rbm.nn import losses
from rbm.nn.newer import SIGNStudent
from rbm.teachers.outputs import TeacherOutputs


class SIGNTrainer(NodeTrainer):
    """One step per epoch on the labels and, if they have a weight, the soft labels of all observed nodes."""

    def __init__(
        self,
        model: SIGNStudent,
        split: GraphSplit,
        teacher_outputs: TeacherOutputs,
        config: SIGNConfig,
        encodings: Encodings | None,
    ) -> None:
        super().__init__(model, split, config, encodings)
        self.teacher_outputs, self.weight = teacher_outputs, config.label_weight
        self.labelled_x = self.observed_x[self.train_nodes]

    def epoch_loss(self, epoch: int) -> Tensor:
        if self.weight == 1:
            logits = self.forward(self.model, self.labelled_x)
            return losses.hard_label_loss(logits, self.split.observed.y[self.train_nodes])
        logits = self.forward(self.model, self.observed_x)
        soft = losses.soft_label_loss(logits, self.teacher_outputs.soft_labels)
        return self.weight * self.labelled_loss(logits) + (1 - self.weight) * soft


def train_sign(task: DistillationTask) -> TrainedStudent:
    """Train an MLP on features and stored hops."""
    config = task.config.sign
    encodings = hop_encodings(task.split, config.hops)
    student = task.new_student(SIGNStudent, config, encodings)
    trainer = SIGNTrainer(student, task.split, task.teacher_outputs, config, encodings)
    return TrainedStudent(student, task.fit("sign", trainer, config), encodings)
