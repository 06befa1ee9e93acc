"""The losses. Their weights do not depend on the batch size: they are means over rows or experts, or, like the load
balance, ratios. Only :func:`pair_loss` is a sum, whose weights are given.

When several ranks train together (:mod:`rbm.utils.distributed`), the losses that are not means over rows, similarity
and load balance, are computed for the joint batch: averaging over ranks, as DDP does, then gives its gradients. The
other losses are those of a rank's own rows; weight them by the rank's share of the rows.
"""

import math

from torch import Tensor, nn
from torch.nn import functional as F

from rbm.nn.memory_router import Routing, routed_layers
from rbm.nn.routing_record import RoutingRecord, open_record
from rbm.utils.arguments import check_weight
from rbm.utils.distributed import all_gather_rows, all_reduce_sum, world_size

TEMPERATURE_MODES = ("softmax", "scaled_log_probs")


def hard_label_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy with the true classes, the first term of the paper's Eq. 9. ``logits [B, C]``, ``labels [B]``."""
    return F.cross_entropy(logits, labels)


def saturating_label_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over rows of ``log(eps + CE) - log(eps)``, with ``eps = 1 - ln 2`` and CE the cross-entropy of a row.

    The loss of the RevGAT and DRGAT teachers. It grows only logarithmically, so that nodes with outlying labels do not
    dominate the gradient.
    """
    eps = 1 - math.log(2)
    return (eps + F.cross_entropy(logits, labels, reduction="none")).log().mean() - math.log(eps)


def log_probabilities(logits: Tensor, temperature: float = 1.0, mode: str = "softmax") -> Tensor:
    """Logarithms of the softened class probabilities that distillation compares, ``[B, C]``.

    Args:
        logits: of student or teacher.
        temperature: softens the distribution above one, sharpens it below one.
        mode: ``softmax`` divides the logits by the temperature. ``scaled_log_probs`` is the form of the released code:
            it divides the log-probabilities and does not normalise them again, so that the student at temperature 1
            imitates ``p^(1/T)``, and the weight of each row is the sum of these values divided by T.

    Raises:
        ValueError: ``mode`` is unknown.
    """
    if mode == "softmax":
        return F.log_softmax(logits / temperature, dim=-1)
    if mode == "scaled_log_probs":
        return F.log_softmax(logits, dim=-1) / temperature
    raise ValueError(f"mode is {mode!r}, expected one of {', '.join(TEMPERATURE_MODES)}")


def soft_label_loss(logits: Tensor, teacher_logits: Tensor, temperature: float = 1.0, mode: str = "softmax") -> Tensor:
    """Mean over rows of ``KL(teacher || student)``, the second term of the paper's Eq. 9 (which writes it the other way
    round).

    Args:
        logits: of the student, ``[B, C]``.
        teacher_logits: of the teacher, ``[B, C]``; no gradient flows into them.
        temperature: see :func:`log_probabilities`.
        mode: see :func:`log_probabilities`.
    """
    teacher = log_probabilities(teacher_logits.detach(), temperature, mode)
    return F.kl_div(log_probabilities(logits, temperature, mode), teacher, reduction="batchmean", log_target=True)


def pair_loss(
    logits: Tensor, teacher_log_probabilities: Tensor, weights: Tensor, temperature: float = 1.0, mode: str = "softmax"
) -> Tensor:
    """Weighted sum of ``KL(teacher || student)`` over pairs: student logits and the teacher's
    :func:`log_probabilities`, ``[P, C]`` each, with weights ``[P]``.
    """
    student = log_probabilities(logits, temperature, mode)
    divergence = F.kl_div(student, teacher_log_probabilities, reduction="none", log_target=True).sum(-1)
    return (weights * divergence).sum()


def similarity_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean squared difference between the ``B x B`` inner products of the student's rows ``[B, H]`` and those of the
    teacher's rows ``[B, H']`` (NOSMOG's representational similarity distillation).
    """
    students, teachers = all_gather_rows(student), all_gather_rows(teacher.detach())
    ours, theirs = student @ students.T, teacher.detach() @ teachers.T
    if world_size() == 1:
        return F.mse_loss(ours, theirs)
    # This rank's rows of the joint matrix; the mean over ranks is the mean over the whole matrix.
    return F.mse_loss(ours, theirs, reduction="sum") * (world_size() / max(1, len(students)) ** 2)


def commitment_loss(routing: Routing) -> Tensor:
    """Eq. 6: minus the mean over rows of the gate-weighted cosine between a row and its memory vectors; zero without
    rows. It pulls rows towards the memory vectors of their experts.
    """
    pulls = (routing.gates * routing.cosines).sum(-1)
    return -(pulls.mean() if pulls.numel() else pulls.sum())


