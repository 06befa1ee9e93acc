"""One call of ``gpu.sh``: its clock, its log, the programs it starts, and its summary."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.plan import ROOT, Options
from benchmarks.gpu.state import State

# A file in OUT_DIR may have 16 MiB.
MOST_BYTES = 15 << 20
TIMED_OUT = 124


@dataclass(frozen=True)
class Ended:
    """A program that ended or was stopped: its status (:data:`TIMED_OUT` after the time limit) and its output."""

    status: int
    seconds: float
    output: str

    def tail(self, lines: int = 25) -> str:
        """The end of its output."""
        return "\n".join(self.output.rstrip().splitlines()[-lines:])


class Program:
    """A program that runs in the background, in its own process group, with its output in a file."""

    def __init__(self, command: Sequence[str], seconds: float, output: Path, environment: Mapping[str, str]) -> None:
        self._output, self._start = output, time.monotonic()
        self._end = self._start + seconds
        with output.open("wb") as file:
            # In its own group, to stop everything it starts; in this session, so that everything ends with this call.
            self._process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                env=dict(environment),
                preexec_fn=os.setpgrp,
            )

    def poll(self) -> Ended | None:
        """The result, or None while it runs."""
        status = self._process.poll()
        if status is None and time.monotonic() < self._end:
            return None
        if status is None:
            self.stop()
            status = TIMED_OUT
        output = self._output.read_bytes()[-4 * MOST_BYTES :].decode(errors="replace")
        return Ended(status, time.monotonic() - self._start, output)

    def stop(self) -> None:
        """Stop it and everything that it started."""
        for sent, patience in ((signal.SIGINT, 3), (signal.SIGKILL, 10)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, sent)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(patience)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


class Run:
    """Shared by the stages: the clock, ``OUT_DIR`` with its log and results, and notes for the summary."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.out = options.out
        self.out.mkdir(parents=True, exist_ok=True)
        self.state = State(self.out / "results.csv")
        self.notes: list[str] = []
        self.failed = False
        self._end = time.monotonic() + options.budget
        self._log = (self.out / "log.txt").open("a", encoding="utf-8")
        self._scratch = Path(tempfile.mkdtemp(prefix="rbm-gpu-"))
        self._programs: list[Program] = []
        # The workloads that were started in this run, see benchmarks.gpu.workloads.
        self.begun = self._scratch / "begun.txt"

    def left(self) -> float:
        """Remaining seconds of the budget."""
        return max(0.0, self._end - time.monotonic())

    def say(self, line: str) -> None:
        """Print a line and log it."""
        print(line, flush=True)
        self.log(line)

    def log(self, text: str) -> None:
        """Log a line, or the whole output of a program, unless the log would become too large."""
        room = MOST_BYTES - self._log.tell()
        self._log.write(text[: max(0, room)].rstrip() + "\n")
        self._log.flush()

    def note(self, line: str, *, failed: bool = False) -> None:
        """Add a line to the summary; ``failed`` sets the run's status to 1."""
        self.failed |= failed
        self.notes.append(line)
        self.say(f"   {line}")

    def environment(self, **more: str) -> dict[str, str]:
        """Environment of the programs that this one starts. A rehearsal uses small tensors and one thread."""
        own = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
        own |= {"PYTHONUNBUFFERED": "1"}
        own.pop("TRITON_INTERPRET", None)  # kernels must run on the GPU
        if self.options.rehearse:
            own |= {"RBM_REHEARSE": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        return {**own, **more}

    def start(self, command: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None) -> Program:
        """Start a program in the background; it is stopped after its seconds, or when the budget is over."""
        self.log(f"+ {' '.join(command)}")
        output = self._scratch / f"output-{len(self._programs)}.txt"
        self._programs.append(
            Program(
                command, min(seconds, self.left()), output, self.environment() if environment is None else environment
            )
        )
        return self._programs[-1]

    def call(
        self,
        command: Sequence[str],
        seconds: float,
        environment: Mapping[str, str] | None = None,
        *,
        logged: bool = True,
    ) -> Ended:
        """Run a program to its end; its output goes to the log, unless it is stored elsewhere."""
        program = self.start(command, seconds, environment)
        while (ended := program.poll()) is None:
            time.sleep(0.05)
        if logged:
            self.log(ended.output)
        return ended

    def python(self, *arguments: str) -> list[str]:
        """A command for the current Python."""
        return [sys.executable, *arguments]

    def stop(self) -> None:
        """Stop the programs that are still running, so that no results are written afterwards."""
        for program in self._programs:
            if program.poll() is None:
                program.stop()

    def close(self) -> None:
        """Remove temporary files."""
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._log.close()

    def keep(self, text: str, name: str) -> None:
        """Write a file of ``OUT_DIR``, truncated to the maximum size."""
        (self.out / name).write_bytes(text.encode()[:MOST_BYTES])

    @property
    def jobs(self) -> int:
        """Number of processes to run in parallel for work on the CPU: the cores that this process may use."""
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
