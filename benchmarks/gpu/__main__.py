"""``python -m benchmarks.gpu OUT_DIR [options]``, which is what ``gpu.sh`` calls: see ``--help``."""

import os
import signal
import sys
from datetime import datetime, timezone

from benchmarks.gpu.plan import Options, parse, plan, suites


def main() -> int:
    """Run what the options request, as far as time allows; return the exit status."""
    options = parse()
    if options.rehearse:
        os.environ["RBM_REHEARSE"] = "1"  # before the device is determined
    else:
        os.environ.pop("RBM_REHEARSE", None)
    try:
        import torch
    except ImportError:
        print(f"gpu.sh: {sys.executable} has no torch: name a Python that has it in PYTHON", file=sys.stderr)
        return 2
    if not options.rehearse and not torch.cuda.is_available():
        print("gpu.sh: no GPU found; --rehearse needs none", file=sys.stderr)
        return 2
    return _run(options)


def _run(options: Options) -> int:
    from benchmarks.gpu.run import Run
    from benchmarks.gpu.stages import LEAST_SECONDS, STAGES
    from benchmarks.measure.harness import machine

    run = Run(options)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        here = machine()
        versions = ", ".join(f"{name} {here[name]}" for name in ("driver", "torch", "triton", "commit") if here[name])
        run.say(f"== {here['device']}, {versions}, {datetime.now(timezone.utc):%FT%TZ}, budget {options.budget:.0f} s")
        earlier = options.state or (run.state.path if run.state.path.exists() else None)
        if earlier:
            try:
                carried, left = run.state.carry(earlier)
            except ValueError as error:
                print(f"gpu.sh: {error}", file=sys.stderr)
                return 2
            run.say(f"   {carried} rows of {earlier} are kept, {left} of another commit, device or torch are not")
        for step in plan(options, suites()):
            if run.left() < LEAST_SECONDS:
                run.note(f"not run, out of time: {step}")
                continue
            run.say(f"-- {step}, {run.left():.0f} s left")
            if not STAGES[step.stage](run, step):
                break
        return int(run.failed)
    finally:
        run.stop()
        _sum_up(run)
        run.close()


def _sum_up(run) -> None:
    """Mark the figures, make the tables, print the ten-line summary."""
    from benchmarks.report import summary, tables

    run.state.mark()
    parts = {"experts and layer": tables.gpu, "kernels": tables.gpu_kernels}
    made = (f"## {name}\n\n{table(run.state.path)}" for name, table in parts.items())
    run.keep("\n".join(made), "tables.md")
    run.say("== summary")
    for line in summary.lines(run.state.path, run.notes, run.state.verdicts(), run.state.counts()):
        run.say(line)


if __name__ == "__main__":
    sys.exit(main())
