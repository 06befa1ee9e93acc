"""Registers the operators with PyTorch's ``FlopCounterMode``, which otherwise counts nothing for them.

Importing ``torch.utils.flop_counter`` imports Triton and takes four times as long as importing this package. The
formulas are therefore registered when somebody else imports it: whoever counts, and the compiler.
"""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch

COUNTER = "torch.utils.flop_counter"
# Folders of the operators that multiply matrices. Their cost.py has FLOP_FORMULAS.
FOLDERS = (
    "cosine_topk",
    "expert_matmul",
    "int8_experts",
    "memory_update",
    "packed_experts",
    "packed_feed_forward",
    "packed_network",
    "routed_matmul",
    "sparse_expert_matmul",
)


def formulas() -> dict[str, Callable[..., int]]:
    """By operator, a function of the operator's arguments that returns the number of operations to count."""
    costs = [import_module(f"rbm_kernels.ops.{folder}.cost") for folder in FOLDERS]
    return {name: formula for cost in costs for name, formula in cost.FLOP_FORMULAS.items()}


def register_when_imported() -> None:
    """Register the formulas now if the counter has been imported, otherwise as soon as it is."""
    if COUNTER in sys.modules:
        _register(sys.modules[COUNTER])
    else:
        sys.meta_path.insert(0, _RegisterAfterImport())


def _register(counter: ModuleType) -> None:
    for name, formula in formulas().items():
        counter.register_flop_formula(getattr(torch.ops.rbm, name), get_raw=True)(formula)


class _RegisterAfterImport(MetaPathFinder):
    """Leaves the import of the counter to the other finders, and registers the formulas after it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != COUNTER:
            return None
        others = [finder.find_spec for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec = next(filter(None, (find(fullname, path, target) for find in others)), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            # Not before: somebody may look for the module without importing it.
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            _register(module)

        spec.loader.exec_module = execute_and_register
        return spec
