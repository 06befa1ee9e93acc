"""Memory vectors start at the K-means centres of what each router sees, or at the means of given groups."""

import re

import pytest
import torch
from sklearn.cluster import KMeans, MiniBatchKMeans
from torch.nn import functional as F

from rbm import RbMStudent
from rbm.nn.kmeans_init import group_memory, group_nodes, initialize_memory, kmeans_memory, sample_inputs
from rbm.nn.sparse_rows import SparseRows


def clusters(rows_each=20):
    centers = F.normalize(torch.randn(3, 8), dim=-1)
    noisy = centers.repeat_interleave(rows_each, 0) + 0.02 * torch.randn(3 * rows_each, 8)
    return centers, noisy * torch.rand(3 * rows_each, 1).add(0.1)


def test_finds_directions_whatever_the_lengths():
    centers, rows = clusters()
    memory = kmeans_memory(rows, 3)
    torch.testing.assert_close(memory.norm(dim=-1), torch.ones(3))
    assert (F.cosine_similarity(centers[:, None], memory[None], dim=-1).max(dim=1).values > 0.999).all()


def test_is_scikit_learns_kmeans_and_repeatable():
    _, rows = clusters()
    expected = KMeans(3, n_init=10, random_state=4).fit(F.normalize(rows, dim=-1).numpy()).cluster_centers_
    memory = kmeans_memory(rows, 3, seed=4)
    torch.testing.assert_close(memory, F.normalize(torch.from_numpy(expected), dim=-1))
    assert torch.equal(memory, kmeans_memory(rows, 3, seed=4))


def test_sparse_rows_are_placed_as_dense_ones():
    features, positions = F.dropout(torch.randn(40, 8), 0.6), 3 * torch.randn(40, 2)
    expected = kmeans_memory(torch.cat([features, positions], dim=1), 3)
    pair = SparseRows(features.to_sparse_csr(), positions)
    torch.testing.assert_close(kmeans_memory(pair, 3), expected, atol=1e-5, rtol=0)


def test_groups_are_scikit_learns_of_the_seed():
    rows = torch.randn(50, 5)
    for seed in (0, 4):
        expected = KMeans(6, n_init=10, random_state=seed).fit_predict(rows.numpy())
        assert group_nodes(rows, 6, seed=seed).tolist() == expected.tolist()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("rows", "groups"), [(torch.ones(50, 3), "1 group"), (torch.eye(4).repeat(9, 1), "4 groups")])
def test_few_distinct_rows_are_reported_in_our_words(caplog, rows, groups):
    assert kmeans_memory(rows, 6).shape == (6, rows.shape[1])
    assert f"K-means finds only {groups} among the rows of a router with 6 experts" in caplog.text
    caplog.clear()
    assert len(group_nodes(rows, 6).unique()) == int(groups.split()[0])
    assert f"K-means finds only {groups} among the rows of a router with 6 experts" in caplog.text
    caplog.clear()
    kmeans_memory(torch.randn(50, 3), 6)
    group_nodes(torch.randn(50, 3), 6)
    assert not caplog.text


def test_max_rows_fits_on_a_sample():
    _, rows = clusters(200)
    memory = kmeans_memory(rows, 3, max_rows=60)
    assert not torch.equal(memory, kmeans_memory(rows, 3))
    assert (F.cosine_similarity(kmeans_memory(rows, 3)[:, None], memory[None], dim=-1).max(1).values > 0.99).all()


def test_as_many_rows_as_the_limit_take_mini_batches():
    """A sample of the inputs has exactly as many."""
    rows = torch.randn(50, 5)
    unit = F.normalize(rows, dim=-1).numpy()
    for max_rows, kind in ((50, MiniBatchKMeans), (51, KMeans)):
        expected = torch.from_numpy(kind(3, n_init=10, random_state=0).fit(unit).cluster_centers_)
        torch.testing.assert_close(kmeans_memory(rows, 3, max_rows=max_rows), F.normalize(expected, dim=-1))


def test_layer_by_layer_through_layers_that_are_already_routed():
    student = RbMStudent(8, 6, 3, num_layers=2, num_experts=3, top_k=2, norm="batch")
    _, x = clusters()
    student.train()
    initialize_memory(student, x, seed=2)
    assert student.training
    first, second = student.layers
    torch.testing.assert_close(first.memory, kmeans_memory(x, 3, seed=2))
    student.eval()
    hidden = F.relu(student.norms[0](first(x)))
    torch.testing.assert_close(second.memory, kmeans_memory(hidden, 3, seed=2))


