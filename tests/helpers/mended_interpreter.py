"""Patches of Triton's interpreter: where its results differ from a GPU's, and where it repeats work."""

import numpy as np
import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def mend() -> None:
    """Replace parts of the interpreter, for the rest of the process. Called again, it does nothing.

    The interpreter keeps bfloat16 in 16-bit integers; ``tl.dot`` multiplies those, and casts cut, not round. And it
    leaves products to NumPy's BLAS, which on some CPUs adds up a row in an order that depends on the rows beside it:
    here they are formed in float64 and rounded once. Triton 3.6 takes the bound of a loop from an array of one element
    by ``int()``, which NumPy refuses from 2.5 on.

    Most of its time goes into work that it has done before. It looks through ``triton.language`` for what to replace
    before each call of a function within a kernel, where all is replaced already; it checks that sums of integers fit
    by seven further operations on tensors; it forms types and shapes anew for every tensor.
    """
    if getattr(InterpreterBuilder.create_dot, "mended", False):
        return
    _round_products_once()
    _let_elements_be_bounds()
    _prepare_the_language_once()
    _check_integers_at_once()
    _form_types_once()


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

    create_dot.mended = True
    InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl = create_dot, cast_impl


def _let_elements_be_bounds() -> None:
    patch_tensor = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_lang_tensor


def _prepare_the_language_once() -> None:
    """A launch replaces the functions of the modules that its kernel sees, and puts them back at its end."""
    patch = interpreter._patch_lang
    replaced = set()

    class Scope(interpreter._LangPatchScope):
        def restore(self) -> None:
            super().restore()
            replaced.clear()

    def patch_lang(fn):
        seen = {id(value) for value in fn.__globals__.values() if value is tl or value is tl.core}
        scope = Scope()
        if not seen <= replaced:
            scope._changes = patch(fn)._changes
            replaced.update(seen)
        return scope

    interpreter._patch_lang = patch_lang


def _check_integers_at_once() -> None:
    check = TritonSemantic.binary_op_sanitize_overflow_impl
    operations = {"add": np.add, "sub": np.subtract, "mul": np.multiply}

    def check_at_once(self, lhs, rhs, binary_op):
        scalar, operation = lhs.type.scalar, operations.get(binary_op.__name__)
        if scalar.is_int_unsigned():  # words of bits, which wrap on purpose (expert_order counts ones so)
            return None
        if operation is None or not isinstance(lhs.handle, TensorHandle) or scalar.int_bitwidth not in (8, 16, 32):
            return check(self, lhs, rhs, binary_op)
        result = operation(lhs.handle.data, rhs.handle.data, dtype=np.int64)
        least, most = scalar.get_int_min_value(), scalar.get_int_max_value()
        assert result.size == 0 or least <= result.min() <= result.max() <= most, f"{scalar} overflow"
        return None

    TritonSemantic.binary_op_sanitize_overflow_impl = check_at_once


def _form_types_once() -> None:
    """What follows from a type alone is kept by the type's name."""
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
