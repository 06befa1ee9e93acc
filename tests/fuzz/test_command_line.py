"""Random command lines, valid and invalid: each is accepted, or refused in one sentence with status 2.

``RBM_FUZZ_CASES`` and ``RBM_FUZZ_SEED`` as in ``test_readers.py``.
"""

from pathlib import Path

import pytest
from fuzz_worker import CASES, SEED, Worker


@pytest.fixture
def worker():
    worker = Worker(Path(__file__).parent / "command_cases.py")
    yield worker
    worker.stop()


@pytest.mark.slow
def test_command_lines(worker):
    faults, counts = [], {"taken": 0, "refused": 0, "fault": 0}
    for case in range(CASES):
        seed = str(SEED * 10_000_000 + case)
        answer = worker.answer(seed)
        counts[answer["outcome"]] += 1
        if answer["outcome"] == "fault":
            faults.append(f"{answer['why']}\nreplay: {worker.replay(seed)}")
    print(counts)
    assert not faults, f"{len(faults)} of {CASES} cases: " + "\n\n".join(faults[:20])
    assert min(counts["taken"], counts["refused"]) > CASES / 50, "both are tried"
