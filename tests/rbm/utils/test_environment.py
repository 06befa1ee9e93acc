"""The date and the versions that are recorded with results."""

import datetime

import numpy

from rbm.utils.environment import package_version, today


def test_the_date_is_an_iso_date():
    age = datetime.datetime.now(tz=datetime.timezone.utc).date() - datetime.date.fromisoformat(today())
    assert age in (datetime.timedelta(0), datetime.timedelta(days=1))


def test_the_version_of_a_package():
    assert package_version("numpy") == numpy.__version__
    assert package_version("no-such-package-of-ours") == "not installed"
