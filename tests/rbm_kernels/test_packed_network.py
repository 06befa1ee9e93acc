"""A packed network: the results of its layers one by one, independent of the batch."""

import re

import pytest
import torch

from rbm_kernels import NetworkLayer, pack_network, packed_network, quantize_experts
from rbm_kernels.ops.packed_network import form, reference

D, H, N, E, R = 83, 40, 7, 5, 12


def linear(d, n, **more) -> NetworkLayer:
    return NetworkLayer(torch.randn(1, n, d) / d**0.5, torch.randn(1, n), n, d, **more)


def routed(d, n, **more) -> NetworkLayer:
    weight, bias = torch.randn(E, n, d) / d**0.5, torch.randn(E, n)
    return NetworkLayer(weight, bias, n, d, torch.randn(E, d), 3, 0.7, **more)


def learned(d, n, over_all=False, **more) -> NetworkLayer:
    layer = routed(d, n, **more)
    return layer._replace(
        memory=torch.randn(E, R), router=(torch.randn(R, d), torch.randn(R)), temperature=0.1, over_all=over_all
    )


def in_8_bits(layer: NetworkLayer) -> NetworkLayer:
    return layer._replace(weight=quantize_experts(layer.weight, layer.bias), bias=None)


def norm(kind: str, n: int) -> dict:
    return (
        {"relu": True}
        if kind == "none"
        else {"norm": kind, "scale": torch.randn(n), "shift": torch.randn(n), "eps": 1e-5}
    )


NETWORKS = {
    "one layer": lambda: [linear(D, N)],
    "linear": lambda: [linear(D, H, relu=True), linear(H, N)],
    "routed": lambda: [routed(D, H, **norm("none", H)), routed(H, N)],
    "learned routers": lambda: [learned(D, H, relu=True), learned(H, N, over_all=True)],
    "batch norm": lambda: [routed(D, H, **norm("affine", H)), linear(H, N)],
    "layer norm": lambda: [linear(D, H, **norm("layer", H)), routed(H, N)],
    "leaky": lambda: [routed(D, H, relu=True, negative_slope=0.3), linear(H, N)],
    "residual": lambda: [linear(D, H, relu=True), routed(H, H, relu=True, residual=True), linear(H, N, unit=True)],
    "residual, unit": lambda: [linear(D, H), linear(H, H, residual=True, unit=True, **norm("affine", H)), linear(H, N)],
    "rows added": lambda: [routed(D, D, residual=True, unit=True), in_8_bits(linear(D, D, residual=True))],
    "8 bits": lambda: [in_8_bits(routed(D, H, relu=True)), in_8_bits(linear(H, N))],
    "mixed, of four": lambda: [in_8_bits(linear(D, 64)), routed(64, 70, relu=True), learned(70, 3), linear(3, 1)],
    "no biases": lambda: [layer._replace(bias=None) for layer in (routed(D, H), linear(H, N))],
}


@pytest.mark.native
@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS.keys())
def test_answers(network):
    layers = network()
    x, outputs = torch.randn(37, D), layers[-1].out_features
    packed = pack_network(layers)
    y = packed_network(x, packed, outputs)
    expected = reference.packed_network(x, reference.pack_network(layers))
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    for size in (1, 2, 9):
        parts = [packed_network(part, packed, outputs) for part in x.split(size)]
        assert torch.equal(torch.cat(parts), y)
    for rows in (torch.randn(37, 2 * D)[::5, :D], x.T.contiguous().T):
        assert torch.equal(packed_network(rows, packed, outputs), packed_network(rows.contiguous(), packed, outputs))
    assert packed_network(x[:0], packed, outputs).shape == (0, outputs)


@pytest.mark.native
def test_more_rows_than_pass_at_once_on_several_threads():
    layers, before = [routed(9, 33, **norm("layer", 33)), linear(33, 5)], torch.get_num_threads()
    x, packed = torch.randn(9000, 9), pack_network(layers)
    expected = reference.packed_network(x, reference.pack_network(layers))
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            y = packed_network(x, packed, 5)
            torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
            assert torch.equal(packed_network(x[4090:4100], packed, 5), y[4090:4100])
    finally:
        torch.set_num_threads(before)


@pytest.mark.native
def test_what_is_not_finite_stays_in_its_row():
    layers = [routed(D, H, relu=True), linear(H, N)]
    x, packed = torch.randn(9, D), pack_network(layers)
    expected = packed_network(x, packed, N)
    x[4, 2] = float("nan")
    y = packed_network(x, packed, N)
    assert y[4].isnan().all()
    assert torch.equal(y[[i for i in range(9) if i != 4]], expected[[i for i in range(9) if i != 4]])


