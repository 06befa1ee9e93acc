"""Arguments that the operators refuse with a message: devices, sizes, memory that is written to."""

from pathlib import Path

import pytest
import torch
from operator_arguments import B, D, E, K, N, arguments

import rbm_kernels
from rbm_kernels import NetworkLayer, expert_order, memory_statistics, memory_update_, pack_network
from rbm_kernels.ops.memory_update import op as memory_update_op

REFUSED = (ValueError, TypeError, RuntimeError)


def tensor_arguments():
    return [
        (operator, name)
        for operator, given in arguments().items()
        for name, value in given.items()
        if isinstance(value, torch.Tensor)
    ]


LAYER = NetworkLayer(torch.ones(1, 2, 2), None, 2, 2)
PUBLIC_ARGUMENTS = [at for at in tensor_arguments() if hasattr(rbm_kernels, at[0])]


@pytest.mark.parametrize(("operator", "name"), PUBLIC_ARGUMENTS)
def test_what_is_no_tensor(operator, name):
    """NumPy's arrays have a dtype and a shape of the same names."""
    given = arguments()[operator]
    optional = name in ("bias", "attention", "scale") or (operator, name) == ("routed_matmul_int8", "memory")
    for value in (given[name].numpy(), given[name].tolist(), *([] if optional else [None])):
        with pytest.raises(TypeError, match=rf"rbm::\w+: {name} is a {type(value).__name__}, expected a tensor"):
            getattr(rbm_kernels, operator)(**given | {name: value})


def scalar_arguments():
    of_public = {operator: given for operator, given in arguments().items() if hasattr(rbm_kernels, operator)}
    scalars = [(at, name) for at, given in of_public.items() for name in given if isinstance(given[name], int | float)]
    return [*scalars, ("cosine_topk", "temperature"), ("expert_order", "passes")]


@pytest.mark.parametrize(("operator", "name"), scalar_arguments())
@pytest.mark.parametrize("value", ["a", None, [1]], ids=["text", "None", "list"])
def test_what_is_no_number(operator, name, value):
    """Python's message was that '<=' is not supported, without the name of the argument."""
    with pytest.raises((TypeError, ValueError), match=rf"rbm::\w+: {name} is ('?a\b|None|\[1\]).*, expected"):
        getattr(rbm_kernels, operator)(**arguments()[operator] | {name: value})


WHOLE = [at for at in scalar_arguments() if at[1] not in ("temperature", "decay")]


@pytest.mark.parametrize(("operator", "name"), WHOLE)
def test_what_is_no_whole_number(operator, name):
    """PyTorch's message quoted the schema of the operator."""
    with pytest.raises((TypeError, ValueError), match=rf"rbm::\w+: {name} is 2\.5, expected (a whole number|{N})"):
        getattr(rbm_kernels, operator)(**arguments()[operator] | {name: 2.5})


NO_LAYERS = {
    "layers is a int, expected a list of NetworkLayer": 3,
    "layers is a str, expected a list of NetworkLayer": "ab",
    "layers is a NetworkLayer, expected a list": LAYER,
    r"layers\[0\] is a int, expected a NetworkLayer": [3],
    r"layers\[0\].k is 1.0, expected a whole number": [LAYER._replace(k=1.0)],
    r"layers\[0\].in_features is None, expected a whole number": [LAYER._replace(in_features=None)],
    r"layers\[0\].temperature is 'a', expected a number": [LAYER._replace(temperature="a")],
    r"layers\[0\].eps is 'a', expected a number": [LAYER._replace(eps="a")],
    r"layers\[0\].relu is 'a', expected True or False": [LAYER._replace(relu="a")],
    r"layers\[0\].router is a Tensor, expected None or a pair": [LAYER._replace(router=torch.ones(2, 2))],
}


@pytest.mark.parametrize("message", NO_LAYERS)
def test_what_is_no_layer(message):
    with pytest.raises(TypeError, match=f"rbm::pack_network: {message}"):
        pack_network(NO_LAYERS[message])


@pytest.mark.parametrize(("operator", "name"), PUBLIC_ARGUMENTS)
def test_a_sparse_tensor(operator, name):
    """PyTorch's message was about an operator of its own that sparse tensors lack, such as aten::gt.Scalar."""
    given = arguments()[operator]
    refused = rf"rbm::\w+: {name} has layout sparse_coo, expected a dense tensor; use {name}\.to_dense"
    with pytest.raises(TypeError, match=refused):
        getattr(rbm_kernels, operator)(**given | {name: given[name].to_sparse()})


