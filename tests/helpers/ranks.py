"""The work of one process in a distributed test. Not a test module, since spawned processes import it."""

import torch
from torch import nn

from rbm import FusedRbMLayer


def train_rank(rank, world_size, port, state, batches, results):
    """Train a layer on this rank's part of every batch; leave its final state in ``results``."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size
    )
    layer = FusedRbMLayer(6, 4, 5, 2, dtype=torch.float64)
    layer.load_state_dict(state)
    model = nn.parallel.DistributedDataParallel(layer)
    for batch in batches:
        model.zero_grad()
        # A sum over rows, so that DDP's mean over ranks times their number is the gradient of the joint batch.
        (model(batch.tensor_split(world_size)[rank]).square().sum() * world_size).backward()
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter -= 0.01 * parameter.grad
    results[rank] = {name: value.tolist() for name, value in layer.eval().state_dict().items()}
    del model  # before its group, see docs/scale.md
    torch.distributed.destroy_process_group()
