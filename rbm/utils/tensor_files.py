"""Files of tensors: safetensors with a checksum of their content, and files written by ``torch.save``.

A file of this package has one key in its metadata, ``rbm``: JSON with the values that accompany the tensors and with
the checksum. Files of version 0.1.0 have no checksum and are accepted unchecked.
"""

import hashlib
import json
import pickle
import threading
import traceback
import warnings
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from rbm.utils.files import first_line

METADATA_KEY = "rbm"
# Dtypes that isfinite() supports; it does not support some 8-bit ones.
_SUPPORT_ISFINITE = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.complex64)
_LISTED = threading.Lock()  # PyTorch has one list of allowed classes for all threads


def sealed(tensors: dict[str, Tensor], values: dict[str, Any] | None = None) -> bytes:
    """The content of a safetensors file of tensors, values that JSON can hold, and a checksum of both."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        if (address := tensor.untyped_storage().data_ptr()) in storages:
            tensors[name] = tensor.clone()  # safetensors refuses tensors that share memory
        storages.add(address)
    about = {"values": values or {}, "checksum": _checksum(tensors, values or {})}
    # A single key: safetensors writes several keys in varying order, and equal runs should give equal files.
    return save(tensors, {METADATA_KEY: json.dumps(about)})


def read_sealed(
    path: Path, *, foreign: bool = False, unsealed: bool = True
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the tensors of a safetensors file, and the values that accompany them.

    Args:
        path: the file.
        foreign: accept a file without this package's metadata, as other programs write them; it has no values.
        unsealed: accept a file without a checksum, as version 0.1.0 wrote them.

    Raises:
        ValueError: the file is damaged (another format, truncated, or a wrong checksum), or it is not accepted.
    """
    tensors, about = _opened(path, lambda file: {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    if about is None:
        if not foreign:
            raise ValueError(f"{path} was not written by this package: its metadata lacks the key {METADATA_KEY}")
        return tensors, {}
    if not isinstance(about, dict):
        raise ValueError(f"{path} is damaged: its metadata say {about!r}, expected values by name")
    if unsealed and "values" not in about and "checksum" not in about:
        return tensors, about
    if about.keys() != {"values", "checksum"} or about["checksum"] != _checksum(tensors, about["values"]):
        raise ValueError(f"{path} is damaged: its content is not what was written (its checksum differs); restore it")
    return tensors, about["values"]


def stored_checksum(path: Path) -> str | None:
    """The checksum that a file of this package contains, without reading its tensors; None if it has none.

    Raises:
        ValueError: the file is damaged.
    """
    _, about = _opened(path, lambda file: None)
    return about.get("checksum") if isinstance(about, dict) else None


def _opened(path: Path, read: Callable[[Any], Any]) -> tuple[Any, Any]:
    """What ``read`` takes from the open file, and this package's metadata, None if it has none; ValueError if the file
    is damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            written, taken = (file.metadata() or {}).get(METADATA_KEY), read(file)
        return taken, None if written is None else json.loads(written)
    except Exception as error:  # a damaged header raises nearly anything
        raise ValueError(f"{path} is not a readable safetensors file: {first_line(error)}") from error


def check_finite(path: Path | str, tensors: dict[str, Tensor]) -> None:
    """Raise ValueError if a tensor of a file contains NaN, infinity or complex numbers."""
    for name, tensor in tensors.items():
        known = tensor if tensor.dtype in _SUPPORT_ISFINITE else tensor.float()
        if tensor.is_complex() or not bool(known.isfinite().all()):
            raise ValueError(
                f"{path}: {name} holds NaN, infinity or complex numbers, expected finite numbers; train the model anew"
            )


def _checksum(tensors: dict[str, Tensor], values: Any) -> str:
    return fingerprint("content", {"names": sorted(tensors), "values": values}, (tensors[n] for n in sorted(tensors)))


def fingerprint(kind: str, settings: Any, inputs: Iterable[Tensor] = ()) -> str:
    """A hash of 16 hexadecimal digits of kind, settings, and the inputs' shapes, dtypes and numbers.

    Args:
        kind: the kind of object.
        settings: JSON values.
        inputs: tensors, dense or CSR, on any device.
    """
    digest = hashlib.sha256(json.dumps([kind, settings], sort_keys=True).encode())
    for tensor in inputs:
        digest.update(f"{tensor.layout} {tensor.dtype} {list(tensor.shape)}".encode())
        for part in _parts(tensor.detach().cpu()):
            digest.update(part.contiguous().view(torch.uint8).numpy().data if part.numel() else b"")
    return digest.hexdigest()[:16]


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    if tensor.layout == torch.sparse_csr:
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    else:
        yield tensor.reshape(-1)


class PicklesError(ValueError):
    """A pickle contains more than tensors, containers and allowed classes."""


class SparseTensorError(ValueError):
    """A sparse tensor in a file is not sound, or has unsorted or repeated columns: PyTorch 2.14 and newer refuse it.

    The message is a sentence without its subject, the file.
    """


def read_pickled(path: Path, allowed: Iterable[type] = (), *, device: str | None = "cpu") -> Any:
    """Read a file written by ``torch.save``, memory-mapped; no code in it can run.

    Args:
        path: the file.
        allowed: classes that may occur in it, in addition to tensors and containers.
        device: device of the tensors; None keeps the stored devices.

    Raises:
        PicklesError: it contains another class.
        SparseTensorError: PyTorch refuses a sparse tensor in it.
        ValueError: it has another format, is damaged, or would be larger than the file. Messages give the reason
            without the file's name.
    """
    try:
        # Memory-mapped, so that pages of a large graph are read when needed and storages cannot extend beyond the file,
        # whatever size the pickle declares. Files of PyTorch before 1.6 do not support it.
        if archive := zipfile.is_zipfile(path):
            _check_archive(path)
        with _allowed_in_pickles(allowed), warnings.catch_warnings():
            # PyTorch's notices, no fault of the file: CSR is in beta, and checking sparse tensors takes time.
            warnings.filterwarnings("ignore", message="Sparse CSR|Validating sparse")
            return torch.load(path, map_location=device, weights_only=True, mmap=archive)
    except pickle.UnpicklingError as error:
        raise PicklesError(first_line(error)) from error
    except RuntimeError as error:
        called = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
        if "_validate_loaded_sparse_tensors" not in called:
            raise ValueError(first_line(error)) from error
        raise SparseTensorError(
            f"holds a sparse tensor that PyTorch {torch.__version__} refuses ({first_line(error)}); if columns are"
            " only unsorted or repeated, torch.load with weights_only=False, and torch.save"
            " x.to_dense().to_sparse_csr()"
        ) from error
    except Exception as error:  # a damaged pickle raises nearly anything
        raise ValueError(first_line(error)) from error


@contextmanager
def _allowed_in_pickles(classes: Iterable[type]) -> Iterator[None]:
    """PyTorch's unpickler also accepts these classes, and reads a ``defaultdict`` as a dictionary.

    Its list is the same afterwards. :class:`torch.serialization.safe_globals` would remove what was in it before, if it
    is among these classes, and the caller's own ``torch.load`` may need it.
    """
    with _LISTED:
        before = torch.serialization.get_safe_globals()
        more = [*classes, (_dictionary, "collections.defaultdict")]  # a defaultdict itself cannot be filled there
        try:
            torch.serialization.clear_safe_globals()
            torch.serialization.add_safe_globals([*(known for known in before if known is not defaultdict), *more])
            yield
        finally:
            torch.serialization.clear_safe_globals()
            torch.serialization.add_safe_globals(before)


def _dictionary(*_: Any) -> dict:
    return {}


def _check_archive(path: Path) -> None:
    """Check an archive: PyTorch verifies no checksums and inflates compressed data to any size.

    ``torch.save`` does not compress.
    """
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise ValueError("it is a compressed archive, which torch.save never writes")
        if sum(entry.file_size for entry in entries) > path.stat().st_size:
            raise ValueError("its parts are larger than the file")
        # torch.serialization.set_crc32_options(False) writes no checksums.
        if any(entry.CRC for entry in entries) and (damaged := archive.testzip()) is not None:
            raise ValueError(f"its part {damaged} is not what was written (its checksum differs)")
