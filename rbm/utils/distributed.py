"""Distributed training: sums and rows over ranks, work of the first rank alone, and random numbers of each rank.

Start them by ``torchrun --nproc-per-node N -m rbm distill ...``, or start a process group and call
:func:`rbm.distill` on every rank. A training step is then that of the *joint batch*: each rank has a part of its rows,
and the loss of a rank is such that the mean over ranks is the loss of the whole. DDP averages gradients; what is no
sum over rows (statistics of the memory and of BatchNorm, the experts' load) is added up over ranks, with gradient.

Everything a run reads or writes once is the first rank's: :func:`broadcast_from_rank0` lets it work while the others
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
# A teacher may train for days while the others wait. The connection tells them where the rank has ended.
_PATIENCE = timedelta(days=30)
# Whether this rank works by itself, as if there were no others.
_alone = False
# The process group of the last message from the first rank, and the one that carries such messages.
_messengers: tuple[Any, Any] | None = None


def world_size() -> int:
    """Ranks that train together; 1 without a process group, and inside :func:`alone`."""
    if not _alone and dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return 1


def rank() -> int:
    """This process among them, from 0."""
    return dist.get_rank() if world_size() > 1 else 0


def is_main_process() -> bool:
    """Whether this is the rank that reads, writes and reports for all; true in a single process."""
    return rank() == 0


def launched() -> int:
    """Processes that ``torchrun`` started, this one among them; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", 1))


@contextmanager
def joined(device: str) -> Iterator[str]:
    """Join the processes that ``torchrun`` started beside this one, if it did; the device that this one shall use.

    NCCL connects GPUs, one a process, and gloo the CPUs of any number of machines.
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
        # DDP left in a cycle would later take its group along and hold the GIL, for which the threads of gloo wait.
        gc.collect()
        dist.destroy_process_group()


@contextmanager
def alone() -> Iterator[None]:
    """Inside, this rank works as if there were no others: nothing waits for them, nothing is shared with them."""
    global _alone
    before, _alone = _alone, True
    try:
        yield
    finally:
        _alone = before


def broadcast_from_rank0(compute: Callable[[], T]) -> T:
    """What ``compute()`` returns on the first rank, on all of them; the others wait for it and do not compute.

    The first works :func:`alone`, and what it draws leaves the random state as it was, so that ranks stay alike. CUDA
    tensors arrive on each rank's own device. What it raises is raised on all ranks: on the others with the attribute
    ``told_by_first``, so that one of them can tell it for all.
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
    """As :func:`broadcast_from_rank0`, but what is computed stays where it is: the other ranks get None."""
    kept = []
    broadcast_from_rank0(lambda: kept.append(compute()))
    return kept[0] if kept else None


def once(known: dict[Hashable, Any], key: Hashable, compute: Callable[[], T]) -> T:
    """``known[key]``, which the first rank computes for all where it is missing.

    What it computed :func:`alone` the others do not have: it is not taken for known when all ask.
    """
    if (key, _alone) not in known:
        known[key, _alone] = broadcast_from_rank0(compute)
    return known[key, _alone]


def local_slice(count: int) -> slice:
    """Which of ``count`` rows are this rank's: as even as may be, in order; none where rows are few."""
    first, ranks = rank(), world_size()
    return slice(count * first // ranks, count * (first + 1) // ranks)


def all_reduce_sum(values: Tensor) -> Tensor:
    """Sum over ranks, the same bits on each, with gradient: it flows back to every rank's ``values`` from all ranks."""
    return values if world_size() == 1 else _JointSum.apply(values)


def all_gather_rows(rows: Tensor) -> Tensor:
    """The rows ``[B_r, ...]`` of all ranks, in their order, with gradient to each rank's own. ``B_r`` may be zero."""
    return rows if world_size() == 1 else _JointRows.apply(rows)


def average_gradients(module: nn.Module | None) -> None:
    """What DDP does, for a small module beside the one that it wraps; all ranks must have used it, or none."""
    if world_size() == 1 or module is None:
        return
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad = all_reduce_sum(parameter.grad) / world_size()


class Replicas:
    """A module that ranks train together, each on its rows: DDP where there are several ranks."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._parallel: DistributedDataParallel | None = None

    @contextmanager
    def passing(self, *, ends_step: bool, some_unused: bool) -> Iterator[nn.Module]:
        """What to call in place of the module, for a forward and its backward inside.

        Args:
            ends_step: average over ranks what this backward and those since the last step left in ``.grad``.
            some_unused: a forward may leave parameters out; these keep no gradient, as in a single process.
        """
        if world_size() == 1:
            yield self.module
            return
        if self._parallel is None or self._parallel.find_unused_parameters != some_unused:
            # The old one's hooks must be gone before the new one's are set.
            self._parallel = None
            with warnings.catch_warnings():
                # PyTorch 2.13 has a new name for it, which earlier ones do not know.
                warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)
                # Buffers follow from joint statistics, alike on all ranks: nothing is to be sent.
                self._parallel = DistributedDataParallel(
                    self.module, broadcast_buffers=False, find_unused_parameters=some_unused
                )
        with nullcontext() if ends_step else self._parallel.no_sync():
            yield self._parallel


@contextmanager
def own_randomness(epoch: int) -> Iterator[None]:
    """Inside, each rank draws numbers of its own (its rows' dropout), anew each epoch.

    Outside all draw the same: they start from one seed, and what is drawn inside leaves their state as it was. In a
    single process it is nothing.
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
    """The random state of this process's devices is afterwards what it was before."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices if world_size() > 1 else None):
        yield


class _JointSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values: Tensor) -> Tensor:
        total = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        # Every rank's loss depends on every rank's values.
        return _JointSum.apply(grad)


class _JointRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor) -> Tensor:
        sizes = [rows.new_empty(1, dtype=torch.int64) for _ in range(world_size())]
        dist.all_gather(sizes, torch.full_like(sizes[0], rows.shape[0]))
        ctx.sizes = [int(size) for size in sizes]
        # Parts of one size are what every backend can gather.
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
    """An error of the first rank, sent to the others; a user's mistake keeps its class."""

    def __init__(self, error: Exception) -> None:
        kinds = (FileExistsError, FileNotFoundError, OSError, TypeError, ValueError, FloatingPointError)
        self.kind = next((kind for kind in kinds if isinstance(error, kind)), RuntimeError)
        self.text = str(error)

    def error(self) -> Exception:
        error = self.kind(self.text)
        error.told_by_first = True
        return error


def _pack(content: Any) -> Tensor:
    file = io.BytesIO()
    # An older protocol takes the built-in classes for those of Python 2.
    torch.save(content, file, pickle_protocol=pickle.HIGHEST_PROTOCOL)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


def _unpack(packed: Tensor) -> Any:
    def own_device(storage, location: str):
        return storage if location == "cpu" else storage.cuda(torch.cuda.current_device())

    # It comes from a process of this run, whose classes no allow-list names.
    return torch.load(io.BytesIO(packed.numpy().data), map_location=own_device, weights_only=False)


def _broadcast(message: Tensor | None) -> Tensor:
    """Send bytes of the first rank to all, over connections with a long timeout, always on the CPU."""
    global _messengers
    if _messengers is None or _messengers[0] is not dist.group.WORLD:
        _messengers = dist.group.WORLD, dist.new_group(backend="gloo", timeout=_PATIENCE)
    size = torch.tensor([0 if message is None else message.numel()])
    dist.broadcast(size, 0, _messengers[1])
    message = torch.empty(int(size), dtype=torch.uint8) if message is None else message
    dist.broadcast(message, 0, _messengers[1])
    return message
