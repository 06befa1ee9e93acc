"""The work of one process in a distributed GPU test. Not a test module, since spawned processes import it."""

import copy
import socket
from pathlib import Path

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

from rbm import FusedRbMLayer

FEATURES, OUTPUTS, EXPERTS = 24, 10, 5
# Rows of the joint batches; one rank has no rows of the last batch.
BATCHES = (96, 37, 1)


def make(device: str) -> FusedRbMLayer:
    """The layer that all ranks begin with."""
    torch.manual_seed(0)
    return FusedRbMLayer(FEATURES, OUTPUTS, EXPERTS, 2, detach_gates=False).to(device)


def batches(device: str) -> list[Tensor]:
    """Joint batches."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, FEATURES, generator=generator).to(device) for rows in BATCHES]


def train(model: nn.Module, layer: FusedRbMLayer, rows: list[Tensor], factor: float) -> dict[str, Tensor]:
    """Gradient descent on the sum over rows; the layer's final state, on the CPU."""
    for batch in rows:
        model.zero_grad()
        (model(batch).square().sum() * factor).backward()
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter -= 0.001 * parameter.grad
    return copy.deepcopy({name: value.cpu() for name, value in layer.eval().state_dict().items()})


def spawn(ranks: int, backend: str, devices: list[str], folder: Path) -> list[dict[str, Tensor]]:
    """The final state of each rank, trained with DDP on its part of every batch."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_run, (ranks, port, backend, devices, folder), nprocs=ranks)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(ranks)]


def _run(rank: int, ranks: int, port: int, backend: str, devices: list[str], folder: Path) -> None:
    torch.set_num_threads(1)
    device = torch.device(devices[rank])
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)  # set_device takes no device without a number
        torch.cuda.set_device(device)
    torch.distributed.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    layer = make(devices[rank])
    model = nn.parallel.DistributedDataParallel(layer, device_ids=[device] if device.type == "cuda" else None)
    mine = [batch.tensor_split(ranks)[rank] for batch in batches(devices[rank])]
    # DDP's mean over ranks times their number is the gradient of the joint batch.
    torch.save(train(model, layer, mine, float(ranks)), folder / f"rank{rank}.pt")
    del model  # before its group, see docs/scale.md
    torch.distributed.destroy_process_group()
