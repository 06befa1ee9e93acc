"""Files of tensors: safetensors with a checksum of their content, and what ``torch.save`` wrote.

A file of this package has one key in its metadata, ``rbm``: JSON of the values beside the tensors and of the checksum.
Files of version 0.1.0 have no checksum and are taken as they are.
"""

import hashlib
import json
import pickle
import warnings
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from rbm.utils.files import first_line

METADATA_KEY = "rbm"
# Dtypes that isfinite() supports; it lacks some of 8 bits.
_FINITE_TOLD = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.complex64)


def sealed(tensors: dict[str, Tensor], values: dict[str, Any] | None = None) -> bytes:
    """The content of a safetensors file of tensors, values that JSON can hold, and a checksum of both."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    about = {"values": values or {}, "checksum": _checksum(tensors, values or {})}
    # One key: safetensors writes several in an order that changes, and equal runs shall leave equal files.
    return save(tensors, {METADATA_KEY: json.dumps(about)})


def read_sealed(
    path: Path, *, foreign: bool = False, unsealed: bool = True
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a safetensors file, and the values beside them.

    Args:
        path: the file.
        foreign: whether a file without this package's metadata is taken, as others write them. It has no values.
        unsealed: whether a file without a checksum is taken, as version 0.1.0 wrote them.

    Raises:
        ValueError: the file is damaged: something else, cut short, or not what was written; or it is not taken.
    """
    try:
        with safe_open(path, framework="pt") as file:
            written = (file.metadata() or {}).get(METADATA_KEY)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        about = None if written is None else json.loads(written)
    except Exception as error:  # a damaged header raises nearly anything
        raise ValueError(f"{path} is not a readable safetensors file: {first_line(error)}") from error
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


def check_finite(path: Path | str, tensors: dict[str, Tensor]) -> None:
    """Raise ValueError where one of the tensors of a file holds NaN, infinity or complex numbers."""
    for name, tensor in tensors.items():
        known = tensor if tensor.dtype in _FINITE_TOLD else tensor.float()
        if tensor.is_complex() or not bool(known.isfinite().all()):
            raise ValueError(
                f"{path}: {name} holds NaN, infinity or complex numbers, expected finite numbers; train the model anew"
            )


def _checksum(tensors: dict[str, Tensor], values: Any) -> str:
    return fingerprint("content", {"names": sorted(tensors), "values": values}, (tensors[n] for n in sorted(tensors)))


def fingerprint(kind: str, settings: Any, inputs: Iterable[Tensor] = ()) -> str:
    """16 hexadecimal digits that differ where kind, settings, or shapes, dtypes or numbers of the inputs do.

    Args:
        kind: what is told apart.
        settings: what JSON can hold.
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
    """A pickle asks for more than tensors, containers and the classes that are allowed."""


def read_pickled(path: Path, allowed: Iterable[type] = (), *, device: str | None = "cpu") -> Any:
    """What ``torch.save`` wrote, mapped into memory; nothing in it can run.

    Args:
        path: the file.
        allowed: classes that may be in it, beside tensors and containers.
        device: of the tensors; None leaves each where it was.

    Raises:
        PicklesError: it asks for something else.
        ValueError: it is something else, damaged, or larger than it could have been written. Messages tell why, and do
            not name the file.
    """
    try:
        # Mapped: pages of a large graph are read when they are needed; and storages end where the file does, whatever
        # the pickle says of their size. Files of PyTorch before 1.6 do not allow it.
        if archive := zipfile.is_zipfile(path):
            _check_archive(path)
        with torch.serialization.safe_globals(list(allowed)), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Sparse CSR")  # a notice of PyTorch, not of a fault in the file
            return torch.load(path, map_location=device, weights_only=True, mmap=archive)
    except pickle.UnpicklingError as error:
        raise PicklesError(first_line(error)) from error
    except Exception as error:  # a damaged pickle raises nearly anything
        raise ValueError(first_line(error)) from error


def _check_archive(path: Path) -> None:
    """PyTorch compares no checksum, and unpacks what was packed, to any size; ``torch.save`` packs nothing."""
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise ValueError("it is a compressed archive, which torch.save never writes")
        if sum(entry.file_size for entry in entries) > path.stat().st_size:
            raise ValueError("its parts are larger than the file")
        # torch.serialization.set_crc32_options(False) writes none.
        if any(entry.CRC for entry in entries) and (damaged := archive.testzip()) is not None:
            raise ValueError(f"its part {damaged} is not what was written (its checksum differs)")
