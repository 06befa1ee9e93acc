"""Connections to a Ray cluster. An existing connection of the process is kept."""

from collections.abc import Iterator
from contextlib import contextmanager


def check_ray(part: str) -> None:
    """Raise ValueError if Ray, or the required ``part`` of it (``tune``, ``data``), is not installed."""
    try:
        __import__(f"ray.{part}")
    except ImportError as error:
        raise ValueError("ray is asked for, but not installed: pip install 'rbm-kernels[ray]'") from error


@contextmanager
def connected() -> Iterator[None]:
    """Connect to the Ray cluster of ``RAY_ADDRESS``, or start one on this machine; restore the state afterwards."""
    import ray

    before = ray.is_initialized()
    if not before:
        ray.init(include_dashboard=False, log_to_driver=False)
    try:
        yield
    finally:
        if not before:
            ray.shutdown()
