"""Pytest plugin of ``gpu.sh`` (``-p benchmarks.gpu.broken_device``): a process that lost its GPU ends after the test.

After an access outside of all memory, or an assertion on the device, every later call of CUDA in the process fails:
each test that is left would fail for the fault of one. The process ends instead, with the test's report sent;
pytest-xdist, or ``gpu.sh`` itself for a suite, gives what is left to a new one.
"""

import os
import sys
from collections.abc import Iterator

import pytest
import torch

STATUS = 3


def pytest_configure(config: pytest.Config) -> None:
    """Not in a process that starts others and tests nothing."""
    if hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None):
        config.pluginmanager.register(_BrokenDevice())


class _BrokenDevice:
    def __init__(self) -> None:
        self._has_failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._has_failed |= report.failed

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        """Around the whole test: its reports are out when the process ends."""
        self._has_failed = False
        try:
            return (yield)
        finally:
            if self._has_failed and (told := error()):
                print(f"\nthe GPU is lost to this process, which ends: {told}", file=sys.stderr, flush=True)
                sys.stdout.flush()
                os._exit(STATUS)


def error() -> str:
    """What CUDA says where it serves this process no more; nothing where it does."""
    if not torch.cuda.is_initialized():
        return ""
    try:
        torch.cuda.synchronize()
    except RuntimeError as broken:
        return str(broken).partition("\n")[0]
    return ""
