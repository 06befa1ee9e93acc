"""Trained models from the cache."""

import torch
from torch import nn

from rbm.training.cached import cached_phase
from rbm.utils.cache import Cache
from rbm.utils.progress import Progress


def test_a_model_from_the_cache_is_the_trained_one_in_eval_mode(tmp_path):
    def phase(settings):
        model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))

        def train():
            trained.append(settings)
            nn.init.constant_(model[0].weight, float(len(trained)))
            return {"val_accuracy": 0.1 * len(trained)}

        given = settings, [torch.ones(3)]
        result = cached_phase("teacher", model, *given, train, Cache(tmp_path), progress)
        return model, result

    trained, said, progress = [], [], Progress(None)
    progress.say = said.append
    (first, known), (second, again), (third, other) = (phase({"lr": lr}) for lr in (0.1, 0.1, 0.2))
    assert trained == [{"lr": 0.1}, {"lr": 0.2}]
    assert said == [f"teacher: trained before, taken from {tmp_path}"]
    assert known == again == {"val_accuracy": 0.1}
    assert other == {"val_accuracy": 0.2}
    assert all(torch.equal(first.state_dict()[name], tensor) for name, tensor in second.state_dict().items())
    assert third[0].weight.unique().item() == 2
    assert not any(module.training for model in (first, second, third) for module in model.modules())
