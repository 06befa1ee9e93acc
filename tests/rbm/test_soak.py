"""Two thousand training steps with batches of ever-changing size: no memory is kept, and no step slows the next."""

import gc
import os
import statistics
import time
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from rbm import RbMStudent, losses

SIZES = (1, 3, 16, 33, 64, 127)
STEPS, WARM_UP, ROUND = 2000, 500, 500


class Soak:
    """A student in training, an answer now and then, and what it costs.

    Attributes:
        seconds: (round, batch size) -> processor seconds of its steps, whatever else runs on the machine.
    """

    def __init__(self) -> None:
        self.student = RbMStudent(24, 16, 5, num_layers=1, num_experts=4, top_k=2, dropout=0.3)
        self.optimizer = torch.optim.Adam(self.student.parameters(), fused=True)
        self.seconds = defaultdict(list)
        self.leaked = []

    def run(self, first: int, last: int, *, leak: bool = False) -> None:
        for step in range(first, last):
            size = SIZES[step * 7 % len(SIZES)]
            rows, labels = torch.randn(size, 24), torch.randint(0, 5, (size,))
            start = time.process_time()
            self.step(rows, labels)
            self.seconds[step // ROUND, size].append(time.process_time() - start)
            if leak:
                self.leaked.append(torch.zeros(16_384))
            if step % 20 == 0:
                self.student.eval()
                with torch.no_grad():
                    self.student(rows)
                self.student.train()

    def step(self, rows: torch.Tensor, labels: torch.Tensor) -> None:
        logits, trace = self.student(rows, return_trace=True)
        inner = losses.embedding_loss(
            trace.routings,
            self.student.memories(),
            commitment_weight=0.1,
            self_similarity_weight=0.1,
            load_balance_weight=0.1,
        )
        (losses.hard_label_loss(logits, labels) + inner).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def slowdown(self, early: int, late: int) -> float:
        """How many times as long steps take in a late round: of each size the quickest, of these ratios the median."""
        return statistics.median(min(self.seconds[late, size]) / min(self.seconds[early, size]) for size in SIZES)


def resident() -> int:
    """Bytes of this process that are in memory now."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads resident memory from /proc, as Linux has it")
def test_memory_and_time_of_a_step_stay_what_they_are():
    soak = Soak()
    soak.run(0, WARM_UP)
    bytes_before, tensors_before = resident(), tensors()
    soak.run(WARM_UP, STEPS)
    assert tensors() < tensors_before + 50, "1,500 steps that keep one each would be more"
    assert resident() - bytes_before < 8 * 2**20, "1,500 steps that keep 6 KiB each would be more"
    assert soak.slowdown(1, STEPS // ROUND - 1) < 2, "a loaded machine changes it by a quarter"


def test_what_is_kept_would_be_noticed():
    soak = Soak()
    soak.run(0, 10)
    bytes_before, tensors_before = resident(), tensors()
    soak.run(10, 610, leak=True)
    assert tensors() >= tensors_before + 600
    assert resident() - bytes_before > 8 * 2**20