@pytest.mark.native
def test_values_at_the_ends_of_activation_and_length():
    """As PyTorch's: ReLU of minus infinity is zero, and a row shorter than 1e-12 is divided by that."""
    same = NetworkLayer(torch.eye(4)[None], None, 4, 4)
    rows = torch.tensor([[-torch.inf, -1, 2, 0], [0, 0, 0, 0], [3e-13, -4e-13, 0, 0], [torch.nan, -1, 1, 0]])
    for slope, activated in ((0.0, rows.relu()), (0.5, torch.nn.functional.leaky_relu(rows, 0.5))):
        layer = NetworkLayer(torch.ones(1, 1, 1), None, 1, 1, relu=True, negative_slope=slope)
        y = packed_network(rows.reshape(-1, 1), pack_network([layer]), 1).reshape(rows.shape)
        torch.testing.assert_close(y, activated, rtol=0, atol=0, equal_nan=True)
    y = packed_network(rows, pack_network([same._replace(unit=True)]), 4)
    torch.testing.assert_close(y[1:3], torch.nn.functional.normalize(rows[1:3]))
    assert y[3].isnan().all()


MOSTLY_ZERO = {
    "linear": lambda: [linear(600, H, relu=True), linear(H, N)],
    "routed": lambda: [routed(600, H, **norm("layer", H)), routed(H, N)],
    "learned routers": lambda: [learned(600, 130, relu=True), linear(130, N)],
    "one layer": lambda: [routed(600, N)],
    "blocks of features": lambda: [routed(2300, H, relu=True), linear(H, N)],
}


@pytest.mark.native
@pytest.mark.parametrize("network", MOSTLY_ZERO.values(), ids=MOSTLY_ZERO.keys())
def test_rows_that_are_mostly_zero(network):
    """Weights of features that are zero are not read, which changes no bit."""
    layers = network()
    features = layers[0].in_features
    x = torch.randn(41, features) * (torch.rand(41, features) < 0.02)
    x[3] = 0
    x[4, 0] = x[5, -1] = 1
    packed = pack_network(layers)
    y = packed_network(x, packed, N)
    expected = reference.packed_network(x, reference.pack_network(layers))
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    for size in (1, 2, 7, 20):
        assert torch.equal(torch.cat([packed_network(part, packed, N) for part in x.split(size)]), y)
    # The first rows of a sample decide for the batch. Dense rows among others fill some tiles.
    for dense in (slice(0, 1), slice(20, 26)):
        mixed = x.clone()
        mixed[dense] = 1
        others = [i for i in range(41) if i not in range(41)[dense]]
        assert torch.equal(packed_network(mixed, packed, N)[others], y[others])


@pytest.mark.native
@pytest.mark.parametrize("number", [float("inf"), float("nan")])
@pytest.mark.parametrize("router", [False, True])
def test_a_weight_that_is_not_finite_counts_for_zeros_too(number, router):
    layer = learned(100, N)
    (layer.router[0] if router else layer.weight)[..., 7] = number
    x = torch.zeros(3, 100)
    x[:, 3] = 1
    y = packed_network(x, pack_network([layer]), N)
    expected = reference.packed_network(x, reference.pack_network([layer]))
    assert expected.isnan().all()
    assert y.isnan().all()


@pytest.mark.native
def test_no_other_bytes_are_taken_for_a_network():
    """Each number of the head, replaced by others, is refused or harmless: nothing is read beyond the bytes."""
    layers = [routed(4, 3, **norm("affine", 3)), in_8_bits(learned(3, 2))]
    packed, x, fields = pack_network(layers), torch.randn(3, 4), len(form.StoredLayer._fields)
    refused = r"rbm::packed_network: (network|x has shape|out_features)"
    for place in range(2 + 2 * fields):
        for number in (-(2**63), -1, 0, 1, 3, 64, 2**31, 2**62, 2**63 - 1):
            bad = packed.clone()
            bad[8 * place : 8 * place + 8] = torch.tensor([number]).view(torch.uint8)
            try:
                shape = packed_network(x, bad, 2).shape
            except (RuntimeError, ValueError) as error:
                shape = (3, 2) if re.match(refused, str(error)) else str(error)
            assert shape == (3, 2)
    for size in (0, 15, 16, 300, len(packed) - 64):
        with pytest.raises((RuntimeError, ValueError), match=refused):
            packed_network(x, packed[:size], 2)


@pytest.mark.native
def test_bytes_that_begin_anywhere():
    """A view may begin between two floats; the vectors of the kernels may not."""
    packed, x = pack_network([linear(D, N)]), torch.randn(3, D)
    moved = torch.cat([packed.new_zeros(5), packed])
    with pytest.raises(RuntimeError, match="network begins at an odd address"):
        packed_network(x, moved[5:], N)
    moved = torch.cat([packed.new_zeros(4), packed])
    assert torch.equal(packed_network(x, moved[4:], N), packed_network(x, packed, N))


