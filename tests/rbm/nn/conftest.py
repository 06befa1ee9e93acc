import pytest

from rbm.nn import folded_weights, scaled_experts


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
