"""Trained models from the cache, if an earlier run trained the same model."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from rbm.utils.cache import Cache
from rbm.utils.progress import Progress


def cached_phase(
    phase: str,
    model: nn.Module,
    settings: dict[str, Any],
    inputs: Iterable[Tensor],
    train: Callable[[], dict[str, Any]],
    cache: Cache,
    progress: Progress,
) -> dict[str, Any]:
    """Train a model, or take it from the cache if it was trained from the same settings and tensors; return its result.

    Args:
        phase: what is trained, such as ``"teacher"``; the file name begins with it.
        model: the untrained model. Afterwards it has the trained state and is in eval mode.
        settings: JSON values that the trained state and the result depend on.
        inputs: tensors that they depend on.
        train: trains ``model`` and returns its result as JSON values.
        cache: where models are looked up and stored.
        progress: gets a message if the model was in the cache.
    """
    known = True

    def compute() -> tuple[dict[str, Tensor], dict[str, Any]]:
        nonlocal known
        known = False
        result = train()
        return model.state_dict(), result

    state, result = cache.tensors_with_values(phase, settings, inputs, compute)
    model.load_state_dict(state)
    model.eval()
    if known:
        progress.say(f"{phase}: trained before, taken from {cache.folder}")
    return result
