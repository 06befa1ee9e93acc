"""Run a module in Triton's interpreter, for a rehearsal: ``python -m benchmarks.gpu.interpreted MODULE ARGUMENT...``.

The interpreter is patched as for the tests, by ``tests/helpers/patched_interpreter.py``, which describes how the
interpreter differs from a GPU.
"""

import os
import runpy
import sys
from importlib.util import module_from_spec, spec_from_file_location

from benchmarks.gpu.plan import ROOT


def main() -> None:
    """Patch the interpreter, then run the module as the main program."""
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton
    spec = spec_from_file_location("patched_interpreter", ROOT / "tests" / "helpers" / "patched_interpreter.py")
    patched_interpreter = module_from_spec(spec)
    spec.loader.exec_module(patched_interpreter)
    patched_interpreter.patch()
    sys.argv[:] = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
