"""Patches of Triton's interpreter: where its results differ from a GPU's, and where it repeats work."""

import numpy as np
import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def patch() -> None:
    """Replace parts of the interpreter, for the rest of the process. Called again, it does nothing.

    The interpreter stores bfloat16 as 16-bit integers: ``tl.dot`` multiplies them, and casts truncate. NumPy's
    BLAS computes its products, and on some CPUs the order in which BLAS adds up a row depends on the other rows. The
    patch computes products in float64 and rounds once. Triton 3.6 converts a loop bound from an array of one element
    with ``int()``, which NumPy from 2.5 on rejects.

    The interpreter spends most of its time on repeated work. Before each call of a function within a kernel it searches
    ``triton.language`` for functions to replace, which are replaced already. It checks sums of integers for overflow
    with seven further tensor operations, and it builds types and shapes anew for each tensor.
    """
    if getattr(InterpreterBuilder.create_dot, "patched", False):
        return
    _round_products_once()
    _allow_elements_as_bounds()
    _patch_language_once()
    _check_overflow_in_one_step()
    _cache_types()


def _widened(handle: TensorHandle) -> TensorHandle:
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _round_products_once() -> None:
    multiply, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def create_dot(self, a, b, d, *args):
        a, b = _widened(a), _widened(b)
        if d.data.dtype != np.float32:
            return multiply(self, a, b, d, *args)
        product = np.matmul(a.data, b.data, dtype=np.float64).astype(np.float32)
        return TensorHandle(product + d.data, d.dtype.scalar)

    def cast_impl(self, src, dst_type):
        if src.dtype.scalar == tl.bfloat16 and dst_type.scalar == tl.float32:
            return _widened(src)
        if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
            rounded = torch.from_numpy(np.ascontiguousarray(src.data)).to(torch.bfloat16)
            return TensorHandle(rounded.view(torch.int16).numpy().view(np.uint16), tl.bfloat16)
        return cast(self, src, dst_type)

    create_dot.patched = True
    InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl = create_dot, cast_impl


def _allow_elements_as_bounds() -> None:
    patch_tensor = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_lang_tensor


def _patch_language_once() -> None:
    """A launch replaces the functions of the modules that its kernel sees, and puts them back at its end.

    The interpreter also replaces functions for each function that a kernel calls, and does not put those back that only
    this function sees. Here the end of the last launch puts everything back, so that kernels can be compiled later in
    the same process.
    """
    patch_language, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    replaced, running = set(), []
    everything = interpreter._LangPatchScope()

    def patch_lang(fn):
        seen = {id(value) for value in fn.__globals__.values() if value is tl or value is tl.core}
        if not seen <= replaced:
            everything._changes += patch_language(fn)._changes
            replaced.update(seen)
        return interpreter._LangPatchScope()  # of no changes

    def launch_and_restore(self, *args, **kwargs):
        running.append(self)
        try:
            return launch(self, *args, **kwargs)
        finally:
            running.pop()
            if not running:
                everything.restore()
                replaced.clear()

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_lang, launch_and_restore


def _check_overflow_in_one_step() -> None:
    check = TritonSemantic.binary_op_sanitize_overflow_impl
    operations = {"add": np.add, "sub": np.subtract, "mul": np.multiply}

    def check_at_once(self, lhs, rhs, binary_op):
        scalar, operation = lhs.type.scalar, operations.get(binary_op.__name__)
        if scalar.is_int_unsigned():  # words of bits, which wrap on purpose (expert_order counts ones this way)
            return None
        if operation is None or not isinstance(lhs.handle, TensorHandle) or scalar.int_bitwidth not in (8, 16, 32):
            return check(self, lhs, rhs, binary_op)
        result = operation(lhs.handle.data, rhs.handle.data, dtype=np.int64)
        least, most = scalar.get_int_min_value(), scalar.get_int_max_value()
        assert result.size == 0 or least <= result.min() <= result.max() <= most, f"{scalar} overflow"
        return None

    TritonSemantic.binary_op_sanitize_overflow_impl = check_at_once


def _cache_types() -> None:
    """Cache everything that depends only on a type, by the type's name."""
    form_block, form_tensor, to_numpy = tl.block_type.__init__, tl.tensor.__init__, interpreter._get_np_dtype
    blocks, tensors, numpy_types = {}, {}, {}

    def block_type(self, element_ty, shape):
        key = (element_ty.name, *[getattr(size, "value", size) for size in shape])
        if key not in blocks:
            form_block(self, element_ty, shape)
            blocks[key] = dict(vars(self))
        vars(self).update(blocks[key], element_ty=element_ty)

    def tensor(self, handle, type):  # noqa: A002
        if type.name not in tensors:
            form_tensor(self, handle, type)
            tensors[type.name] = dict(vars(self))
        vars(self).update(tensors[type.name], handle=handle, type=type, dtype=type.scalar)

    def get_np_dtype(tt_dtype):
        if tt_dtype.name not in numpy_types:
            numpy_types[tt_dtype.name] = to_numpy(tt_dtype)
        return numpy_types[tt_dtype.name]

    tl.block_type.__init__, tl.tensor.__init__ = block_type, tensor
    interpreter._get_np_dtype = get_np_dtype
