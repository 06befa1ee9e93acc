"""Export a student, or any model with this package's layers, to one file: for PyTorch, compiled ahead, or ONNX.

All formats are written from the same program, :func:`rbm.serving.standard_ops.plain` traced with a dynamic batch size.
Loading the file requires neither this package nor its operators. If ``rbm_kernels`` is available, :func:`rbm.load` is
faster and needs no export.
"""

import contextlib
import copy
import inspect
import io
import logging
import math
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from rbm.nn.int8 import Int8Layer, check_kind, quantized
from rbm.nn.parameters import dtype_of
from rbm.serving.standard_ops import plain
from rbm.training.run_files import file_of, list_file
from rbm.training.run_folder import load
from rbm.utils.files import as_path, check_ending, check_writable, disk_errors, optional, write_atomically
from rbm.utils.repeatable import cpu_as_default

# Outputs of a written file must match the student's within this share of the largest logit. Other libraries sum in a
# different order; a wrong operator or a wrong expert causes errors that are orders of magnitude larger.
TOLERANCE = 1e-4
# With 8-bit weights, a different order of summation may round a number to a neighbouring integer. This changes an
# output by less than rounding to 8 bits does, but moves some rows to another expert. The median difference must be as
# small as in float32, and these shares of the numbers must agree within these tolerances.
_SHARES = {False: (1.0, TOLERANCE), True: (0.95, 2e-2)}
_BATCHES = (1, 2, 7, 64)
_COMPILER_FILES = 2**26  # bytes, in addition to the weights


@dataclass(frozen=True)
class Format:
    """A file format.

    Attributes:
        file: the default name of the file in a run folder.
        content: makes the file's content from a traced model and the names of its inputs and outputs. It does so in
            memory because exporters abort the process if the disk is full.
        open: returns a function from the model's inputs to its outputs that uses only the file; for a student, from
            rows ``[B, F]`` to logits ``[B, C]``.
        needs: required packages in addition to PyTorch, from the extra ``export``.
    """

    file: str
    content: Callable[[ExportedProgram, Sequence[str], Sequence[str]], bytes | memoryview]
    open: Callable[[Path], Callable[..., Any]]
    needs: tuple[str, ...] = ()


@cpu_as_default()
def export_student(
    student: nn.Module | Path | str,
    format: str = "torch-export",  # noqa: A002
    path: Path | str | None = None,
    *,
    method: str | None = None,
    quantize: str | None = None,
) -> Path:
    """Export a student to one file that maps dense rows ``[B, in_channels]`` to logits ``[B, C]``, for any ``B``.

    The file is first written under a temporary name, opened again and compared with the student at several batch sizes.
    Only then is it moved to ``path``. The input and output of an ONNX model are called ``x`` and ``logits``.

    Args:
        student: a run folder, or a student of this package, on the CPU.
        format: ``torch-export`` (opened by ``torch.export.load``), ``aoti`` (AOTInductor: compiled for this machine's
            kind of processor; opened by ``torch._inductor.aoti_load_package`` or from C++) or ``onnx`` (standard
            operators only).
        path: the file; by default one in the run folder, see :data:`FORMATS`, with the ``method`` in its name.
        method: the method of the student in the run folder; by default the student that the run keeps.
        quantize: ``int8`` for 8-bit weights, which makes the file a quarter of the size; the default name then contains
            ``-int8``. Outputs are those of ``rbm.load(..., quantize="int8")``.

    Returns:
        The path of the file.

    Raises:
        ValueError: an unknown format, a path with another ending than the format's, no path for a student without a run
            folder, a student that ``quantize`` does not support, a mixture in half precision, or a file whose outputs
            differ from the student's (which is deleted).
        ModuleNotFoundError: the format needs a package that is not installed.
        FileNotFoundError: no finished run, or the folder of ``path`` does not exist.
    """
    kind = _format(format)
    if isinstance(student, nn.Module) and path is None:
        raise ValueError("path is None, expected a file to write to, since the student comes without a run folder")
    check_kind(quantize)
    path = as_path("student", student) / file_of(kind.file, method, quantize) if path is None else as_path("path", path)
    _check_target(kind, format, path)
    student = student.eval() if isinstance(student, nn.Module) else load(student, method)
    student = student if quantize is None else quantized(student, quantize)
    _check_folder(path)
    program = trace(student)
    with torch.no_grad():
        cases = [((rows,), student(rows)) for rows in _random_rows(student)]
    is_quantized = any(isinstance(part, Int8Layer) for part in student.modules())
    return _write(program, kind, format, path, cases, ("x",), ("logits",), is_quantized)


