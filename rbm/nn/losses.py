"""The losses, a function each. All are means over rows or experts, so that weights mean the same for every batch size.

Where ranks train together (:mod:`rbm.utils.distributed`), the losses that are no means over rows, similarity and load
balance, are those of the joint batch: means over ranks, as DDP takes them, then give its gradients. The others are of a
rank's own rows; weigh them by its share.
"""

import math

from torch import Tensor, nn
from torch.nn import functional as F

from rbm.nn.memory_router import Routing, routed_layers
from rbm.nn.routing_record import RoutingRecord, open_record
from rbm.utils.distributed import all_gather_rows, all_reduce_sum, world_size

TEMPERATURE_MODES = ("softmax", "scaled_log_probs")


def hard_label_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy with the true classes, the first term of the paper's Eq. 8. ``logits [B, C]``, ``labels [B]``."""
    return F.cross_entropy(logits, labels)


def saturating_label_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """``log(eps + CE) - log(eps)`` with ``eps = 1 - ln 2`` and CE a row's cross-entropy, as a mean over rows.

    The RevGAT and DRGAT teachers' loss: it grows ever more slowly, so that a node whose label contradicts everything
    else does not rule the gradient.
    """
    eps = 1 - math.log(2)
    return (eps + F.cross_entropy(logits, labels, reduction="none")).log().mean() - math.log(eps)


def log_probabilities(logits: Tensor, temperature: float = 1.0, mode: str = "softmax") -> Tensor:
    """Logarithms of the softened class probabilities that distillation compares, ``[B, C]``.

    Args:
        logits: of student or teacher.
        temperature: softens (above one) or sharpens (below).
        mode: ``softmax`` divides the logits by the temperature. ``scaled_log_probs`` is the released code's form: it
            divides the log-probabilities and does not normalise them again, so that the student at temperature 1
            imitates ``p^(1/T)`` and each row weighs its mass over T.

    Raises:
        ValueError: an unknown mode.
    """
    if mode == "softmax":
        return F.log_softmax(logits / temperature, dim=-1)
    if mode == "scaled_log_probs":
        return F.log_softmax(logits, dim=-1) / temperature
    raise ValueError(f"mode is {mode!r}, expected one of {', '.join(TEMPERATURE_MODES)}")


def soft_label_loss(logits: Tensor, teacher_logits: Tensor, temperature: float = 1.0, mode: str = "softmax") -> Tensor:
    """``KL(teacher || student)``, the second term of the paper's Eq. 8, as a mean over the rows of ``[B, C]``.

    Args:
        logits: the student's.
        teacher_logits: the teacher's, same shape; no gradient flows into them.
        temperature: as in :func:`log_probabilities`.
        mode: likewise.
    """
    teacher = log_probabilities(teacher_logits.detach(), temperature, mode)
    return F.kl_div(log_probabilities(logits, temperature, mode), teacher, reduction="batchmean", log_target=True)


def pair_loss(
    logits: Tensor, teacher_log_probabilities: Tensor, weights: Tensor, temperature: float = 1.0, mode: str = "softmax"
) -> Tensor:
    """Weighted sum of ``KL(teacher || student)`` over pairs: student logits and teacher's :func:`log_probabilities`
    ``[P, C]``, weights ``[P]``.
    """
    student = log_probabilities(logits, temperature, mode)
    divergence = F.kl_div(student, teacher_log_probabilities, reduction="none", log_target=True).sum(-1)
    return (weights * divergence).sum()


def similarity_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean squared difference of all ``B x B`` inner products between rows: the student's ``[B, H]`` shall lie to one
    another as the teacher's ``[B, H']`` do (NOSMOG's representational similarity distillation).
    """
    students, teachers = all_gather_rows(student), all_gather_rows(teacher.detach())
    ours, theirs = student @ students.T, teacher.detach() @ teachers.T
    if world_size() == 1:
        return F.mse_loss(ours, theirs)
    # This rank's rows of the joint matrix; the mean over ranks is the mean over all of it.
    return F.mse_loss(ours, theirs, reduction="sum") * (world_size() / max(1, len(students)) ** 2)


def commitment_loss(routing: Routing) -> Tensor:
    """Eq. 6: minus the gate-weighted cosine of each row with its memory vectors. Pulls rows towards their experts.

    Zero for no rows.
    """
    pulls = (routing.gates * routing.cosines).sum(-1)
    return -(pulls.mean() if pulls.numel() else pulls.sum())


def self_similarity_loss(memory: Tensor) -> Tensor:
    """Eq. 7: mean cosine over all pairs of memory vectors ``[E, D]``, gradient on one side. Pushes them apart."""
    unit = F.normalize(memory, dim=-1)
    return (unit @ unit.detach().T).mean()


def load_balance_loss(routing: Routing, num_experts: int) -> Tensor:
    """Squared coefficient of variation of the experts' load: ``Var(load) / mean(load)^2``, load = sum of gates.

    The variance is the unbiased one, as in the released code. Zero for a single expert.
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
    # A product with a one-hot matrix, not index_add: its order of summation is fixed on every device.
    return routing.gates.flatten() @ F.one_hot(experts, num_experts).to(routing.gates.dtype)


def embedding_loss(
    routings: list[Routing],
    memories: list[Tensor],
    *,
    commitment_weight: float,
    self_similarity_weight: float,
    load_balance_weight: float,
) -> Tensor | float:
    """Sum over layers of the weighted embedding losses (paper, Eq. 12). A term with weight zero is not computed."""
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
    """The weighted losses of all layers of a model that route by memory (paper, Eq. 12), to be added to its own loss.

    ::

        with rbm.record_routing(model):
            loss = F.cross_entropy(model(x), labels) + rbm.auxiliary_loss(model)
        loss.backward()

    Args:
        model: any module with such layers in it.
        routing: what :func:`rbm.record_routing` yielded for the model; by default the record that is being written.
            Layers that were not called have no loss. Rows of several calls count as one batch.
        commitment_weight: of :func:`commitment_loss`.
        self_similarity_weight: of :func:`self_similarity_loss`. It has a gradient where ``layer.memory`` requires one:
            call ``layer.memory.requires_grad_()`` and give it to the optimiser, as students do.
        load_balance_weight: of :func:`load_balance_loss`. It is not a sum over rows: micro-batches are balanced each
            for itself.

    Returns:
        A scalar. The default weights are those of the configuration's section ``rbm``.

    Raises:
        ValueError: the model has no such layer, or its routing is not recorded, or was not called yet.
    """
    record, mine = open_record(model) if routing is None else routing, {*routed_layers(model).values()}
    layers = {name: layer for name, layer in record.layers.items() if layer in mine and name in record}
    if not layers:
        raise ValueError("routing of the model is recorded and holds no forward of it: call the model before the loss")
    loss = embedding_loss(
        [record[name] for name in layers],
        [layer.memory for layer in layers.values()],
        commitment_weight=commitment_weight,
        self_similarity_weight=self_similarity_weight,
        load_balance_weight=load_balance_weight,
    )
    return loss if isinstance(loss, Tensor) else next(iter(layers.values())).memory.new_zeros(())