@pytest.mark.native
def test_more_features_than_8_bit_products_are_summed_of():
    d = 2**17 + 1
    weight = torch.zeros(1, 1, 3 - (-d // 4), 64, dtype=torch.int8)
    layer = NetworkLayer(weight, None, 1, d)
    with pytest.raises(ValueError, match=r"layers\[0\] has 131073 features, expected at most 131072"):
        pack_network([layer])
    with pytest.raises(RuntimeError, match="network has more features than 8-bit products"):
        packed_network(torch.zeros(1, d), form.write([layer], lambda *weights: None), 1)


BAD = {
    "no layers": (list, ValueError, "layers is empty"),
    "sizes": (lambda: [linear(D, H), linear(H + 1, N)], ValueError, "takes 41 features, expected 40"),
    "dtype": (
        lambda: [linear(D, N)._replace(weight=torch.zeros(1, N, D).double())],
        TypeError,
        "weight has dtype float64",
    ),
    "weight": (lambda: [linear(D, N)._replace(in_features=D + 1)], ValueError, r"weight has shape \[1, 7, 83\]"),
    "bias": (lambda: [linear(D, N)._replace(bias=torch.zeros(N))], ValueError, r"bias has shape \[7\]"),
    "memory": (lambda: [routed(D, N)._replace(memory=torch.zeros(E, R))], ValueError, r"memory has shape \[5, 12\]"),
    "no memory": (lambda: [routed(D, N)._replace(memory=None)], ValueError, r"memory is None, expected \[5, 83\]"),
    "router": (
        lambda: [learned(D, N)._replace(router=(torch.zeros(R, R), None))],
        ValueError,
        r"router\[0\] has shape",
    ),
    "no router": (
        lambda: [learned(D, N)._replace(router=(None, None))],
        TypeError,
        r"layers\[0\]\.router\[0\] is a NoneType, expected a tensor",
    ),
    "k": (lambda: [routed(D, N)._replace(k=6)], ValueError, "k is 6"),
    "temperature": (lambda: [routed(D, N)._replace(temperature=0.0)], ValueError, "temperature is 0.0"),
    "norm": (lambda: [linear(D, N, norm="group")], ValueError, "norm is 'group', expected one of none, affine, layer"),
    "no scale": (lambda: [linear(D, N, norm="layer")], ValueError, "without scale or shift"),
    "residual": (lambda: [linear(D, N, residual=True)], ValueError, "is True, expected False from 83 features to 7"),
    "slope": (lambda: [linear(D, N, negative_slope="a")], TypeError, "negative_slope is 'a', expected a number"),
    "nothing": (lambda: [linear(D, N)._replace(weight=torch.zeros(1, 0, D), out_features=0)], ValueError, "at least 1"),
    "bias of 8 bits": (
        lambda: [in_8_bits(linear(D, N))._replace(bias=torch.zeros(1, N))],
        ValueError,
        "expected None: int8 weights hold the bias",
    ),
}


@pytest.mark.parametrize(("layers", "error", "message"), BAD.values(), ids=BAD.keys())
def test_bad_layers(layers, error, message):
    with pytest.raises(error, match=message):
        pack_network(layers())


def test_bad_arguments():
    packed, x = pack_network([linear(D, N)]), torch.randn(3, D)
    for arguments, error, message in (
        ((x.double(), packed, N), TypeError, "x has dtype float64, expected float32"),
        ((x[0], packed, N), ValueError, r"x has shape \[83\]"),
        ((x[:, 1:], packed, N), ValueError, r"x has shape \[3, 82\], expected \[\*, 83\]"),
        ((x, packed.float(), N), TypeError, "network has dtype float32, expected uint8"),
        ((x, packed[None], N), ValueError, "network has shape"),
        ((x, packed, N + 1), ValueError, "out_features is 8, expected 7"),
        ((x, packed[::2], N), (ValueError, RuntimeError), "network (is not contiguous|begins with other bytes)"),
        ((x.requires_grad_(), packed, N), RuntimeError, "no derivative of its own"),
    ):
        with pytest.raises(error, match=message):
            packed_network(*arguments)


def test_opcheck():
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    arguments = (torch.randn(3, D), pack_network([routed(D, H, relu=True), linear(H, N)]), N)
    torch.library.opcheck(torch.ops.rbm.packed_network.default, arguments, test_utils=checks)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"norm": "layer", "scale": torch.ones(3)}, "norm is 'layer' without scale or shift"),
        ({"norm": "layer", "shift": torch.ones(3)}, "norm is 'layer' without scale or shift"),
        ({"router": (torch.ones(2, 4), torch.ones(2))}, r"memory is None, expected \[1, 2\], to route rows by"),
    ],
)
def test_a_layer_with_half_of_what_it_needs_is_refused(parts, message):
    layer = NetworkLayer(torch.randn(1, 3, 4), None, 3, 4)
    with pytest.raises(ValueError, match=message):
        pack_network([layer._replace(**parts)])