def self_similarity_loss(memory: Tensor) -> Tensor:
    """Eq. 7: mean cosine over all pairs of memory vectors ``[E, D]``, with the gradient of one side only. It pushes
    memory vectors apart.
    """
    # A copy, because a layer moves its memory in place: in eval(), or in a forward before the backward pass.
    unit = F.normalize(memory.clone(), dim=-1)
    return (unit @ unit.detach().T).mean()


def load_balance_loss(routing: Routing, num_experts: int) -> Tensor:
    """Eq. 8: squared coefficient of variation of the experts' load, ``Var(load) / mean(load)^2``, load = sum of gates.

    The variance is unbiased, as in the released code. The loss is zero for a single expert.
    """
    return squared_variation(all_reduce_sum(expert_load(routing, num_experts)))


def squared_variation(load: Tensor) -> Tensor:
    """``Var(load) / mean(load)^2`` of ``load [E]``, with the unbiased variance; zero for one entry."""
    if len(load) == 1:
        return load.new_zeros(())
    return load.var() / (load.mean().square() + 1e-10)


def expert_load(routing: Routing, num_experts: int) -> Tensor:
    """Sum of the gates that each expert received, ``[E]``, with gradient."""
    experts = routing.experts.flatten().long()
    # A product with a one-hot matrix instead of index_add, because its order of summation is fixed on every device.
    return routing.gates.flatten() @ F.one_hot(experts, num_experts).to(routing.gates.dtype)


def embedding_loss(
    routings: list[Routing],
    memories: list[Tensor],
    *,
    commitment_weight: float,
    self_similarity_weight: float,
    load_balance_weight: float,
) -> Tensor | float:
    """Weighted embedding losses (paper, Eq. 13), summed over layers. A term with weight zero is not computed.

    Routings and memories are those of the same forward: the memory moves later. In the released code, it has already
    moved when the self-similarity loss reads it.
    """
    loss: Tensor | float = 0.0
    for routing, memory in zip(routings, memories, strict=True):
        if commitment_weight > 0:
            loss = loss + commitment_weight * commitment_loss(routing)
        if self_similarity_weight > 0:
            loss = loss + self_similarity_weight * self_similarity_loss(memory)
        if load_balance_weight > 0:
            loss = loss + load_balance_weight * load_balance_loss(routing, memory.shape[0])
    return loss


def auxiliary_loss(
    model: nn.Module,
    routing: RoutingRecord | None = None,
    *,
    commitment_weight: float = 0.05,
    self_similarity_weight: float = 0.01,
    load_balance_weight: float = 0.01,
) -> Tensor:
    """Weighted losses (paper, Eq. 13) of all layers of a model that route by memory, to be added to the model's loss.

    ::

        with rbm.record_routing(model):
            loss = F.cross_entropy(model(x), labels) + rbm.auxiliary_loss(model)
        loss.backward()

    Args:
        model: any module that contains such layers.
        routing: what :func:`rbm.record_routing` yielded for the model; by default the active record. Layers that were
            not called have no loss. The rows of several calls count as one batch.
        commitment_weight: weight of :func:`commitment_loss`.
        self_similarity_weight: weight of :func:`self_similarity_loss`. This loss has a gradient only if
            ``layer.memory`` requires one: call ``layer.memory.requires_grad_()`` and pass the memory to the optimiser,
            as the training of students does.
        load_balance_weight: weight of :func:`load_balance_loss`. This loss is not a sum over rows: each micro-batch is
            balanced separately.

    Returns:
        A scalar. The default weights are those of the section ``rbm`` of the configuration.

    Raises:
        TypeError: ``routing`` is something else than a record, or a weight is no number.
        ValueError: a weight is negative, infinite or NaN, the model has no such layer, its routing is not recorded, or
            it has not been called yet.
    """
    weights = {
        "commitment_weight": commitment_weight,
        "self_similarity_weight": self_similarity_weight,
        "load_balance_weight": load_balance_weight,
    }
    weights = {name: check_weight(name, weight) for name, weight in weights.items()}
    record = open_record(model) if routing is None else routing
    if not isinstance(record, RoutingRecord):
        raise TypeError(
            f"routing is a {type(record).__name__}, expected what rbm.record_routing(model) yields; inside its block,"
            " leave routing out"
        )
    model_layers = {*routed_layers(model).values()}
    layers = {name: layer for name, layer in record.layers.items() if layer in model_layers and name in record}
    if not layers:
        raise ValueError("routing of the model is recorded and holds no forward of it: call the model before the loss")
    loss = embedding_loss(
        [record[name] for name in layers],
        [layer.memory for layer in layers.values()],
        **weights,
    )
    return loss if isinstance(loss, Tensor) else next(iter(layers.values())).memory.new_zeros(())
