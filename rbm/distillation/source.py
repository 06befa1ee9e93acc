"""Decides whose soft labels students learn, where the configuration says ``auto``.

A teacher whose edges mislead it teaches its mistakes. Every run also trains an MLP on the labels alone, which sees no
edge (:mod:`rbm.distillation.methods.labels`). Where that MLP is ahead of the teacher by more than chance, students
learn from it: its soft labels tell them of nodes that have no label. Only validation nodes are asked.
"""

from dataclasses import replace

import torch

from rbm.datasets.splits import GraphSplit
from rbm.distillation.task import TrainedStudent
from rbm.distillation.verdict import answers_right, compare, student_right
from rbm.nn.students import predict
from rbm.teachers.outputs import TeacherOutputs, outputs_from_logits


def is_ahead_of_teacher(split: GraphSplit, teacher: TeacherOutputs, labels: TrainedStudent) -> bool:
    """Whether the MLP trained on the labels alone has more validation nodes right than the teacher, by more than chance
    (:func:`rbm.distillation.verdict.compare`).
    """
    gain = compare(student_right(split, labels), answers_right(teacher.soft_labels[split.observed.val_mask], split))
    return gain.low > 0


@torch.no_grad()
def outputs_of_labels(split: GraphSplit, labels: TrainedStudent) -> TeacherOutputs:
    """What that MLP gives, in a teacher's place, with its last hidden layer. It has no module, so that every soft label
    is trusted alike.
    """
    layers, hidden = labels.student.layers, []
    shows = layers[-1].register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0]))
    try:
        outputs = outputs_from_logits(predict(labels.student, split.full_rows), split)
    finally:
        shows.remove()
    # What goes into the only layer are the features.
    return outputs if len(layers) == 1 else replace(outputs, hidden=torch.cat(hidden)[split.observed_nodes])
