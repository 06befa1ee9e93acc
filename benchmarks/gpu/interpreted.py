"""Run a module in Triton's interpreter, for a rehearsal: ``python -m benchmarks.gpu.interpreted MODULE ARGUMENT...``.

The interpreter is patched as for the tests, by ``tests/helpers/mended_interpreter.py``, which describes how the
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
    found = spec_from_file_location("mended_interpreter", ROOT / "tests" / "helpers" / "mended_interpreter.py")
    mended_interpreter = module_from_spec(found)
    found.loader.exec_module(mended_interpreter)
    mended_interpreter.mend()
    sys.argv[:] = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
