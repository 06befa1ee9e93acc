"""Distributed training: sums and rows over ranks, work on the first rank only, and random numbers per rank.

Start it with ``torchrun --nproc-per-node N -m rbm distill ...``, or start a process group and call :func:`rbm.distill`
on every rank. A training step then uses the *joint batch*: each rank has a part of its rows, and losses are scaled so
that their mean over ranks is the loss of the joint batch. DDP averages gradients. Quantities that are not part of a
mean over rows (statistics of the memory and of BatchNorm, the experts' load) are summed over ranks, with gradient.

Only the first rank reads and writes the files of a run: :func:`broadcast_from_rank0` lets it work while the others
wait.
"""

import gc
import io
import os
import pickle
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

T = TypeVar("T")
# A teacher may train for days while the other ranks wait. If the first rank ends, they notice the closed connection.
_PATIENCE = timedelta(days=30)
# Whether this rank currently works as if there were no others.
_alone = False
# The process group at the time of the last message from the first rank, and the group that carries such messages.
_gloo_group: tuple[Any, Any] | None = None


def world_size() -> int:
    """The number of ranks that train together; 1 without a process group, and inside :func:`alone`."""
    if not _alone and dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return 1


def rank() -> int:
    """The rank of this process, from 0."""
    return dist.get_rank() if world_size() > 1 else 0


def is_main_process() -> bool:
    """Whether this rank reads, writes and reports for all; true in a single process."""
    return rank() == 0


def launched() -> int:
    """The number of processes that ``torchrun`` started, including this one; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", 1))


@contextmanager
def joined(device: str) -> Iterator[str]:
    """Join the process group if ``torchrun`` started this process; yields the device that it should use.

    The backend is NCCL for GPUs, one per process, and gloo for CPUs, on any number of machines.
    """
    if launched() == 1 or dist.is_initialized():
        yield device
        return
    if device == "cuda":
        local = int(os.environ["LOCAL_RANK"])
        if local >= torch.cuda.device_count():
            raise ValueError(
                f"process {local} of this machine has no GPU of its own, there are {torch.cuda.device_count()}; start"
                " torchrun with at most as many --nproc-per-node, or give --device cpu"
            )
        torch.cuda.set_device(local)
        device = f"cuda:{local}"
    dist.init_process_group("gloo" if device == "cpu" else "nccl")
    try:
        yield device
    finally:
        # A DDP instance left in a reference cycle would later destroy its group while it holds the GIL, for which the
        # threads of gloo wait.
        gc.collect()
        dist.destroy_process_group()


@contextmanager
def alone() -> Iterator[None]:
    """Let this rank work as if there were no others: it neither waits for them nor shares anything with them."""
    global _alone
    before, _alone = _alone, True
    try:
        yield
    finally:
        _alone = before


def broadcast_from_rank0(compute: Callable[[], T]) -> T:
    """Call ``compute()`` on the first rank and return its result on all ranks; the others wait.

    The first rank works :func:`alone`, and its random state is restored afterwards, so that all ranks keep the same
    state. CUDA tensors arrive on each rank's own device. An error is raised on all ranks; on the others it has the
    attribute ``reported_by_rank0``, so that only the first rank reports it.
    """
    if world_size() == 1:
        return compute()
    if not is_main_process():
        content = _unpack(_broadcast(None))
        if isinstance(content, _Raised):
            raise content.error()
        return content
    try:
        with forked(), alone():
            content = compute()
    except Exception as error:
        _broadcast(_pack(_Raised(error)))
        raise
    _broadcast(_pack(content))
    return content


def on_main_process(compute: Callable[[], T]) -> T | None:
    """Like :func:`broadcast_from_rank0`, but the result stays on the first rank: the others get None."""
    kept = []
    broadcast_from_rank0(lambda: kept.append(compute()))
    return kept[0] if kept else None


def compute_once(known: dict[Hashable, Any], key: Hashable, compute: Callable[[], T]) -> T:
    """``known[key]``; if it is missing, the first rank computes it for all.

    Results that the first rank computed :func:`alone` are missing on the others, so they do not count as known when all
    ranks call this function.
    """
    if (key, _alone) not in known:
        known[key, _alone] = broadcast_from_rank0(compute)
    return known[key, _alone]


def local_slice(count: int) -> slice:
    """This rank's part of ``count`` rows: in order and of nearly equal size; it may be empty."""
    first, ranks = rank(), world_size()
    return slice(count * first // ranks, count * (first + 1) // ranks)


def all_reduce_sum(values: Tensor) -> Tensor:
    """Sum over ranks, bitwise equal on each. Gradients flow back from all ranks to every rank's ``values``."""
    return values if world_size() == 1 else _JointSum.apply(values)


def all_gather_rows(rows: Tensor) -> Tensor:
    """Concatenate the rows ``[B_r, ...]`` of all ranks in order, with gradient to each rank's own; ``B_r`` may be 0."""
    return rows if world_size() == 1 else _JointRows.apply(rows)


def average_gradients(module: nn.Module | None) -> None:
    """Average gradients over ranks for a small module that DDP does not wrap; all ranks must have used it, or none."""
    if world_size() == 1 or module is None:
        return
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad = all_reduce_sum(parameter.grad) / world_size()


class Replicas:
    """A module that ranks train together, each on its own rows; uses DDP if there are several ranks."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._parallel: DistributedDataParallel | None = None

    @contextmanager
    def passing(self, *, ends_step: bool, some_unused: bool) -> Iterator[nn.Module]:
        """Yield the module to call instead, for a forward and its backward.

        Args:
            ends_step: average the gradients in ``.grad`` since the last step over ranks.
            some_unused: the forward may not use all parameters; unused ones get no gradient, as in a single process.
        """
        if world_size() == 1:
            yield self.module
            return
        if self._parallel is None or self._parallel.find_unused_parameters != some_unused:
            # The hooks of the old DDP must be removed before the new one sets its own.
            self._parallel = None
            with warnings.catch_warnings():
                # PyTorch 2.13 has a new name for this argument, which earlier versions do not know.
                warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)
                # Buffers are computed from joint statistics and equal on all ranks, so they need not be sent.
                self._parallel = DistributedDataParallel(
                    self.module, broadcast_buffers=False, find_unused_parameters=some_unused
                )
        with nullcontext() if ends_step else self._parallel.no_sync():
            yield self._parallel


@contextmanager
def own_randomness(epoch: int) -> Iterator[None]:
    """Let each rank draw its own random numbers (dropout of its rows), different in each epoch.

    Outside, all ranks draw the same numbers: they start from the same seed, and their state is restored afterwards. In
    a single process, this does nothing.
    """
    if world_size() == 1:
        yield
        return
    with forked():
        shared = int(torch.randint(2**62, ()))
        (seed,) = np.random.SeedSequence((shared, epoch, rank())).generate_state(1, np.uint64)
        torch.manual_seed(int(seed))
        yield


@contextmanager
def forked() -> Iterator[None]:
    """Restore the random state of this process's devices afterwards: of one GPU if there are ranks, else of all."""
    devices = range(torch.cuda.device_count())  # named, since PyTorch warns of several if it is to find them
    if devices and world_size() > 1:
        devices = [torch.cuda.current_device()]
    with torch.random.fork_rng(devices):
        yield


class _JointSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values: Tensor) -> Tensor:
        total = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        # The loss of each rank depends on the values of all ranks.
        return _JointSum.apply(grad)


