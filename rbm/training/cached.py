"""A trained model from the cache, where an earlier run trained the same one."""

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
    """Train a model, unless the cache holds one trained from the same settings and tensors; its result.

    Args:
        phase: what is trained, such as ``"teacher"``; the beginning of the file's name.
        model: untrained. Afterwards it has the trained state, and is in eval mode.
        settings: what the trained state and the result depend on, values that JSON can hold.
        inputs: tensors that they depend on.
        train: trains ``model`` and returns its result, values that JSON can hold.
        cache: where it is looked for and kept.
        progress: told where nothing is trained.
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
