"""Damaged files of every format: each is read, or refused in one sentence; none crashes, hangs, or uses all memory.

``RBM_FUZZ_CASES`` is the total number of cases (200), and ``RBM_FUZZ_SEED`` selects them (0). A worker reads them; if a
case kills it, the case is named. The message of a failure contains the command that replays the case.
"""

import importlib.util
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz_worker import CASES, ROOT, SEED, Worker

WORKER = Path(__file__).parent / "read_cases.py"


@pytest.fixture
def worker():
    worker = Worker(WORKER)
    yield worker
    worker.stop()


def _formats() -> list[str]:
    sys.path.insert(0, str(WORKER.parent))
    try:
        from formats import FORMATS
    finally:
        sys.path.remove(str(WORKER.parent))
    has_arrow = importlib.util.find_spec("pyarrow") is not None
    return [name for name in FORMATS if has_arrow or "parquet" not in name]


def test_damaged_files(worker):
    names, faults, counts = _formats(), [], {"taken": 0, "refused": 0, "fault": 0}
    for case, name in zip(range(CASES), itertools.cycle(names)):
        seed = SEED * 10_000_000 + case
        answer = worker.answer(f"{name} {seed}")
        counts[answer["outcome"]] += 1
        if answer["outcome"] == "fault":
            faults.append(f"{answer['why']}\nreplay: {worker.replay(f'{name} {seed}')}")
    print(counts)
    assert not faults, f"{len(faults)} of {CASES} cases: " + "\n\n".join(faults[:20])
    assert counts["refused"] > counts["taken"] / 4, "mutations that spoil nothing test nothing"


def test_sound_files_are_taken(tmp_path):
    """Otherwise, mutations of a file that no reader accepts would pass."""
    code = (
        "import sys; from pathlib import Path; from formats import FORMATS\n"
        "for name, form in FORMATS.items():\n"
        "    if name in sys.argv[2:]:\n"
        "        case = Path(sys.argv[1]) / name.replace('/', '-') / 'case'; case.mkdir(parents=True)\n"
        "        form.make(case); form.read(case / form.target)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(WORKER.parent), str(ROOT)])}
    subprocess.run([sys.executable, "-c", code, str(tmp_path), *_formats()], check=True, env=environment, timeout=300)
