"""Fixtures of the tests of ``rbm``."""

import sys
from collections.abc import Callable

import pytest
from rbm_process import forking


@pytest.fixture
def command(monkeypatch, capsys) -> Callable[..., tuple[int, str, str]]:
    """Run a command of ``rbm``; returns exit status, standard output and standard error, line breaks folded."""
    from rbm.cli import main

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["rbm", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        captured = capsys.readouterr()
        return stop.value.code or 0, captured.out, " ".join(captured.err.split())

    return run


@pytest.fixture
def forked_workers(monkeypatch) -> None:
    """Fork worker processes from one that has imported the package, for tests that do not test how workers start."""
    monkeypatch.setattr("rbm.utils.parallel.get_context", forking)