@pytest.mark.parametrize("operator", arguments())
def test_legal_arguments_are_taken(operator):
    given = arguments()[operator]
    getattr(torch.ops.rbm, operator)(**given)
    meta = {name: value.to("meta") if isinstance(value, torch.Tensor) else value for name, value in given.items()}
    getattr(torch.ops.rbm, operator)(**meta)


@pytest.mark.parametrize(("operator", "name"), tensor_arguments())
@pytest.mark.parametrize("most", ["cpu", "meta"])
def test_tensors_on_two_devices(operator, name, most):
    if operator == "expert_order":
        pytest.skip("one tensor")
    given = arguments()[operator]
    for other, value in given.items():
        if isinstance(value, torch.Tensor) and (other == name) == (most == "cpu"):
            given[other] = value.to("meta")
    before = given.get("memory")
    before = before.clone() if before is not None else None
    with pytest.raises(REFUSED, match=r"(one device|another device)"):
        getattr(torch.ops.rbm, operator)(**given)
    if operator == "memory_update_" and before.device.type == "cpu":
        assert torch.equal(before, given["memory"])


# The sizes that an operator's arguments have; the others read none of 2^31 there.
SIZES = {
    "cosine_topk": "bde",
    "cosine_topk_backward": "bdek",
    "expert_order": "be",
    "expert_matmul": "bdnek",
    "expert_matmul_backward_input": "bdnek",
    "expert_matmul_backward_weight": "bdnek",
    "routed_matmul": "bdne",
    "pack_experts": "dne",
    "routed_matmul_packed": "bde",
    "packed_feed_forward": "bde",
    "routed_matmul_int8": "be",
    "packed_network": "bd",
    "sparse_expert_matmul": "bdnek",
    "sparse_expert_matmul_backward_gates": "bdnek",
    "sparse_expert_matmul_backward_weight": "bdnek",
    "fold_experts": "dne",
    "fold_experts_backward": "dne",
    "memory_statistics": "bdek",
    "memory_update_": "de",
}


@pytest.mark.parametrize(("operator", "size"), [(op, size) for op, sizes in SIZES.items() for size in sizes])
def test_a_size_of_2_31(operator, size):
    """The refusal comes before any memory is asked for: there is none for such a result."""
    sizes = {"b": 1, "d": 1, "n": 1, "e": 1, "k": 1} | {size: 2**31}
    given = arguments(**sizes)[operator]
    refused = rf"rbm::{operator}: (.* expected sizes below 2\^31|num_experts is .* int32|.* expected between)"
    with pytest.raises(REFUSED, match=refused):
        getattr(torch.ops.rbm, operator)(**given)
    if "backward" not in operator:  # what a backward pass gets, the forward pass has had
        meta = {n: v.to("meta") if torch.is_tensor(v) else v for n, v in given.items()}
        with pytest.raises(REFUSED, match=refused):
            getattr(torch.ops.rbm, operator)(**meta)


def test_more_choices_than_int32_counts():
    given = arguments()["sparse_expert_matmul"]
    rows = 2**30
    given |= {name: given[name][:1, :1].expand(rows, 2) for name in ("gates", "experts")}
    given["crow"] = given["crow"][:1].expand(rows + 1)
    for device in ("cpu", "meta"):
        moved = {name: tensor.to(device) for name, tensor in given.items()}
        with pytest.raises(REFUSED, match=r"expected fewer than 2\^31 choices"):
            torch.ops.rbm.sparse_expert_matmul(**moved)


@pytest.mark.parametrize("num_experts", [0, -1, 2**31, 2**62])
def test_a_number_of_experts_that_int32_does_not_count(num_experts):
    x, gates, experts = torch.randn(B, D), torch.rand(B, K), torch.zeros(B, K, dtype=torch.int32)
    for device in ("cpu", "meta"):
        h, g, e = x.to(device), gates.to(device), experts.to(device)
        with pytest.raises(ValueError, match="num_experts is"):
            memory_statistics(h, g, e, num_experts)
        with pytest.raises(ValueError, match=r"num_experts is|k is"):
            expert_order(e, num_experts)


def overlapping():
    storage = torch.arange(64.0)
    return {
        "expanded rows": torch.ones(1, D).expand(E, D),
        "expanded columns": torch.ones(E, 1).expand(E, D),
        "rows that overlap": storage.as_strided((E, D), (2, 1)),
        "columns that overlap": storage.as_strided((D, D), (1, 2)),
        "equal strides": storage.as_strided((E, D), (3, 3)),
        "meeting far away": storage.as_strided((4, 3), (2, 3)),
    }