class _JointRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor) -> Tensor:
        sizes = [rows.new_empty(1, dtype=torch.int64) for _ in range(world_size())]
        dist.all_gather(sizes, torch.full_like(sizes[0], rows.shape[0]))
        ctx.sizes = [int(size) for size in sizes]
        # All backends can gather parts of equal size.
        padded = rows.new_zeros(max(ctx.sizes), *rows.shape[1:])
        padded[: rows.shape[0]] = rows
        parts = [torch.empty_like(padded) for _ in ctx.sizes]
        dist.all_gather(parts, padded)
        return torch.cat([part[:size] for part, size in zip(parts, ctx.sizes, strict=True)])

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad)
        return grad.split(ctx.sizes)[rank()]


class _Raised:
    """An error of the first rank, sent to the others; errors caused by the user keep their class."""

    def __init__(self, error: Exception) -> None:
        kinds = (FileExistsError, FileNotFoundError, OSError, TypeError, ValueError, FloatingPointError)
        self.kind = next((kind for kind in kinds if isinstance(error, kind)), RuntimeError)
        self.text = str(error)

    def error(self) -> Exception:
        error = self.kind(self.text)
        error.reported_by_rank0 = True
        return error


def _pack(content: Any) -> Tensor:
    file = io.BytesIO()
    # Older pickle protocols map built-in classes to those of Python 2.
    torch.save(content, file, pickle_protocol=pickle.HIGHEST_PROTOCOL)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


def _unpack(packed: Tensor) -> Any:
    def own_device(storage, location: str):
        return storage if location == "cpu" else storage.cuda(torch.cuda.current_device())

    # The message comes from a process of this run and may contain any class.
    return torch.load(io.BytesIO(packed.numpy().data), map_location=own_device, weights_only=False)


def _broadcast(message: Tensor | None) -> Tensor:
    """Send bytes from the first rank to all, over connections with a long timeout, always on the CPU."""
    global _gloo_group
    if _gloo_group is None or _gloo_group[0] is not dist.group.WORLD:
        _gloo_group = dist.group.WORLD, dist.new_group(backend="gloo", timeout=_PATIENCE)
    size = torch.tensor([0 if message is None else message.numel()])
    dist.broadcast(size, 0, _gloo_group[1])
    message = torch.empty(int(size), dtype=torch.uint8) if message is None else message
    dist.broadcast(message, 0, _gloo_group[1])
    return message
