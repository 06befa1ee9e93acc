"""Batches for graphs that are too large for one pass of a teacher: training nodes with sampled neighbours.

PyTorch Geometric needs pyg-lib or torch-sparse for sampling, in a version for the installed PyTorch.
"""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor
from torch_geometric import typing
from torch_geometric.data import Data

from rbm.config import ATTENTION_TEACHERS, Config, SamplingConfig


class Sample(NamedTuple):
    """A part of a graph.

    Attributes:
        nodes: int64 ``[n]``, ids in the graph; the training nodes of the batch come first.
        edges: int64 ``[2, m]``, positions in ``nodes``; messages flow from row 0 to row 1.
        count: number of training nodes in the batch.
    """

    nodes: Tensor
    edges: Tensor
    count: int


class NeighborBatches:
    """The batches of an epoch, sampled anew in each iteration.

    Args:
        graph: the observed graph, on any device.
        nodes: int64, the training nodes.
        sampling: see :class:`rbm.config.SamplingConfig`; its ``batch_size`` must be positive.
        num_layers: number of layers of the teacher, which is the number of sampled hops.

    Raises:
        ValueError: neither pyg-lib nor torch-sparse is installed, or ``fan_out`` is for another number of layers.
    """

    def __init__(self, graph: Data, nodes: Tensor, sampling: SamplingConfig, num_layers: int) -> None:
        check_sampler(sampling)
        # Imported here: PyG's loaders are slow to import, and few teachers need them.
        from torch_geometric.loader import NeighborLoader

        self.device, self.count = graph.x.device, len(nodes)
        # Features are not copied, not even sparse ones: a batch indexes their rows by id.
        structure = Data(edge_index=graph.edge_index.cpu(), num_nodes=graph.num_nodes)
        self.loader = NeighborLoader(
            structure,
            num_neighbors=sampling.neighbors(num_layers),
            input_nodes=nodes.cpu(),
            batch_size=sampling.batch_size,
            shuffle=True,
        )

    def __iter__(self) -> Iterator[Sample]:
        for batch in self.loader:
            yield Sample(batch.n_id.to(self.device), batch.edge_index.to(self.device), batch.batch_size)


def check_sampling(config: Config) -> None:
    """Raise ValueError if the configuration asks for sampled batches and the teacher cannot be trained in batches."""
    if config.sampling.batch_size == 0:
        return
    if config.teacher.name in ATTENTION_TEACHERS:
        raise ValueError(
            f"sampling.batch_size is {config.sampling.batch_size}, but the teacher {config.teacher.name} is trained on"
            " the whole graph at once; set it to 0, or use another teacher, such as sage"
        )
    config.sampling.neighbors(config.teacher.num_layers)
    check_sampler(config.sampling)


def check_sampler(sampling: SamplingConfig) -> None:
    """Raise ValueError if PyG has no library for sampling neighbours."""
    if not (typing.WITH_PYG_LIB or typing.WITH_TORCH_SPARSE):
        raise ValueError(
            f"sampling.batch_size is {sampling.batch_size}, but PyTorch Geometric's sampler is not installed: pip"
            " install pyg-lib, or torch-sparse, in the build for your PyTorch (see PyTorch Geometric's installation"
            " page); or set it to 0 to train the teacher on the whole graph at once"
        )
