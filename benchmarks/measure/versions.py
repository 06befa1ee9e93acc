"""Checkouts of this package that are compared with each other."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def commit_of(tree: Path) -> str:
    """The commit of a checkout."""
    command = ["git", "-C", str(tree), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def run_worker(script: str, arguments: list[str], tree: Path, **environment: str) -> Any:
    """What a script prints as its last line, in JSON, with the package of a checkout.

    The script is the present one: before it knows that it is no worker, it must not import ``benchmarks``, which would
    be the checkout's.
    """
    environment = {**os.environ, "PYTHONPATH": str(tree), **environment}
    command = [sys.executable, script, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment, cwd=tree)
    return json.loads(done.stdout.splitlines()[-1])
