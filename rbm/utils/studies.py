"""Optuna's trials in a file, for searches that can be resumed."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optuna.storages import BaseStorage


def import_optuna() -> Any:
    """Import Optuna, which is an optional dependency.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import optuna
    except ImportError as error:
        raise ValueError("a search needs Optuna, which is not installed: pip install 'rbm-kernels[tune]'") from error
    return optuna


@contextmanager
def open_trials(file: Path, advice: str) -> Iterator["BaseStorage"]:
    """Open Optuna's storage in an SQLite file, and silence Optuna's own log while it is open.

    Args:
        file: created if missing; its folder must exist.
        advice: what to do if the file is damaged, for the message.

    Raises:
        ValueError: Optuna is not installed.
        OSError: the file is damaged or cannot be written.
    """
    optuna = import_optuna()
    import sqlite3  # which some builds of Python lack

    from sqlalchemy.exc import SQLAlchemyError  # a dependency of Optuna

    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = None
    try:
        # The file is not in the address, where ?, % and {} would have a meaning.
        connect = partial(sqlite3.connect, file.resolve(), check_same_thread=False)
        storage = optuna.storages.RDBStorage("sqlite:///trials", engine_kwargs={"creator": connect})
        yield storage
    except (SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        raise OSError(
            f"{file} could not be read or written: {reason}; if the disk is neither full nor read-only, the file is"
            f" damaged: {advice}"
        ) from error
    finally:
        optuna.logging.set_verbosity(verbosity)
        if storage is not None:
            storage.remove_session()
            storage.engine.dispose()