@pytest.mark.parametrize("name", overlapping())
def test_a_memory_with_several_elements_at_one_address(name):
    memory = overlapping()[name]
    before = memory.clone()
    e, d = memory.shape
    with pytest.raises(ValueError, match=r"memory has several elements at one address .* pass memory.clone\(\)"):
        memory_update_(memory, torch.rand(e, d), torch.ones(e), 0.5)
    assert torch.equal(memory, before)
    memory_update_(memory.clone(), torch.rand(e, d), torch.ones(e), 0.5)


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((E, D), (1, E)),
        ((E, D), (3 * D, 1)),
        ((E, D), (2 * D, 2)),
        ((2, 2), (2, 3)),
        ((1, D), (0, 1)),
        ((E, 1), (1, 0)),
    ],
)
def test_strides_that_meet_nowhere_are_taken(shape, strides):
    memory = torch.randn(64).as_strided(shape, strides)
    expected, sums, total = memory.clone(), torch.rand(shape), torch.rand(shape[0]) + 0.5
    memory_update_(memory, sums, total, 0.5)
    memory_update_(expected, sums, total, 0.5)
    assert torch.equal(memory, expected)


def aliased():
    storage = torch.rand(200)
    memory = storage[: E * D].view(E, D)
    sums, total = torch.rand(E, D), torch.rand(E)
    return {
        "itself": (memory, memory, total),
        "a part": (memory, storage[3 : 3 + E * D].view(E, D), total),
        "a column": (memory, sums, memory[:, 0]),
        "the end": (memory, sums, storage[E * D - 1 : E * D - 1 + E]),
        "the other sum": (memory, sums, storage[:E]),
    }


@pytest.mark.parametrize("name", aliased())
def test_sums_in_the_memory_that_moves(name):
    memory, sums, total = aliased()[name]
    before = memory.clone()
    with pytest.raises(ValueError, match=r"(weighted_sum|total) lies in the same memory as memory.*\.clone\(\)"):
        memory_update_(memory, sums, total, 0.5)
    assert torch.equal(memory, before)
    memory_update_(memory, sums.clone(), total.clone(), 0.5)


@pytest.mark.parametrize(
    ("transformation", "batch"),
    [(torch.func.functionalize, ()), (torch.func.vmap, (2,))],
    ids=["functionalize", "vmap"],
)
def test_a_transformation_that_cannot_follow_an_update_says_so_itself(transformation, batch):
    """Its tensors have no addresses, which the check for overlap once compared."""
    update = transformation(lambda memory, sums, total: memory_update_(memory, sums, total, 0.5))
    with pytest.raises(RuntimeError, match="rbm::memory_update_"):
        update(*(torch.rand(*batch, *shape) for shape in ((E, D), (E, D), (E,))))


@pytest.mark.parametrize("update", [memory_update_, memory_update_op._eager_update])
@pytest.mark.parametrize("decay", [0.0, 0.5, 1.0])
def test_neighbours_in_one_storage_are_taken(update, decay):
    storage = torch.rand(100)
    memory, sums, total = storage[: E * D].view(E, D), storage[E * D : 2 * E * D].view(E, D), storage[2 * E * D :][:E]
    expected = memory.clone()
    memory_update_(expected, sums, total, decay)
    update(memory, sums, total, decay)
    torch.testing.assert_close(memory, expected)
    update(memory[:0], sums[:0], memory[:0, 0], decay)  # no elements overlap nothing


@pytest.mark.native
@pytest.mark.parametrize(
    ("operator", "name"),
    [
        (operator, name)
        for operator, name in tensor_arguments()
        if (operator, name) != ("memory_update_", "memory") and not operator.startswith("fold_experts")
    ],
)
def test_a_tensor_whose_memory_was_freed(operator, name):
    """Sharded training frees weights like this; PyTorch's own operators, which fold experts here, crash the process."""
    given = arguments()[operator]
    freed = given[name].clone(memory_format=torch.contiguous_format)
    freed.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=rf"rbm::{operator}: {name} has shape .* no memory behind it"):
        getattr(torch.ops.rbm, operator)(**given | {name: freed})


