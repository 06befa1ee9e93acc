"""Results kept by the content of what made them: a walk over a graph or a teacher's training need not run twice."""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor


class Cache:
    """A folder of tensors, each file named by a hash of the settings and the tensors that it follows from.

    Files are written beside their place and renamed, so that a kill, or two processes that compute the same, leave a
    whole file or none. The folder may be deleted at any time.

    Args:
        folder: where files lie; made when the first is written. None keeps nothing: everything is computed.
    """

    def __init__(self, folder: Path | str | None = None) -> None:
        self.folder = None if folder is None else Path(folder)

    def tensors(
        self,
        kind: str,
        settings: dict[str, Any],
        inputs: Iterable[Tensor],
        compute: Callable[[], dict[str, Tensor]],
    ) -> dict[str, Tensor]:
        """What ``compute`` returns, on the CPU, taken from the folder where it is known.

        Args:
            kind: what it is, for example ``"deepwalk"``; the beginning of the file's name.
            settings: everything beside ``inputs`` that the result depends on; values that JSON can hold.
            inputs: tensors that it depends on, dense or CSR, on any device.
            compute: gives the tensors by name.
        """
        if self.folder is None:
            return compute()
        path = self.folder / f"{kind}-{fingerprint(kind, settings, inputs)}.safetensors"
        if path.is_file():
            try:
                return load_file(path)
            except (SafetensorError, OSError):
                pass  # not a file of ours, or one that a disk has damaged: it is made anew
        computed = {name: tensor.detach().cpu().contiguous() for name, tensor in compute().items()}
        self.folder.mkdir(parents=True, exist_ok=True)
        handle, beside = tempfile.mkstemp(dir=self.folder, prefix=f".{kind}-", suffix=".safetensors")
        os.close(handle)
        try:
            save_file(computed, beside)
            os.replace(beside, path)
        finally:
            Path(beside).unlink(missing_ok=True)
        return computed


def fingerprint(kind: str, settings: dict[str, Any], inputs: Iterable[Tensor] = ()) -> str:
    """16 hexadecimal digits that differ where kind, settings, or shapes, dtypes or numbers of the inputs do."""
    digest = hashlib.sha256(json.dumps([kind, settings], sort_keys=True).encode())
    for tensor in inputs:
        digest.update(f"{tensor.layout} {tensor.dtype} {list(tensor.shape)}".encode())
        for part in _parts(tensor.detach().cpu()):
            digest.update(part.contiguous().view(torch.uint8).numpy().data if part.numel() else b"")
    return digest.hexdigest()[:16]


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    if tensor.layout == torch.sparse_csr:
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return (tensor.reshape(-1),)
