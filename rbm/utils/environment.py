"""What is recorded with a result: the date, and the versions of packages."""

import datetime
from importlib.metadata import PackageNotFoundError, version


def today() -> str:
    """The date in UTC, such as ``2026-01-31``."""
    return datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat()


def package_version(package: str) -> str:
    """The version of a package, or ``"not installed"``."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
