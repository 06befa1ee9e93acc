"""One call of ``gpu.sh``: its clock, its log, the programs that it starts, and its summary."""

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

from benchmarks.gpu.plan import ROOT, Options, cores
from benchmarks.gpu.state import State

# A file of OUT_DIR may have 16 MiB.
MOST_BYTES = 15 << 20
TIMED_OUT = 124


@dataclass(frozen=True)
class Ended:
    """A program that ended or was ended: its status, :data:`TIMED_OUT` where its time was over, and its output."""

    status: int
    seconds: float
    output: str

    def tail(self, lines: int = 25) -> str:
        """The end of its output."""
        return "\n".join(self.output.rstrip().splitlines()[-lines:])


class Program:
    """A program that runs beside this one, in a process group of its own, its output in a file."""

    def __init__(self, command: Sequence[str], seconds: float, output: Path, environment: Mapping[str, str]) -> None:
        self._output, self._start = output, time.monotonic()
        self._end = self._start + seconds
        with output.open("wb") as file:
            # A group, so that what it starts ends with it; of this session, so that all of it ends with this call.
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
        """What became of it; None while it runs."""
        status = self._process.poll()
        if status is None and time.monotonic() < self._end:
            return None
        if status is None:
            self.stop()
            status = TIMED_OUT
        output = self._output.read_bytes()[-4 * MOST_BYTES :].decode(errors="replace")
        return Ended(status, time.monotonic() - self._start, output)

    def stop(self) -> None:
        """End it and all that it started."""
        for sent, patience in ((signal.SIGINT, 3), (signal.SIGKILL, 10)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, sent)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(patience)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


class Run:
    """What stages share: the clock, ``OUT_DIR`` with its log and results, and notes for the summary."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.out = options.out
        self.out.mkdir(parents=True, exist_ok=True)
        self.state = State(self.out / "results.csv")
        self.notes: list[str] = []
        self.failed = False
        self._end = time.monotonic() + options.budget
        self._log = (self.out / "log.txt").open("a")
        self._scratch = Path(tempfile.mkdtemp(prefix="rbm-gpu-"))
        self._programs: list[Program] = []
        # What workloads were begun in this run, see benchmarks.gpu.workloads.
        self.begun = self._scratch / "begun.txt"

    def left(self) -> float:
        """Seconds until the budget is over."""
        return max(0.0, self._end - time.monotonic())

    def say(self, line: str) -> None:
        """A line on the screen and in the log."""
        print(line, flush=True)
        self.log(line)

    def log(self, text: str) -> None:
        """A line, or the whole output of a program, in the log; not where it would grow beyond what is kept."""
        room = MOST_BYTES - self._log.tell()
        self._log.write(text[: max(0, room)].rstrip() + "\n")
        self._log.flush()

    def note(self, line: str, *, failed: bool = False) -> None:
        """A line for the summary; ``failed`` makes the run's status 1."""
        self.failed |= failed
        self.notes.append(line)
        self.say(f"   {line}")

    def environment(self, **more: str) -> dict[str, str]:
        """Of the programs that this one starts. A rehearsal works on small tensors, in one thread."""
        mine = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
        mine |= {"PYTHONUNBUFFERED": "1"}
        mine.pop("TRITON_INTERPRET", None)  # kernels run on the GPU or not at all
        if self.options.rehearse:
            mine |= {"RBM_REHEARSE": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        return {**mine, **more}

    def start(self, command: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None) -> Program:
        """A program beside this one, ended when its seconds, or those of the run, are over."""
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
        """A program to its end; its output goes to the log, unless it is kept elsewhere."""
        program = self.start(command, seconds, environment)
        while (ended := program.poll()) is None:
            time.sleep(0.05)
        if logged:
            self.log(ended.output)
        return ended

    def python(self, *arguments: str) -> list[str]:
        """A command of the Python that this is."""
        return [sys.executable, *arguments]

    def stop(self) -> None:
        """End the programs that still run, so that no results are written after this."""
        for program in self._programs:
            if program.poll() is None:
                program.stop()

    def close(self) -> None:
        """Remove temporary files."""
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._log.close()

    def keep(self, text: str, name: str) -> None:
        """Write a file of ``OUT_DIR``, as much of it as is kept."""
        (self.out / name).write_bytes(text.encode()[:MOST_BYTES])

    @property
    def jobs(self) -> int:
        """How many processes do the processor's work side by side."""
        return cores()
