"""A process that runs one case after another, and is restarted if a case has ended it."""

import json
import os
import selectors
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CASES = int(os.environ.get("RBM_FUZZ_CASES", "200"))
SEED = int(os.environ.get("RBM_FUZZ_SEED", "0"))
PATIENCE = 300.0  # for one case, or the first imports; a worker itself stops sooner, unless it hangs outside Python


class Worker:
    """``script`` reads one line per case and writes one line of JSON with ``outcome`` and ``why``."""

    def __init__(self, script: Path) -> None:
        self.script, self.process = script, None

    def answer(self, case: str) -> dict[str, str]:
        """The outcome of a case; also ``"fault"`` if the process ends or hangs."""
        if self.process is None:
            self.process = subprocess.Popen(
                [sys.executable, str(self.script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
            )
        self.process.stdin.write(f"{case}\n")
        self.process.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            line = self.process.stdout.readline() if selector.select(PATIENCE) else None
        if line:
            return json.loads(line)
        why = (
            f"no answer in {PATIENCE} s" if line is None else f"it ended the process with status {self.process.wait()}"
        )
        self.stop()
        return {"outcome": "fault", "why": why}

    def replay(self, case: str) -> str:
        """The command that runs a case by itself."""
        return f"PYTHONPATH={ROOT} {sys.executable} {self.script} {case}"

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process.stdin.close()
            self.process.stdout.close()
        self.process = None