@cpu_as_default()
def export(
    model: nn.Module,
    example: Tensor | tuple[Tensor, ...],
    format: str,  # noqa: A002
    path: Path | str,
    *,
    dynamic_shapes: Any = None,
) -> Path:
    """Export any model that contains layers of this package to one file with the model's outputs in eval mode.

    In the file, the layers are made of standard operators of PyTorch or ONNX, so loading it does not require this
    package. The file is first written under a temporary name, opened again and compared with the model on rows of the
    example in batches of several sizes. Only then is it moved to ``path``. The model is not changed. Inputs of an ONNX
    model have the names of the arguments of ``model.forward`` (``input_0`` and so on for ``forward(*args)``); its
    output is called ``output``, or ``output_0``, ``output_1`` and so on.

    Args:
        model: a module on the CPU that :func:`torch.export.export` can trace and that returns a tensor or a tuple of
            tensors.
        example: the positional arguments of the model, or its only argument. The first dimension of each is the batch;
            the file accepts any batch size. The values should be realistic, since the comparison uses them.
        format: ``torch-export``, ``aoti`` or ``onnx``, as in :func:`export_student`.
        path: the file, with the ending of the format, ``.pt2`` or ``.onnx``.
        dynamic_shapes: the dynamic dimensions, if they differ, as in :func:`torch.export.export`. The file is then
            compared on the example only.

    Returns:
        The path of the file.

    Raises:
        ValueError: an unknown format, a path with another ending than the format's, an example that is not tensors of
            one batch, a layer of this package in half precision, or a file whose outputs differ from the model's (which
            is deleted).
        ModuleNotFoundError: the format needs a package that is not installed.
        FileNotFoundError: the folder of ``path`` does not exist.
    """
    kind, path = _format(format), as_path("path", path)
    _check_target(kind, format, path)
    _check_folder(path)
    example = tuple(example) if isinstance(example, tuple | list) else (example,)
    _check_example(example)
    module = copy.deepcopy(getattr(model, "_orig_mod", model)).eval()
    if dynamic_shapes is None:
        arguments, batches = _batch_of(example, 2), [_batch_of(example, count) for count in _BATCHES]
        batch = {0: Dim("batch")}
        bound = inspect.signature(module.forward).bind(*example).arguments.values()
        # The arguments of forward(*args) are one tuple.
        dynamic_shapes = tuple(batch if isinstance(value, Tensor) else (batch,) * len(value) for value in bound)
    else:
        arguments, batches = example, [example]
    with torch.no_grad():
        cases = [(batch, module(*batch)) for batch in batches]
        program = torch.export.export(plain(module), arguments, dynamic_shapes=dynamic_shapes)
    count = len(_tensors(cases[0][1]))
    outputs = ["output"] if count == 1 else [f"output_{i}" for i in range(count)]
    inputs = [*inspect.signature(module.forward).parameters][: len(example)]
    # The signature of forward(*args) has no argument names, and names in a file are distinct.
    if len(inputs) < len(example) or {*inputs} & {*outputs}:
        inputs = [f"input_{i}" for i in range(len(example))]
    return _write(program, kind, format, path, cases, inputs, outputs)


def trace(student: nn.Module) -> ExportedProgram:
    """Trace a student as a program of standard operators, from rows ``x [B, in_channels]`` to logits, for any ``B``."""
    rows = torch.zeros(2, student.in_channels, dtype=dtype_of(student))
    with torch.no_grad():
        return torch.export.export(plain(student), (rows,), dynamic_shapes=({0: Dim("batch")},))


def _write(
    program: ExportedProgram,
    kind: Format,
    name: str,
    path: Path,
    cases: Iterable[tuple[tuple[Tensor, ...], Any]],
    inputs: Sequence[str],
    outputs: Sequence[str],
    is_quantized: bool = False,
) -> Path:
    """Write a program to a file, compare its outputs with the model's in each case, and move it to its path."""
    with _quiet():
        content = kind.content(program, inputs, outputs)
    # Runtimes require the ending, which a partial file does not have.
    with disk_errors(path, len(content)), tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.stem}-") as near:
        whole = Path(near) / path.name
        whole.write_bytes(content)
        _compare(cases, kind.open(whole), name, is_quantized)
        list_file(path)
        write_atomically(path, lambda partial: os.replace(whole, partial), len(content))
    return path


def _random_rows(student: nn.Module) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)
    for batch in _BATCHES:
        yield torch.randn(batch, student.in_channels, generator=generator).to(dtype_of(student))


def _batch_of(example: tuple[Tensor, ...], count: int) -> tuple[Tensor, ...]:
    """``count`` rows of an example, repeated if it has fewer."""
    return tuple(tensor[torch.arange(count, device=tensor.device) % len(tensor)] for tensor in example)


def _check_example(example: tuple[Any, ...]) -> None:
    for argument in example:
        if not isinstance(argument, Tensor):
            raise ValueError(f"example holds a {type(argument).__name__}, expected tensors, the arguments of the model")
    shapes = [list(argument.shape) for argument in example]
    if not shapes or not all(shape and shape[0] > 0 and shape[0] == shapes[0][0] for shape in shapes):
        raise ValueError(f"example has tensors of shapes {shapes}, expected one batch of at least one row in all")


def _check_target(kind: Format, name: str, path: Path) -> None:
    check_ending(f"path: {name} file", path, (Path(kind.file).suffix,))
    for package in kind.needs:
        optional(package, "export", f"format {name!r}")


