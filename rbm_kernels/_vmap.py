"""The rules of ``torch.func.vmap``: the rows of all slices in one call of an operator, or one call per slice."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rbm_kernels._library import LIBRARY


def implement_vmap(name: str, rows: tuple[str, ...] = (), of_all_rows: tuple[str, ...] = ()) -> None:
    """Bind the rule of ``torch.func.vmap`` for an operator that changes none of its arguments.

    The rule calls the operator once if only tensors of ``rows`` are batched. Otherwise it calls it for each slice, as
    PyTorch does without a rule, but without PyTorch's warning.

    Args:
        name: name of the operator.
        rows: the operator's tensors whose first dimension is the rows. It may be given if each row of each result
            depends on that row of these tensors alone.
        of_all_rows: the operator's optional tensors that describe all rows together. Those of one slice do not fit the
            rows of all slices, so the one call goes without them.
    """
    operator = getattr(torch.ops.rbm, name).default
    names = [argument.name for argument in operator._schema.arguments]
    has_rows, is_of_all = [name in rows for name in names], [name in of_all_rows for name in names]

    def rule(info, batch_dims: tuple[int | None, ...], *args, **kwargs) -> tuple[Any, Any]:
        # Fewer arguments than in the schema, if the last ones are left out.
        arguments = list(zip(args, batch_dims, has_rows, strict=False))
        if all(dim is None or of_rows for _, dim, of_rows in arguments):
            of_one = zip(arguments, is_of_all, strict=False)
            arguments = [(None if left_out else value, *rest) for (value, *rest), left_out in of_one]
            results = _call_once(operator, info.batch_size, arguments, kwargs)
        else:
            results = _call_each(operator, info.batch_size, arguments, kwargs)
        return results, (0,) * len(results) if isinstance(results, tuple) else 0

    torch.library.register_vmap(f"rbm::{name}", rule, lib=LIBRARY)


def _call_once(operator: Callable, slices: int, arguments: list[tuple[Any, int | None, bool]], kwargs: dict) -> Any:
    def rows_of_all(tensor: Tensor | None, dim: int | None) -> Tensor | None:
        if tensor is None:
            return None
        return (tensor.expand(slices, *tensor.shape) if dim is None else tensor.movedim(dim, 0)).flatten(0, 1)

    args = (rows_of_all(value, dim) if of_rows else value for value, dim, of_rows in arguments)
    results = operator(*args, **kwargs)
    if isinstance(results, tuple):
        return tuple(result.unflatten(0, (slices, -1)) for result in results)
    return results.unflatten(0, (slices, -1))


def _call_each(operator: Callable, slices: int, arguments: list[tuple[Any, int | None, bool]], kwargs: dict) -> Any:
    def call(i: int) -> Any:
        return operator(*(value if dim is None else value.select(dim, i) for value, dim, _ in arguments), **kwargs)

    results = [call(i) for i in range(slices)]
    if isinstance(results[0], tuple):
        return tuple(torch.stack(each) for each in zip(*results, strict=True))
    return torch.stack(results)