def without_memory():
    """Calls that ask for more than any machine has, each at another place. Their arguments are empty."""
    one = (torch.zeros(2, 1), torch.zeros(2, 1, dtype=torch.int32))
    no_entries = torch.zeros(3, dtype=torch.int32), torch.zeros(0, dtype=torch.int32), torch.zeros(0)
    no_pairs = torch.zeros(2, 0), torch.zeros(2, 0, dtype=torch.int32)
    most = 2**31 - 1
    ops = torch.ops.rbm
    huge = 2**20
    x, weight = torch.zeros(2, huge), torch.zeros(1).expand(huge, huge, huge)
    half = torch.zeros(1, dtype=torch.half).expand(huge, huge, huge)
    rows = torch.tensor([0, 1, 1], dtype=torch.int32), torch.zeros(1, dtype=torch.int32), torch.zeros(1)
    adjacent = torch.zeros(9).expand(huge, huge, 9)
    return {
        "copy": (ops.expert_matmul, x, weight, None, *one),
        "copy in float32": (ops.expert_matmul, x.half(), half, None, *one),
        "copy for sparse rows": (ops.sparse_expert_matmul, *rows, weight, None, None, *one),
        "gradient for sparse rows": (ops.sparse_expert_matmul_backward_weight, x, *rows, adjacent, None, *one),
        "result": (ops.expert_matmul_backward_weight, torch.zeros(2, 9999), torch.zeros(2, 9999), *one, most),
        "product of sizes": (ops.memory_statistics, torch.zeros(0, most), torch.zeros(0, 1), one[1][:0], most),
        "a thread": (ops.sparse_expert_matmul, *no_entries, torch.zeros(0, 2**20, most), None, None, *no_pairs),
        "packed": (ops.pack_experts, torch.zeros(most, most, 0), None),
    }


@pytest.mark.native
@pytest.mark.parametrize("name", without_memory())
def test_memory_that_runs_out_is_said(name):
    overcommit = Path("/proc/sys/vm/overcommit_memory")
    if name == "a thread" and overcommit.exists() and overcommit.read_text().strip() == "1":
        pytest.skip("this machine promises 1 TiB to whoever asks")
    operator, *given = without_memory()[name]
    with pytest.raises(RuntimeError, match="rbm: memory ran out: expected room for the result"):
        operator(*given)


@pytest.mark.native
@pytest.mark.parametrize("out_features", [-1, 2**31, 2**63 - 1])
@pytest.mark.parametrize("operator", ["routed_matmul_packed", "packed_feed_forward", "routed_matmul_int8"])
def test_outputs_that_int32_does_not_count(operator, out_features):
    given = arguments()[operator] | {"out_features": out_features}
    for device in ("cpu", "meta"):
        moved = {n: v.to(device) if torch.is_tensor(v) else v for n, v in given.items()}
        with pytest.raises(REFUSED, match=rf"rbm::{operator}: out_features is {out_features}, expected between 0 and"):
            getattr(torch.ops.rbm, operator)(**moved)


@pytest.mark.parametrize("num_experts", [2**20 + 1, 2**31 - 1])
def test_more_experts_than_can_be_ordered(num_experts):
    """The results and the table of binomials would take gigabytes for a single row."""
    refused = f"num_experts is {num_experts}, expected between 1 and 1048576: every tile lists all experts"
    for device in ("cpu", "meta"):
        experts = torch.zeros(1, 1, dtype=torch.int32, device=device)
        with pytest.raises(ValueError, match=refused):
            expert_order(experts, num_experts)
        with pytest.raises(REFUSED, match=refused):
            torch.ops.rbm.expert_order(experts, num_experts, 16)


@pytest.mark.native
def test_the_most_experts_that_can_be_ordered():
    order, listed, counts, _ = expert_order(torch.tensor([[2**20 - 1], [5]], dtype=torch.int32), 2**20)
    assert order.tolist() == [1, 0]
    assert listed[0, :3].tolist() == [5, 2**20 - 1, -1]
    assert counts.tolist() == [2]


@pytest.mark.native
@pytest.mark.parametrize(("k", "num_experts"), [(2**19, 2**20), (40, 100), (66, 67)])
def test_sets_that_64_bits_do_not_number_are_refused_before_memory_is_asked_for(k, num_experts):
    """A table of binomials for half of a million experts would take terabytes."""
    refused = rf"more than 2\^63 sets of up to {k} of {num_experts} experts, too many to rank: order them in"
    with pytest.raises(RuntimeError, match=refused):
        expert_order(torch.arange(k, dtype=torch.int32)[None], num_experts)


def test_more_choices_than_experts():
    """The message called the experts rows of a memory, which expert_order does not take."""
    with pytest.raises(ValueError, match=r"expert_order: k is 3, expected between 1 and the number of experts, 2$"):
        expert_order(torch.zeros(4, 3, dtype=torch.int32), 2)
