"""Ray, where it is installed: a cluster that was connected to before stays connected."""

from collections.abc import Iterator
from contextlib import contextmanager


def check_ray(part: str) -> None:
    """Raise ValueError where Ray, or the ``part`` of it that is needed (``tune``, ``data``), is not installed."""
    try:
        __import__(f"ray.{part}")
    except ImportError as error:
        raise ValueError("ray is asked for, but not installed: pip install 'rbm-kernels[ray]'") from error


@contextmanager
def connected() -> Iterator[None]:
    """Connected to Ray's cluster, the one of ``RAY_ADDRESS`` or one of this machine; as before afterwards."""
    import ray

    before = ray.is_initialized()
    if not before:
        ray.init(include_dashboard=False, log_to_driver=False)
    try:
        yield
    finally:
        if not before:
            ray.shutdown()
