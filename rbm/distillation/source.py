"""Decides whose soft labels students learn if ``distill.source`` is ``auto``.

If edges mislead a teacher, it teaches its mistakes. The run therefore also trains an MLP on the labels only, which uses
no edges (:mod:`rbm.distillation.methods.labels`). If this MLP is more accurate than the teacher by more than chance,
students learn its soft labels, which also cover nodes without a label. The decision only uses validation nodes.
"""

from dataclasses import replace

import torch

from rbm.datasets.splits import GraphSplit
from rbm.distillation.task import TrainedStudent
from rbm.distillation.verdict import answers_right, compare, student_right
from rbm.nn.students import predict
from rbm.teachers.outputs import TeacherOutputs, outputs_from_logits


def is_ahead_of_teacher(split: GraphSplit, teacher: TeacherOutputs, labels: TrainedStudent) -> bool:
    """Whether the MLP trained on labels classifies more validation nodes correctly than the teacher, by more than
    chance (:func:`rbm.distillation.verdict.compare`).
    """
    gain = compare(student_right(split, labels), answers_right(teacher.soft_labels[split.observed.val_mask], split))
    return gain.low > 0


@torch.no_grad()
def outputs_of_labels(split: GraphSplit, labels: TrainedStudent) -> TeacherOutputs:
    """The MLP's outputs, with its last hidden layer, in place of a teacher's. They have no module, so all soft labels
    have the same reliability.
    """
    layers, hidden = labels.student.layers, []
    hook = layers[-1].register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0]))
    try:
        outputs = outputs_from_logits(predict(labels.student, split.full_rows), split)
    finally:
        hook.remove()
    # With a single layer, the recorded inputs are the features.
    return outputs if len(layers) == 1 else replace(outputs, hidden=split.of_observed(torch.cat(hidden)))
