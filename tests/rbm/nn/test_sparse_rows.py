"""Sparse rows give the results of dense ones, in the layer and in the students."""

import copy

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch.autograd import forward_ad

from rbm import FusedRbMLayer, MLPStudent, RbMStudent
from rbm.nn.half_rows import HalfPrecisionRows
from rbm.nn.kmeans_init import kmeans_memory
from rbm.nn.sparse_rows import Linear, SparseRows, as_rows, concat_columns, dropout, in_single_precision, packed
from rbm.serving.feature_files import open_features
from rbm.serving.prediction import predict_probabilities
from rbm_kernels.ops.sparse_expert_matmul.reference import csr

D, DENSE = 23, 4


def bags(rows=40, features=D, dtype=torch.float64):
    """Bags of words with an empty row, an explicit zero and an unused word, as CSR and dense."""
    dense = torch.rand(rows, features, dtype=dtype) * (torch.rand(rows, features) < 0.2)
    dense[rows // 2] = 0
    dense[:, 5] = 0
    crow, col, values = parts(dense.to_sparse_csr())
    values = values.clone()
    values[3] = 0
    sparse = csr(crow, col, values, dense.shape)
    return sparse, sparse.to_dense()


def parts(matrix):
    return matrix.crow_indices(), matrix.col_indices(), matrix.values()


def twins(**options):
    layer = FusedRbMLayer(D, 6, 5, 2, dtype=torch.float64, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return layer, copy.deepcopy(layer)


OPTIONS = {
    "defaults": {},
    "live gates": {"detach_gates": False},
    "no attention": {"input_attention": False},
    "no bias": {"bias": False},
    "temperature": {"gate_temperature": 0.3, "detach_gates": False},
    "raw memory": {"normalize_memory": False, "normalize_memory_input": False},
}


@pytest.mark.parametrize("split", [D, D - DENSE], ids=["sparse", "sparse and dense"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_layer_equals_dense_over_training_steps(options, split):
    """Outputs, routing, memory and every gradient, including those of dense columns and of the routing losses."""
    pair = twins(**options)
    for _ in range(3):
        _, x = bags()
        seen = []
        for layer, is_sparse in zip(pair, (True, False), strict=True):
            layer.zero_grad()
            columns = x[:, split:].clone().requires_grad_()
            rows = torch.cat([x[:, :split], columns], dim=1)
            if is_sparse:
                sparse = x[:, :split].to_sparse_csr()
                rows = sparse if split == D else (sparse, columns)
            y, routing = layer(rows, return_routing=True)
            (y.square().sum() + (routing.gates * routing.cosines.square()).sum()).backward()
            seen.append([y, *routing, *(p.grad for p in layer.parameters()), *([columns.grad] if split < D else [])])
        for got, expected in zip(*seen, strict=True):
            torch.testing.assert_close(got, expected)
        with torch.no_grad():
            for p, q in zip(*(layer.parameters() for layer in pair), strict=True):
                p -= 0.05 * p.grad
                q -= 0.05 * q.grad
    states = [layer.eval().state_dict() for layer in pair]
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        torch.testing.assert_close(value, states[1][name], msg=name)
    sparse, x = bags()
    torch.testing.assert_close(pair[0](sparse), pair[1](x))


def test_under_another_default_device():
    layer, _ = twins()
    sparse, dense = bags()
    with torch.device("meta"):
        y = layer.eval()(sparse)
    torch.testing.assert_close(y, layer(dense))


def test_empty_rows_and_empty_batches():
    layer, _ = twins()
    sparse, _ = bags()
    _, routing = layer(sparse, return_routing=True)
    empty = sparse.shape[0] // 2
    assert routing.cosines[empty].tolist() == [0.0, 0.0]
    assert routing.experts[empty].tolist() == [0, 1], "ties go to the lower expert"
    none = SparseRows(sparse)[:0]
    layer.eval()
    before = layer.memory.clone()
    layer.train()
    y, routing = layer(none, return_routing=True)
    assert y.shape == (0, 6)
    assert routing.gates.shape == (0, 2)
    y.sum().backward()
    layer.eval()
    assert torch.equal(layer.memory, before)


def test_a_short_row_has_no_gradient_and_a_row_that_is_not_finite_leaves_the_memory_alone():
    x = bags(12)[1].clone()
    x[4] *= 1e-14
    x[7, 0], x[8, 1], x[9, D - 1] = float("nan"), float("inf"), float("nan")
    pair = twins()
    columns = [x[:, D - DENSE :].clone().requires_grad_() for _ in pair]
    inputs = ((x[:, : D - DENSE].to_sparse_csr(), columns[0]), torch.cat([x[:, : D - DENSE], columns[1]], dim=1))
    for layer, rows in zip(pair, inputs, strict=True):
        _, routing = layer(rows, return_routing=True)
        finite = torch.tensor([b not in (7, 8, 9) for b in range(12)])
        routing.cosines[finite].sum().backward()
        layer.eval()
    assert torch.isfinite(pair[0].memory).all()
    torch.testing.assert_close(pair[0].memory, pair[1].memory)
    torch.testing.assert_close(columns[0].grad[finite], columns[1].grad[finite])


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_index_dtypes_and_wrapped_rows_give_the_same_bits(index_dtype):
    layer = twins()[0].eval()
    sparse, _ = bags()
    crow, col, values = parts(sparse)
    same = csr(crow.to(index_dtype), col.to(index_dtype), values, sparse.shape)
    assert torch.equal(layer(same), layer(SparseRows(sparse)))


def test_float32_routes_as_dense_does_and_autocast_casts_the_result():
    layer = FusedRbMLayer(D, 6, 5, 2).eval()
    sparse, x = bags(dtype=torch.float32)
    y, routing = layer(sparse, return_routing=True)
    expected, dense_routing = layer(x, return_routing=True)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(routing.cosines, dense_routing.cosines)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside, inside_routing = layer((sparse.to_dense()[:, :20].to_sparse_csr(), x[:, 20:]), return_routing=True)
    assert inside.dtype == torch.bfloat16
    assert torch.equal(inside_routing.experts, routing.experts)
    torch.testing.assert_close(inside.float(), expected, atol=5e-2, rtol=5e-2)


def test_under_autocast_the_memory_moves_as_without_and_float64_stays():
    _, x = bags()
    pair = twins()
    for layer in pair:
        layer.float()
    rows = (x[:, : D - DENSE].float().to_sparse_csr(), x[:, D - DENSE :].float())
    pair[0](rows)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pair[1](rows)
        assert twins()[0].eval()(x[:, :D].to_sparse_csr()).dtype == torch.float64
    torch.testing.assert_close(pair[1].eval().memory, pair[0].eval().memory)


def test_the_memory_takes_no_tangent():
    _, x = bags()
    layer, twin = twins()
    sparse, columns = x[:, : D - DENSE].to_sparse_csr(), x[:, D - DENSE :]
    with forward_ad.dual_level():
        y = layer((sparse, forward_ad.make_dual(columns, torch.ones_like(columns))))
        assert forward_ad.unpack_dual(y).tangent is not None
        assert forward_ad.unpack_dual(layer.pending_sum).tangent is None
    twin((sparse, columns))
    torch.testing.assert_close(layer.eval().memory, twin.eval().memory)


def test_dropout_takes_stored_entries_alone_and_spares_the_router():
    sparse, x = bags(400)
    rows = SparseRows(sparse, torch.ones(400, 2, dtype=torch.float64))
    dropped = dropout(rows, 0.25, True)
    kept = dropped.values[rows.values != 0] != 0
    assert 0.7 < kept.double().mean() < 0.8
    torch.testing.assert_close(dropped.values, torch.where(dropped.values != 0, rows.values / 0.75, 0.0))
    assert set(dropped.dense.unique().tolist()) == {0.0, 1 / 0.75}
    assert dropout(rows, 0.25, False) is rows
    assert torch.equal(dropout(x, 0.25, False), x)

    layer = FusedRbMLayer(D, 6, 5, 2, dtype=torch.float64, dropout=0.5)
    layer.clone_expert(0)
    torch.manual_seed(5)
    y, routing = layer(sparse, return_routing=True)
    torch.manual_seed(5)
    masked = dropout(SparseRows(sparse), 0.5, True).to_dense()
    # Equal experts and gates that sum to one: one linear map of the masked row, so the experts shared a mask.
    torch.testing.assert_close(y, 2.0 * (1.1 * masked @ layer.weight[0].T + layer.bias[0]))
    layer.pending_total.zero_()  # keep the memory fixed
    torch.testing.assert_close(routing.cosines, layer(x, return_routing=True)[1].cosines)


@pytest.mark.parametrize(
    "index",
    [slice(3, 9), slice(30, None, 2), torch.tensor([7, 0, 7, 20]), torch.arange(40) % 3 == 0, slice(0, 0)],
    ids=["slice", "step", "indices", "mask", "nothing"],
)
def test_indexing_rows(index):
    sparse, x = bags()
    rows = SparseRows(sparse, x[:, :3])[index]
    torch.testing.assert_close(rows.to_dense(), torch.cat([x, x[:, :3]], dim=1)[index])
    assert rows.shape == rows.to_dense().shape
    torch.testing.assert_close(rows.squared_norms(), rows.to_dense().square().sum(-1))


@pytest.mark.parametrize("index", [3, torch.tensor(3), None, torch.tensor([[1, 2]])], ids=repr)
def test_an_index_that_selects_no_list_of_rows_is_refused(index):
    sparse, x = bags()
    for rows in (SparseRows(sparse, x[:, :3]), HalfPrecisionRows(x.half()), HalfPrecisionRows(x.half(), x[:, :3])):
        expected = rf"the index of {type(rows).__name__} is .*, expected a slice.*rows\[i : i \+ 1\]"
        with pytest.raises(TypeError, match=expected):
            rows[index]


def test_conversions():
    sparse, x = bags()
    rows = SparseRows(sparse)
    assert as_rows(rows) is rows
    assert as_rows(x) is x
    assert torch.equal(rows.to_csr().to_dense(), x)
    both = as_rows([sparse, x[:, :3]]).to(torch.float32)
    assert both.values.dtype == both.dense.dtype == torch.float32
    assert in_single_precision(x.half()).dtype == torch.float32
    assert "SparseRows([40, 23]" in repr(rows)


def test_columns_are_added_on_the_right():
    sparse, x = bags()
    rows = concat_columns((sparse, x[:, :3]), torch.ones(40, 2))
    torch.testing.assert_close(rows.to_dense(), torch.cat([x, x[:, :3], torch.ones(40, 2, dtype=x.dtype)], dim=1))
    with pytest.raises(ValueError, match=r"shape \[1, 2\], expected \[40, features\]"):
        concat_columns(sparse, torch.ones(1, 2))


def csr_of(col, dtype=torch.float64):
    return csr(torch.tensor([0, 2, 2, 4]), torch.tensor(col), torch.ones(4, dtype=dtype), (3, D))


BAD = {
    "unsorted": (csr_of([1, 0, 2, 3]), ValueError, r"columns of row 0 do not ascend \(column 0 after 1\)"),
    "unsorted after an empty row": (
        csr(torch.tensor([0, 0, 4]), torch.tensor([0, 1, 3, 2]), torch.ones(4).double(), (2, D)),
        ValueError,
        r"columns of row 1 do not ascend \(column 2 after 3\)",
    ),
    "repeated": (csr_of([0, 1, 4, 4]), ValueError, r"columns of row 2 do not ascend \(column 4 after 4\)"),
    "COO": (torch.eye(D).to_sparse(), TypeError, "expected a CSR tensor"),
    "CSC": (torch.eye(D).to_sparse_csc(), TypeError, "expected a CSR tensor"),
    "batched": (torch.eye(D).expand(2, D, D).to_sparse_csr(), ValueError, r"shape \[2, 23, 23\], expected \[rows"),
    "half": (csr_of([0, 1, 2, 3], torch.float16), TypeError, "dtype torch.float16, expected torch.float32 or"),
    "other dtype": (csr_of([0, 1, 2, 3], torch.float32), TypeError, "dtype torch.float32, expected torch.float64"),
    "gradient": (csr_of([0, 1, 2, 3]).requires_grad_(), ValueError, "use features.detach"),
    "width": (torch.eye(5).double().to_sparse_csr(), ValueError, r"input has shape \[5, 5\], expected \[\.\.\., 23\]"),
    "rows": ((csr_of([0, 1, 2, 3]), torch.zeros(4, 1).double()), ValueError, r"shape \[4, 1\], expected \[3, features"),
    "dense dtype": ((csr_of([0, 1, 2, 3]), torch.zeros(3, 1)), TypeError, "dense features have dtype torch.float32"),
    "two sparse": ((csr_of([0, 1, 2, 3]),) * 2, TypeError, "expected a dense tensor"),
    "two dense": ((torch.zeros(3, 1), torch.zeros(3, 1)), TypeError, "expected a CSR tensor"),
    "three": ((torch.zeros(3, 1),) * 3, ValueError, "features are 3 tensors, expected the pair"),
}


@pytest.mark.parametrize(("rows", "error", "message"), BAD.values(), ids=BAD.keys())
def test_bad_rows(rows, error, message):
    with pytest.raises(error, match=message):
        twins()[0](rows)


@pytest.mark.parametrize("added", [0, 2])
def test_a_linear_map_refuses_rows_of_another_width(added):
    sparse, x = bags()
    rows = SparseRows(sparse, x[:, :added] if added else None)
    with pytest.raises(ValueError, match=rf"sparse rows have shape \[40, {D + added}\], expected \[\*, 9\]"):
        Linear(9, 3).double()(rows)


@pytest.mark.parametrize("kind", [RbMStudent, MLPStudent])
def test_students_take_features_and_encodings(kind):
    student = kind(D + DENSE, 8, 3).double()
    sparse, x = bags()
    encodings = torch.randn(40, DENSE, dtype=torch.float64)
    whole = torch.cat([x, encodings], dim=1)
    for pretraining in (True, False):
        student.pretraining = pretraining
        torch.testing.assert_close(student.eval()((sparse, encodings)), student(whole))
        gradients = []
        for features in ((sparse, encodings), whole):
            twin = copy.deepcopy(student).train()  # a training forward updates the memory
            twin(features).square().sum().backward()
            gradients.append([p.grad for p in twin.parameters() if p.grad is not None])
        for got, expected in zip(*gradients, strict=True):
            torch.testing.assert_close(got, expected)
    batches = predict_probabilities(student.eval(), (sparse, encodings), batch_size=7)
    torch.testing.assert_close(batches, torch.softmax(student(whole), dim=-1))


def test_kmeans_places_the_memory_where_dense_rows_do():
    # Three topics with disjoint words, so that rounding cannot move a centre.
    topic = torch.arange(60) % 3
    x = (0.1 + torch.rand(60, 24)) * (torch.arange(24) % 3 == topic[:, None])
    expected = kmeans_memory(x, 3, seed=1)
    torch.testing.assert_close(kmeans_memory(x.to_sparse_csr(), 3, seed=1), expected)
    torch.testing.assert_close(kmeans_memory((x[:, :15].to_sparse_csr(), x[:, 15:]), 3, seed=1), expected)
    x[3, 0] = float("nan")
    with pytest.raises(ValueError, match="rows hold NaN or infinity"):
        kmeans_memory(x.to_sparse_csr(), 3)


def test_reads_sparse_features_from_a_file(tmp_path):
    _, x = bags(dtype=torch.float32)
    matrix = sp.csr_matrix(x.numpy())
    sp.save_npz(tmp_path / "rows.npz", matrix)
    (rows,) = open_features(tmp_path / "rows.npz", D).pieces()
    assert isinstance(rows, SparseRows)
    torch.testing.assert_close(rows.to_dense(), x)
    sp.save_npz(tmp_path / "coo.npz", sp.coo_matrix((np.ones(3), ([0, 0, 1], [7, 2, 7])), shape=(2, D)))
    (rows,) = open_features(tmp_path / "coo.npz", D).pieces()
    assert rows.col.tolist() == [2, 7, 7]
    with pytest.raises(ValueError, match=r"shape \[40, 23\], expected \[\*, 24\]"):
        open_features(tmp_path / "rows.npz", D + 1)
    matrix.data[matrix.indptr[4]] = np.inf
    sp.save_npz(tmp_path / "rows.npz", matrix)
    with pytest.raises(ValueError, match=r"row 4 holds NaN or infinity \(1 such rows from 0 to 39\)"):
        list(open_features(tmp_path / "rows.npz", D).pieces())


def test_rows_are_packed_where_that_is_faster():
    x = torch.zeros(1024, 1024)
    x[:, :20] = torch.randn(1024, 20)
    assert isinstance(packed(x), SparseRows)
    assert torch.equal(packed(x).to_dense(), x)
    assert isinstance(packed(x[:1023]), torch.Tensor), "too few numbers"
    assert isinstance(packed(x.double().requires_grad_()), SparseRows)
    x[:, 20:22] = 1.0
    assert packed(x) is x, "too many are not zero"
    rows = SparseRows(x.to_sparse_csr())
    assert packed(rows) is rows


def test_a_temperature_that_float32_does_not_hold_is_refused_as_for_dense_rows():
    layer = FusedRbMLayer(D, 5, 4, 2)
    layer.gate_temperature = 1e-50
    for rows in (torch.randn(3, D), torch.randn(3, D).to_sparse_csr()):
        with pytest.raises(ValueError, match="temperature is 1e-50, expected a positive number between"):
            layer(rows)
