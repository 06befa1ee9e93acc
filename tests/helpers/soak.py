"""Train a layer for thousands of steps in a separate process, in which the growth of memory can be measured."""

import gc
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch

from rbm import RbMStudent
from rbm.nn import losses

SIZES = (1, 3, 16, 33, 64, 127)
ROUND = 500


class Soak:
    """A student in training with occasional inference, and its cost.

    Attributes:
        seconds: (round, batch size) -> processor seconds of its steps, independent of other load on the machine.
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
        """Slowdown of a late round: the median over batch sizes of the ratio of the fastest steps."""
        return statistics.median(min(self.seconds[late, size]) / min(self.seconds[early, size]) for size in SIZES)


def resident() -> int:
    """The resident memory of this process in bytes."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def main(first: int, last: int, leak: bool) -> dict[str, float]:
    """Memory growth from step ``first`` to ``last``, and how much slower the last steps are than the first."""
    torch.manual_seed(0)
    soak = Soak()
    soak.run(0, first)
    bytes_before, tensors_before = resident(), tensors()
    soak.run(first, last, leak=leak)
    grown = {"tensors": tensors() - tensors_before, "bytes": resident() - bytes_before}
    rounds = sorted({number for number, _ in soak.seconds})
    return {**grown, "slowdown": soak.slowdown(min(rounds[-1], rounds[0] + 1), rounds[-1])}


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]), "leak" in sys.argv[3:])))
