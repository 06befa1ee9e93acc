"""The ensemble: plain students with different seeds and averaged probabilities."""

import pytest
import torch

import rbm
from rbm.nn.parameters import count_parameters
from rbm.nn.students import EnsembleStudent, MLPStudent


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def learned(small_graph, quick, cache):
    config = quick.updated({"ensemble": {"members": 3}, "mlp": {"dropout": 0.4}, "distill": {"draw": "sample"}})

    def run(methods):
        return rbm.distill(small_graph, config=config, methods=methods, cache=cache, measure_latency=False)

    return run


def test_probabilities_are_the_mean_of_the_members():
    student = EnsembleStudent(4, in_channels=6, hidden_channels=5, out_channels=3)
    x = 3 * torch.randn(20, 6)
    mean = sum(member(x).softmax(-1) for member in student.members) / 4
    torch.testing.assert_close(student(x).softmax(-1), mean)
    torch.testing.assert_close(student(x), mean.log(), msg="its logits are their logarithms already")
    torch.testing.assert_close(student(x.to_sparse_csr()), student(x))


def test_the_first_member_is_the_plain_student_and_the_others_are_not(learned):
    plain = learned(["mlp"]).student
    result = learned(["ensemble"])
    first, *others = (member.state_dict() for member in result.student.members)
    assert all(torch.equal(first[name], tensor) for name, tensor in plain.state_dict().items())
    weights = [state["layers.0.weight"] for state in (first, *others)]
    for i, weight in enumerate(weights):
        assert not any(torch.allclose(weight, other, atol=1e-2) for other in weights[i + 1 :])


def test_its_accuracies_are_those_of_the_vote(learned, small_graph):
    small_graph.y[45:] = (small_graph.y[45:] + 1) % 3  # half of the test nodes, so that accuracies differ
    result = learned(["ensemble"])
    votes = result.student(result.student_inputs()).argmax(-1)
    right = (votes == small_graph.y).float()
    found = result.summary["ensemble"]
    assert found["val_accuracy"] - found["test_accuracy"] > 0.2
    assert found["test_accuracy"] == found["test_max"] == pytest.approx(right[small_graph.test_mask].mean().item())
    assert found["val_accuracy"] == pytest.approx(right[small_graph.val_mask].mean().item())
    assert found["epochs"] == 3 * 20


def test_all_parameters_are_active():
    alone = count_parameters(MLPStudent(6, 5, 3))[0]
    student = EnsembleStudent(3, in_channels=6, hidden_channels=5, out_channels=3)
    assert count_parameters(student) == (3 * alone, 3 * alone)
