"""Pytest plugin of ``gpu.sh`` (``-p benchmarks.gpu.broken_device``): ends a process that lost its GPU.

After an illegal memory access or a device-side assertion, every later CUDA call of the process fails, so all remaining
tests would fail because of one. Instead, the process ends once the test's report is sent. pytest-xdist (for a suite,
``gpu.sh`` itself) then starts a new process for the remaining tests.
"""

import os
import sys
from collections.abc import Iterator

import pytest
import torch

STATUS = 3


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin, except in a process that only starts others and runs no tests."""
    if hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None):
        config.pluginmanager.register(_BrokenDevice())


class _BrokenDevice:
    def __init__(self) -> None:
        self._has_failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._has_failed |= report.failed

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        """Wrap the whole test, so that its reports are sent before the process ends."""
        self._has_failed = False
        try:
            return (yield)
        finally:
            if self._has_failed and (reason := error()):
                print(f"\nthe GPU is lost to this process, which ends: {reason}", file=sys.stderr, flush=True)
                sys.stdout.flush()
                os._exit(STATUS)


def error() -> str:
    """CUDA's error message if it no longer works in this process; otherwise an empty string."""
    if not torch.cuda.is_initialized():
        return ""
    try:
        torch.cuda.synchronize()
    except RuntimeError as broken:
        return str(broken).partition("\n")[0]
    return ""
