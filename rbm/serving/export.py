"""A student as one file for production: for PyTorch alone, compiled ahead of time, or for ONNX runtimes.

All formats are written from one program, :func:`rbm.serving.standard_ops.plain` traced with any batch size, so that the
loading side needs neither this package nor its operators: where ``rbm_kernels`` can be imported, it is faster by
:func:`rbm.load`, which needs no export.
"""

import contextlib
import io
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from rbm.serving.standard_ops import plain
from rbm.training.run_files import file_of, list_file
from rbm.training.run_folder import load
from rbm.utils.files import check_ending, disk_errors, optional, write_atomically

# A written file must answer as the student does, within this share of the largest logit. Other libraries add up in
# another order; an operator that is wrong, or a wrong expert, is off by orders of magnitude more.
TOLERANCE = 1e-4
_BATCHES = (1, 2, 7, 64)
_COMPILER_FILES = 2**26  # bytes, beside those of the weights


@dataclass(frozen=True)
class Format:
    """A kind of file.

    Attributes:
        file: its name in a run folder, unless another is asked for.
        content: makes it from a traced student, in memory: exporters abort the process where a disk is full.
        open: gives a function from rows ``[B, F]`` to logits ``[B, C]`` that the file alone answers.
        needs: packages beside PyTorch; those of the extra ``export``.
    """

    file: str
    content: Callable[[ExportedProgram], bytes | memoryview]
    open: Callable[[Path], Callable[[Tensor], Tensor]]
    needs: tuple[str, ...] = ()


def export_student(
    student: nn.Module | Path | str,
    format: str,  # noqa: A002
    path: Path | str | None = None,
    *,
    method: str | None = None,
) -> Path:
    """Write a student to one file that answers dense rows ``[B, in_channels]`` with logits ``[B, C]``, any ``B``.

    The file is written beside its place, opened again, compared with the student on rows of several batch sizes, and
    only then moved there. Input and output of an ONNX model are called ``x`` and ``logits``.

    Args:
        student: a run folder, or a student of this package, on the CPU.
        format: ``torch-export`` (opened by ``torch.export.load``), ``aoti`` (AOTInductor: compiled here, for this kind
            of processor; opened by ``torch._inductor.aoti_load_package``, or from C++) or ``onnx`` (standard operators
            alone).
        path: the file; by default one in the run folder, see :data:`FORMATS`, with the ``method`` in its name.
        method: whose student of the run folder; by default the one that the run keeps.

    Returns:
        The file.

    Raises:
        ValueError: an unknown format, a path that does not end as the format does, no path for a student that comes
            without a run folder, or a file that does not answer as the student does: nothing is kept of that.
        ModuleNotFoundError: the format needs a package that is not installed.
        FileNotFoundError: no finished run, or no such folder to write to.
    """
    kind = _format(format)
    if isinstance(student, nn.Module) and path is None:
        raise ValueError("path is None, expected a file to write to, since the student comes without a run folder")
    path = Path(student) / file_of(kind.file, method) if path is None else Path(path)
    check_ending(f"path: {format} file", path, (Path(kind.file).suffix,))
    for package in kind.needs:
        optional(package, "export", f"format {format!r}")
    student = student.eval() if isinstance(student, nn.Module) else load(student, method)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"path: folder {path.parent} does not exist; make it, or name another file")
    program = trace(student)
    with _quiet():
        content = kind.content(program)
    # Runtimes insist on the ending, which a partial file does not have.
    with disk_errors(path, len(content)), tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.stem}-") as near:
        whole = Path(near) / path.name
        whole.write_bytes(content)
        _compare(student, kind.open(whole), format)
        list_file(path)
        write_atomically(path, lambda partial: os.replace(whole, partial), len(content))
    return path


def trace(student: nn.Module) -> ExportedProgram:
    """A student as a program of standard operators, from rows ``x [batch, in_channels]`` to logits; any batch size."""
    parameter = next(student.parameters())
    rows = torch.zeros(2, student.in_channels, dtype=parameter.dtype, device=parameter.device)
    with torch.no_grad():
        return torch.export.export(plain(student), (rows,), dynamic_shapes=({0: Dim("batch")},))


def _format(name: str) -> Format:
    if name not in FORMATS:
        raise ValueError(f"format is {name!r}, expected one of {', '.join(FORMATS)}")
    return FORMATS[name]


@torch.no_grad()
def _compare(student: nn.Module, answer: Callable[[Tensor], Tensor], name: str) -> None:
    parameter = next(student.parameters())
    generator = torch.Generator().manual_seed(0)
    for batch in _BATCHES:
        rows = torch.randn(batch, student.in_channels, generator=generator).to(parameter)
        expected, got = student(rows), answer(rows)
        error = float((got - expected).abs().max() / expected.abs().max().clamp_min(1.0))
        if not error <= TOLERANCE:  # NaN is not
            raise ValueError(
                f"format {name!r}: the file answers {batch} rows with logits that are off by {error:.1e} of the"
                f" largest, expected at most {TOLERANCE:.0e}; it was not kept. Please report this, with the versions"
                " that rbm info prints"
            )


def _open_exported(path: Path) -> Callable[[Tensor], Tensor]:
    return torch.export.load(path).module()


def _exported(program: ExportedProgram) -> memoryview:
    content = io.BytesIO()
    torch.export.save(program, content)
    return content.getbuffer()


def _compiled(program: ExportedProgram) -> bytes:
    # The compiler works among temporary files, and aborts the process where there is no room for them.
    with tempfile.TemporaryDirectory(prefix="rbm-") as folder:
        size = sum(tensor.nbytes for tensor in program.state_dict.values())
        free = shutil.disk_usage(folder).free
        if free < (needed := 4 * size + _COMPILER_FILES):
            raise OSError(f"{folder} has {free:,} bytes free, and compiling needs {needed:,}; set TMPDIR to another")
        path = Path(folder) / "student.pt2"
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))
        return path.read_bytes()


def _open_compiled(path: Path) -> Callable[[Tensor], Tensor]:
    return torch._inductor.aoti_load_package(str(path))


def _onnx(program: ExportedProgram) -> bytes:
    exported = torch.onnx.export(
        program,
        (),
        dynamo=True,
        external_data=False,  # one file; it may have 2 GB
        opset_version=18,  # an old one, which many runtimes know
        verbose=False,
        input_names=["x"],
        output_names=["logits"],
        custom_translation_table={torch.ops.aten.sort.stable: _stable_sort()},
    )
    return exported.model_proto.SerializeToString()


def _stable_sort() -> Callable:
    """ONNX has TopK and no sort; among equal values it gives the lower index first, so a sort by it is stable."""
    from onnxscript import opset18 as onnx

    def sort(values, *, stable=None, dim=-1, descending=False):
        count = onnx.Gather(onnx.Shape(values), onnx.Constant(value_ints=[dim]))
        return onnx.TopK(values, count, axis=dim, largest=int(descending))

    return sort


def _open_onnx(path: Path) -> Callable[[Tensor], Tensor]:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda rows: torch.from_numpy(session.run(["logits"], {"x": rows.numpy()})[0])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what exporters tell about themselves: packages that they do not find, functions of theirs that age."""
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
