import pytest

from rbm.nn import folded_weights, packed_student, scaled_experts


@pytest.fixture
def folds(monkeypatch):
    """A list that grows by one whenever experts are folded for inference."""
    return _counted(folded_weights, monkeypatch)


@pytest.fixture
def folds_with_gradients(monkeypatch):
    """A list that grows by one whenever experts are folded in a forward with gradients."""
    return _counted(scaled_experts, monkeypatch)


def _counted(module, monkeypatch):
    made = []
    fold = module.fold
    monkeypatch.setattr(module, "fold", lambda *arguments: made.append(None) or fold(*arguments))
    return made


@pytest.fixture
def calls(monkeypatch):
    """The rows of each call of the operator."""
    made = []

    def counted(x, *arguments):
        made.append(len(x))
        return operator(x, *arguments)

    operator = packed_student.packed_network
    monkeypatch.setattr(packed_student, "packed_network", counted)
    return made