def test_no_direction_keeps_the_random_start(caplog):
    student = RbMStudent(8, 6, 3, num_layers=1, num_experts=3, top_k=2)
    before = student.layers[0].memory.clone()
    initialize_memory(student, torch.zeros(10, 8))
    assert "finds only 1 group " in caplog.text
    assert torch.equal(student.layers[0].memory, before)


def test_bad_rows():
    with pytest.raises(ValueError, match="num_experts is 4 but there are only 3 rows"):
        kmeans_memory(torch.randn(3, 2), 4)
    with pytest.raises(ValueError, match="max_rows is 3, expected at least 4, the number of experts"):
        kmeans_memory(torch.randn(3, 2), 4, max_rows=3)
    with pytest.raises(ValueError, match="rows hold NaN or infinity"):
        kmeans_memory(torch.tensor([[1.0, float("nan")], [1.0, 2.0]]), 2)


@pytest.mark.parametrize("sparse", [False, True])
def test_a_group_is_placed_at_the_mean_of_its_directions(sparse):
    _, rows = clusters()
    groups = torch.arange(60) % 4
    memory = group_memory(rows.to_sparse_csr() if sparse else rows, groups, 5)
    unit = F.normalize(rows, dim=-1)
    expected = torch.stack([F.normalize(unit[groups == group].mean(0), dim=-1) for group in range(4)])
    torch.testing.assert_close(memory[:4], expected)
    assert not memory[4].any(), "nobody is in the last group"


def test_nodes_are_grouped_by_what_tells_them_apart():
    rows = torch.eye(3).repeat_interleave(10, 0) + 0.01 * torch.randn(30, 3)
    groups = group_nodes(rows, 3)
    assert groups.dtype == torch.int64
    assert [len(set(part.tolist())) for part in groups.split(10)] == [1, 1, 1]
    assert len(set(groups.tolist())) == 3
    with pytest.raises(ValueError, match="num_experts is 31 but there are only 30 rows to group"):
        group_nodes(rows, 31)
    with pytest.raises(ValueError, match="NaN or infinity"):
        group_nodes(rows / 0, 3)


def test_groups_place_every_layer_and_are_sampled_as_the_rows_are():
    student = RbMStudent(8, 6, 3, num_layers=2, num_experts=3, top_k=2).eval()
    _, x = clusters()
    groups = torch.arange(60) // 20
    initialize_memory(student, x, groups=groups)
    first, second = student.layers
    torch.testing.assert_close(first.memory, group_memory(x, groups, 3))
    torch.testing.assert_close(second.memory, group_memory(F.relu(first(x)), groups, 3))
    initialize_memory(student, x, groups=groups, max_rows=30, seed=1)
    near = F.cosine_similarity(first.memory, group_memory(x, groups, 3), dim=-1)
    assert (near > 0.99).all(), "each sampled row still has its own group"
    assert not torch.equal(first.memory, group_memory(x, groups, 3))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"seed": -1}, ValueError, "seed is -1, expected at least 0"),
        ({"seed": 2**32}, ValueError, "seed is 4294967296, expected below 2^32"),
        ({"seed": None}, TypeError, "seed is None, expected a whole number"),
        ({"max_rows": 0}, ValueError, "max_rows is 0, expected at least 1"),
        ({"max_rows": 30.0}, TypeError, "max_rows is 30.0, expected a whole number; use int(max_rows)"),
        ({"groups": [0] * 60}, TypeError, "groups are a list, expected an int64 tensor [B]"),
        ({"groups": torch.zeros(60)}, TypeError, "groups are torch.float32 [60], expected an int64 tensor [B]"),
        ({"groups": torch.zeros(60, 1).long()}, TypeError, "groups are torch.int64 [60, 1], expected an int64 tensor"),
        ({"groups": torch.arange(60) % 4}, ValueError, "groups hold 0 to 3, expected between 0 and 2, the experts of"),
        ({"groups": torch.arange(60) % 3 - 1}, ValueError, "groups hold -1 to 1, expected between 0 and 2, the exp"),
    ],
)
def test_arguments(options, error, message):
    student = RbMStudent(8, 6, 3, num_layers=2, num_experts=3, top_k=2)
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        initialize_memory(student, clusters()[1], **options)


def test_rows_are_drawn_by_the_seed_and_stay_in_order():
    first, again, other = (sample_inputs(torch.arange(100), 30, seed).tolist() for seed in (0, 0, 1))
    assert first == again != other
    for drawn in (first, other):
        assert len(drawn) == 30
        assert drawn == sorted(set(drawn))
