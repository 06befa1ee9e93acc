"""How far a correct float32 sum of many products may be from the exact one, on CUDA cores and on tensor cores."""

import torch
from matmul_problems import check_error


def check_float32_sums(name, got, exact, eager, squares, terms, products="ieee"):
    """:func:`check_error`, or the error that a correct float32 sum of so many terms may have, if that is more.

    cuBLAS cuts long sums into parts, and a kernel that adds them up in one chain may err more than twice as much.

    A chain ``s_i = s_{i-1} + t_i`` rounds each ``s_i`` by at most ``u |s_i|``, ``u = 2^-24``, with a standard deviation
    of 0.42 u |s_i|. For random terms ``s_i^2`` grows as ``i tau^2``, so the sum over n terms errs with a standard
    deviation of ``0.42 u tau n / sqrt(2) = 0.3 u sqrt(n T)``, where ``T = n tau^2`` is the sum of the squared terms.
    Simulated in NumPy against float64 (gate times normal times normal): 0.21 u sqrt(n T), and at most 2.6 u sqrt(n T)
    among 100,000 sums of 4,299 terms, 2.3 among 65,536 of 20,321. Allowed are ``4 u sqrt(n T)``; a row that is missing
    or there twice is a hundred times as much.

    Matrix instructions add 8 to 16 products at a time and cut the sum, where a chain rounds it: by 2^-23 of it at most,
    half of that in the mean, always towards zero. ``n / 8`` cuts of sums that grow to ``y`` shrink it by up to
    ``2^-24 n / 8 |y|``, which is allowed beside the rounding unless products are ``ieee``.

    With ``tf32`` the tensor cores of sm_90 read float32 operands without their last 13 bits: Triton does not round
    them first, as cuBLAS does. A factor is too small by up to 2^-10 of itself, 3.5e-4 in the mean, a product by twice
    that: the whole sum shrinks by 7e-4, and errs by a random 3e-4 sqrt(T) beside it. Simulated: 2.5 to 2.7 times the
    error of rounded operands, up to 3.2e-3 sqrt(T). Allowed are ``2^-10 |y| + 2^-9 sqrt(T)`` for the largest |y|.

    With ``tf32x3`` a factor is the sum of its upper 11 bits, rounded, and of the rest, rounded to 11 bits: an error of
    up to 2^-22 of the factor. The product of both lower parts is left out: up to 2^-22 of the product. Together a
    product errs by up to 3 times 2^-22. Allowed are ``2^-20 |y| + 2^-19 sqrt(T)``, a 1024th of what ``tf32`` may err.

    Args:
        name: what is compared.
        got: the kernel's result.
        exact: the reference's in float64.
        eager: the reference's in the dtype of ``got``.
        squares: sums of the squared terms, of the shape of ``got``: the reference's, in float64, of squared arguments.
        terms: how many, at most, one after the other.
        products: ``ieee``, ``tf32x3``, ``tf32``, or ``half`` for operands in half precision, whose products are exact.
    """
    if got.dtype != torch.float32 or exact.numel() == 0:
        return check_error(name, got, exact, eager)
    assert got.shape == exact.shape, name
    assert got.dtype == eager.dtype, name
    largest, square = exact.abs().max().item(), squares.max().item()
    allowed = max(2 * (eager.double() - exact).abs().max().item(), 4 * 2.0**-24 * (terms * square) ** 0.5)
    if products != "ieee":
        allowed += 2.0**-24 * terms / 8 * largest
    if products in ("tf32", "tf32x3"):
        allowed += (2.0**-10 * largest + 2.0**-9 * square**0.5) * (1 if products == "tf32" else 2.0**-10)
    allowed += torch.finfo(torch.float32).eps * largest
    error = (got.double() - exact).abs().max().item()
    assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}"
    return None
