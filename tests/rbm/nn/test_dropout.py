"""Dropout with masks drawn from 16 bits per entry: shares, scale, gradients, seeds."""

import pytest
import torch

import rbm
from rbm.nn import dropout as dropout_module
from rbm.nn.dropout import Dropout, dropout

ENTRIES = 400_000


@pytest.mark.parametrize("p", [1e-3, 0.1, 0.3, 0.5, 0.6, 0.999])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_share_and_scale(p, dtype):
    torch.manual_seed(0)
    y = dropout(torch.ones(ENTRIES, dtype=dtype), p)
    share = (y == 0).double().mean().item()
    assert abs(share - p) < 5 * (p * (1 - p) / ENTRIES) ** 0.5 + 2**-17
    scale = y[y != 0].unique()
    assert y.dtype == dtype
    assert scale.tolist() == pytest.approx([1 / (1 - p)], rel=1e-2)


def test_entries_fall_out_one_by_one():
    """Four entries share one draw, but are dropped independently of one another and of other rows."""
    torch.manual_seed(0)
    kept = (dropout(torch.ones(ENTRIES), 0.3) > 0).double() - 0.7
    for step in range(1, 9):
        correlation = (kept[step:] * kept[:-step]).mean() / 0.21
        assert abs(correlation) < 5 / ENTRIES**0.5
    assert torch.unique(dropout(torch.ones(64, 64), 0.5), dim=0).shape[0] == 64


def test_gradient():
    torch.manual_seed(0)
    x = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    y = dropout(x, 0.4)
    y.sum().backward()
    torch.testing.assert_close(x.grad, (y / x).detach())

    def again(x):
        torch.manual_seed(1)
        return dropout(x, 0.4)

    assert torch.autograd.gradcheck(again, x)
    assert torch.autograd.gradgradcheck(again, x)


def test_seeds():
    x = torch.randn(33, 3)
    masks = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        masks.append(dropout(x, 0.5))
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_under_another_default_device(dtype):
    x, found = torch.randn(33, 3, dtype=dtype), []
    dropout_module._bits.cache_clear()
    for device in ("meta", "cpu"):
        torch.manual_seed(0)
        with torch.device(device):
            found.append(dropout(x, 0.3))
    assert torch.equal(*found)


@pytest.mark.parametrize("shape", [(), (0,), (0, 4), (1,), (3,), (5, 3), (2, 3, 4)])
def test_shapes(shape):
    assert dropout(torch.randn(shape), 0.5).shape == shape


def test_a_view_with_strides():
    torch.manual_seed(0)
    x = torch.randn(64, 32)
    y = dropout(x.T, 0.5)
    assert torch.equal(y[y != 0], 2 * x.T[y != 0])


def test_nothing_is_drawn_without_need():
    x = torch.randn(4, 4)
    before = torch.get_rng_state()
    assert dropout(x, 0.5, training=False) is x
    assert dropout(x, 0.0) is x
    assert Dropout(0.5).eval()(x) is x
    assert torch.equal(torch.get_rng_state(), before)


def test_module():
    torch.manual_seed(0)
    y = Dropout(0.25)(torch.ones(1000))
    torch.manual_seed(0)
    assert torch.equal(y, dropout(torch.ones(1000), 0.25))


def test_compiled():
    compiled = torch.compile(lambda x: dropout(x, 0.5), fullgraph=True, backend="aot_eager")
    y = compiled(torch.ones(ENTRIES))
    assert set(y.unique().tolist()) == {0.0, 2.0}
    assert abs(y.mean() - 1) < 0.02


def test_vmap_draws_one_mask_per_slice_or_one_for_all():
    ones = torch.ones(4, 64)
    different = torch.func.vmap(lambda x: dropout(x, 0.5), randomness="different")(ones)
    assert torch.unique(different, dim=0).shape[0] == 4
    same = torch.func.vmap(lambda x: dropout(x, 0.5), randomness="same")(ones)
    assert torch.unique(same, dim=0).shape[0] == 1
    assert torch.equal(same.unique(), torch.tensor([0.0, 2.0]))


@pytest.mark.parametrize("wrong", [2.0, 1.0, -0.5, float("nan"), "half"])
def test_a_dropout_that_is_set_later_is_checked(wrong):
    """Regression test: only the constructor looked at it, and -0.5 or 2.0 gave an output."""
    layers = [
        rbm.FusedRbMLayer(6, 4, num_experts=4, top_k=2),
        rbm.RbMFeedForward(6, 8, num_experts=4, top_k=2),
        rbm.MLPStudent(6, 8, 4),
    ]
    for layer in layers:
        layer.dropout = wrong
        with pytest.raises((TypeError, ValueError), match=rf"^dropout is '?{wrong}'?( \(str\))?, expected a"):
            layer(torch.randn(5, 6))