def _check_folder(path: Path) -> None:
    if not path.parent.is_dir():
        raise FileNotFoundError(f"path: folder {path.parent} does not exist; make it, or name another file")
    check_writable(f"path: {path}", path.parent)  # compiling takes minutes


def _tensors(outputs: Any) -> tuple[Tensor, ...]:
    tensors = tuple(outputs) if isinstance(outputs, tuple | list) else (outputs,)
    for output in tensors:
        if not isinstance(output, Tensor):
            raise ValueError(f"model returns a {type(output).__name__}, expected a tensor or a tuple of tensors")
    return tensors


def _format(name: str) -> Format:
    if not isinstance(name, str) or name not in FORMATS:
        raise ValueError(f"format is {name!r}, expected one of {', '.join(FORMATS)}")
    return FORMATS[name]


@torch.no_grad()
def _compare(
    cases: Iterable[tuple[tuple[Tensor, ...], Any]], answer: Callable[..., Any], name: str, is_quantized: bool
) -> None:
    share, _ = _SHARES[is_quantized]
    for batch, expected in cases:
        for right, got in zip(_tensors(expected), _tensors(answer(*batch)), strict=True):
            largest = right.double().abs().nan_to_num(posinf=0.0).max().clamp_min(1.0)
            errors = ((got.double() - right.double()).abs() / largest).masked_fill(got == right, 0.0).flatten()
            # Where each operator rounds is up to the runtime, which shows in half precision.
            rounding = 2 * torch.finfo(right.dtype).eps if right.is_floating_point() else 0.0
            near, tolerance = max(TOLERANCE, rounding), max(_SHARES[is_quantized][1], rounding)
            error = float(errors.sort().values[math.ceil(share * len(errors)) - 1])  # NaN comes last
            if not error <= tolerance or (len(batch[0]) > 2 and not float(errors.median()) <= near):
                raise ValueError(
                    f"format {name!r}: the file answers {len(batch[0])} rows with numbers that are off by {error:.1e}"
                    f" of the largest, expected at most {tolerance:.0e}; it was not kept. Please report this, with the"
                    " versions that rbm info prints"
                )


def _open_exported(path: Path) -> Callable[..., Any]:
    return torch.export.load(path).module()


def _exported(program: ExportedProgram, *_: Sequence[str]) -> memoryview:
    content = io.BytesIO()
    torch.export.save(program, content)
    return content.getbuffer()


def _compiled(program: ExportedProgram, *_: Sequence[str]) -> bytes:
    # The compiler writes temporary files, and aborts the process if there is no space for them.
    with tempfile.TemporaryDirectory(prefix="rbm-") as folder:
        size = sum(tensor.nbytes for tensor in program.state_dict.values())
        free = shutil.disk_usage(folder).free
        if free < (needed := 4 * size + _COMPILER_FILES):
            raise OSError(f"{folder} has {free:,} bytes free, and compiling needs {needed:,}; set TMPDIR to another")
        path = Path(folder) / "student.pt2"
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))
        return path.read_bytes()


def _open_compiled(path: Path) -> Callable[..., Any]:
    return torch._inductor.aoti_load_package(str(path))


def _onnx(program: ExportedProgram, inputs: Sequence[str], outputs: Sequence[str]) -> bytes:
    if any(tensor.dtype == torch.bfloat16 for tensor in program.state_dict.values()):
        raise ValueError(
            "model is in torch.bfloat16, expected float32, for which ONNX Runtime has its operators; export a copy in"
            " float32 (model.float())"
        )
    exported = torch.onnx.export(
        program,
        (),
        dynamo=True,
        external_data=False,  # a single file, of at most 2 GB
        opset_version=18,  # old, so that many runtimes support it
        verbose=False,
        input_names=[*inputs],
        output_names=[*outputs],
        custom_translation_table={torch.ops.aten.sort.stable: _stable_sort()},
    )
    return exported.model_proto.SerializeToString()


def _stable_sort() -> Callable:
    """A sort built from ONNX's TopK, since ONNX has no sort. TopK returns the lower index first among equal values."""
    from onnxscript import opset18 as onnx

    def sort(values, *, stable=None, dim=-1, descending=False):
        count = onnx.Gather(onnx.Shape(values), onnx.Constant(value_ints=[dim]))
        return onnx.TopK(values, count, axis=dim, largest=int(descending))

    return sort


def _open_onnx(path: Path) -> Callable[..., Any]:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [known.name for known in session.get_inputs()]

    def answer(*arguments: Tensor) -> Tensor | tuple[Tensor, ...]:
        fed = {name: argument.numpy() for name, argument in zip(names, arguments, strict=True)}
        found = tuple(torch.from_numpy(output) for output in session.run(None, fed))
        return found[0] if len(found) == 1 else found

    return answer


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporters' logs of missing optional packages and of their own deprecations."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


FORMATS = {
    "torch-export": Format("student.pt2", _exported, _open_exported),
    "aoti": Format("student-aoti.pt2", _compiled, _open_compiled),
    "onnx": Format("student.onnx", _onnx, _open_onnx, ("onnx", "onnxscript", "onnxruntime")),
}
