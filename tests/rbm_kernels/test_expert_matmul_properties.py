"""Properties of the grouped matmul's kernels for any routing, in one pass over the rows and in several."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matmul_problems import DEVICE, problem

from rbm_kernels import expert_order
from rbm_kernels.ops.expert_matmul import launch

pytestmark = pytest.mark.usefixtures("one_thread")

few = settings(max_examples=6, deadline=None, derandomize=True)
# Passes over the rows: as many as the k experts of a row allow.
several = pytest.mark.parametrize("passes", [1, 2])
problems = st.builds(
    lambda rows, width, outputs, experts, k, seed: problem((rows, width, outputs, experts, k), seed=seed),
    rows=st.integers(2, 20),
    width=st.integers(1, 18),
    outputs=st.integers(1, 18),
    experts=st.integers(3, 7),
    k=st.integers(2, 3),
    seed=st.integers(0, 2**16),
)


def by_row(arguments, passes):
    """The outputs that have a row for each row of x: ``y``, ``grad_x`` and ``grad_gates``."""
    x, weight, bias, gates, experts, grad = arguments
    order = expert_order(experts, weight.shape[0], 16, passes)
    return (
        launch.expert_matmul(x, weight, bias, gates, experts, *order),
        *launch.backward_input(grad, x, weight, bias, gates, experts, True, *order),
    )


def by_expert(arguments):
    """The outputs that have a row for each expert, in which passes have no part."""
    x, weight, _, gates, experts, grad = arguments
    return launch.backward_weight(grad, x, gates, experts, weight.shape[0])


def select(arguments, rows):
    x, weight, bias, gates, experts, grad = arguments
    return x[rows], weight, bias, gates[rows], experts[rows], grad[rows]


def shuffled(count, like):
    return torch.randperm(count, generator=torch.Generator().manual_seed(like.numel())).to(DEVICE)


@several
@few
@given(arguments=problems)
def test_permuting_rows_permutes_outputs_and_nothing_else(passes, arguments):
    """To the bit: a row's sums run over its experts in one order, and what else its tile holds adds zero.

    The experts' gradients are sums over rows, so there another order of the rows is another order of summation.
    """
    rows = shuffled(len(arguments[0]), arguments[0])
    for got, want in zip(by_row(select(arguments, rows), passes), by_row(arguments, passes), strict=True):
        assert torch.equal(got, want[rows])
    if passes == 1:
        for got, want in zip(by_expert(select(arguments, rows)), by_expert(arguments), strict=True):
            torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@several
@few
@given(arguments=problems, share=st.floats(0, 1))
def test_splitting_a_batch_changes_nothing(passes, arguments, share):
    """To the bit for rows, one empty part included; the experts' gradients of the parts add up, to rounding."""
    cut = round(share * len(arguments[0]))
    parts = [select(arguments, slice(cut)), select(arguments, slice(cut, None))]
    for whole, *pieces in zip(by_row(arguments, passes), *(by_row(part, passes) for part in parts), strict=True):
        assert torch.equal(torch.cat(pieces), whole)
    if passes == 1:
        for whole, *pieces in zip(by_expert(arguments), *map(by_expert, parts), strict=True):
            torch.testing.assert_close(sum(pieces), whole, atol=1e-4, rtol=1e-4)


@several
@few
@given(arguments=problems)
def test_relabelling_experts_changes_nothing(passes, arguments):
    """Beyond rounding: a tile takes its experts in ascending order, so new names are a new order of summation.

    Not so with one expert a pass, where the columns alone set the order; and an expert's own gradient, a sum over
    its rows, moves with its name to the bit.
    """
    x, weight, bias, gates, experts, grad = arguments
    names = shuffled(len(weight), arguments[0])
    renamed = (x, weight[names], bias[names], gates, names.argsort()[experts.long()].int(), grad)
    for got, want in zip(by_row(renamed, passes), by_row(arguments, passes), strict=True):
        if passes == experts.shape[1]:
            assert torch.equal(got, want)
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    if passes == 1:
        for got, want in zip(by_expert(renamed), by_expert(arguments), strict=True):
            assert torch.equal(got, want[names])
