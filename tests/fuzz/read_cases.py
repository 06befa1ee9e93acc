"""Reads mutated files one after the other, in a process that may be killed by one.

A line ``format seed`` on standard input makes a case; a line of JSON on standard output tells its outcome. By itself it
replays one case: ``python tests/fuzz/read_cases.py FORMAT SEED [FOLDER]``; what is read is kept in FOLDER.
"""

import importlib
import json
import resource
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from random import Random

from formats import FORMATS
from mutations import mutate

MEMORY = 12 * 2**30  # bytes of address space: libraries use some before anything is read
SECONDS = 20
GROWTH = 1024  # MiB by which a case may exceed all earlier ones
# The errors that the command line reports in one sentence. Some ValueErrors of other packages name no file.
ALLOWED = (ValueError, TypeError, OSError, ModuleNotFoundError)


class HangError(BaseException):
    """A case took longer than SECONDS."""


def _stop(*_) -> None:
    raise HangError


def run(name: str, seed: int, folder: Path) -> dict[str, str]:
    """The outcome of a case: ``"taken"``, ``"refused"``, or ``"fault"`` with a traceback."""
    before = _peak()
    answer = _read(name, seed, folder)
    if _peak() - before > GROWTH:
        answer = {"outcome": "fault", "why": f"it took {_peak() - before} MiB of memory; {answer}"}
    return answer


def _peak() -> int:
    """The peak memory of this process in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def _read(name: str, seed: int, folder: Path) -> dict[str, str]:
    form, case = FORMATS[name], folder / "case"
    pristine = folder / "pristine" / name.replace("/", "-")
    if not pristine.exists():
        pristine.mkdir(parents=True)
        form.make(pristine)
    shutil.rmtree(case, ignore_errors=True)
    shutil.copytree(pristine, case)
    target = case / form.target
    expected = _expected(name, target) if form.sealed else None
    if form.sealed:  # it was read, and may have been moved
        shutil.rmtree(case)
        shutil.copytree(pristine, case)
    target.write_bytes(mutate(target.read_bytes(), Random(seed), forged=not form.sealed))
    signal.alarm(SECONDS)
    try:
        found = repr(form.read(target))
    except ALLOWED as error:
        unfit = "\x1b" in str(error) or "frame #" in str(error) or not str(error)
        if unfit or type(error) in (UnicodeDecodeError, UnicodeEncodeError, json.JSONDecodeError):
            return {"outcome": "fault", "why": traceback.format_exc()}
        return {"outcome": "refused", "why": str(error)}
    except BaseException:
        return {"outcome": "fault", "why": traceback.format_exc()}
    finally:
        signal.alarm(0)
    if form.sealed and found != expected:
        return {"outcome": "fault", "why": f"damage was taken for {found[:500]}, written was {expected[:500]}"}
    return {"outcome": "taken", "why": ""}


_KNOWN: dict[str, str] = {}


def _expected(name: str, target: Path) -> str:
    if name not in _KNOWN:
        _KNOWN[name] = repr(FORMATS[name].read(target))
    return _KNOWN[name]


def main() -> None:
    warnings.simplefilter("ignore")
    for module in ("rbm", "rbm.serving.feature_files", "rbm.experiments.runner", "rbm.datasets.load"):
        importlib.import_module(module)  # so that its time and memory do not count for a case
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGALRM, _stop)
    if len(sys.argv) > 1:
        folder = Path(sys.argv[3] if len(sys.argv) > 3 else tempfile.mkdtemp(prefix="rbm-fuzz-"))
        answer = run(sys.argv[1], int(sys.argv[2]), folder)
        print(f"{answer['outcome']}: {answer['why']}\nthe file: {folder / 'case' / FORMATS[sys.argv[1]].target}")
        sys.exit(answer["outcome"] == "fault")
    with tempfile.TemporaryDirectory() as folder:
        for line in sys.stdin:
            name, seed = line.split()
            print(json.dumps(run(name, int(seed), Path(folder))), flush=True)


if __name__ == "__main__":
    main()
