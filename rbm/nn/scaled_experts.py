"""The product of rows with experts whose inputs are scaled, for training (paper, Eq. 5).

The factors can multiply the experts or the rows. Scaled experts are a copy of all weights, with a gradient of the same
size: with 64 experts this takes longer than the products of a batch of 512 rows. Scaled rows are a copy of each row for
every expert that it goes to. This module scales whichever is smaller; of sparse rows, always their few entries.
"""

from torch import Tensor, nn

from rbm.nn import sparse_rows as sparse
from rbm.nn.folded_weights import fold
from rbm.nn.sparse_rows import Rows, SparseRows, dropout
from rbm.utils.precision import autocast_dtype
from rbm_kernels import expert_matmul
from rbm_kernels._library import is_exporting
from rbm_kernels.ops.expert_matmul.config import holds
from rbm_kernels.ops.fold_experts.reference import input_scale

# On a Xeon with AMX, steps with scaled experts and with scaled rows took the same time at 4 to 6 outputs, summed
# over all experts, per scaled row: such a row is also multiplied, and its output summed, separately.
_OUTPUTS_PER_ROW = 8


def scaled_expert_matmul(
    rows: Rows,
    weight: Tensor,
    bias: Tensor | None,
    attention: Tensor | None,
    log_scale: Tensor,
    gates: Tensor,
    experts: Tensor,
    p: float,
    training: bool,
) -> Tensor:
    """``exp(s) sum_j G_j f_j(exp(a_j) * h)`` of rows ``[B, D]``, in the dtype that autocast selects: ``[B, O]``.

    Args:
        rows: ``h`` before dropout.
        weight: ``[E, O, D]``.
        bias: ``[E, O]`` or None.
        attention: ``a``, ``[E, D]``, or None for zeros.
        log_scale: ``s``, ``[1]``.
        gates: ``[B, k]``.
        experts: ``[B, k]``, int32.
        p: probability that dropout sets a feature to zero, the same for all experts of a row.
        training: whether to drop features.
    """
    is_sparse, copies = isinstance(rows, SparseRows), 1 if attention is None else experts.shape[-1]
    dtype = None if is_sparse else autocast_dtype(rows, weight.dtype)
    if not is_sparse and not _few(rows, weight, copies):
        rows = dropout(rows if dtype is None else rows.to(dtype), p, training)
        return expert_matmul(rows, *fold(weight, bias, attention, log_scale, dtype), gates, experts)
    rows, scale = dropout(rows, p, training), input_scale(attention, log_scale)
    if bias is not None:
        bias = bias * input_scale(None, log_scale)
    if is_sparse:
        return sparse.expert_matmul(rows, weight, bias, scale, gates, experts)
    if attention is None:
        pairs = rows * scale
    else:
        pairs = (rows[:, None] * scale.index_select(0, experts.flatten()).unflatten(0, experts.shape)).flatten(0, 1)
        gates, experts = gates.reshape(-1, 1), experts.reshape(-1, 1)
    if dtype is not None:
        pairs, weight, bias = pairs.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    y = expert_matmul(pairs, weight, bias, gates, experts)
    return y if attention is None else y.unflatten(0, (rows.shape[0], copies)).sum(1)


def _few(rows: Tensor, weight: Tensor, copies: int) -> bool:
    """Whether ``copies`` of the rows are so few that they are scaled instead of the experts.

    An exported program must not depend on the number of rows. On a GPU, one kernel folds. Subclasses of Tensor, such as
    distributed ones, may not know the operators for rows.
    """
    if weight.device.type != "cpu" or type(weight) not in (Tensor, nn.Parameter) or is_exporting():
        return False
    return holds(rows.shape[0] * copies * _OUTPUTS_PER_ROW <= weight.shape[0] * weight.shape[1])
