"""Fakes of the libraries behind the peers: the functions that adapters call, in plain PyTorch with checked arguments.

A fake takes the library's arguments in its layouts, and fails if one is not as documented. It lets an adapter's own
code run without the library.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from benchmarks.peers import libraries


@contextmanager
def installed(name: str, modules: dict[str, dict]) -> Iterator[ModuleType]:
    """The adapter of a library, imported with ``modules`` instead of the library; modules are restored afterwards."""
    adapter = f"benchmarks.peers.with_{name}"
    before = {key: sys.modules.pop(key) for key in list(sys.modules) if key == adapter or key.split(".")[0] == name}
    libraries._missing.cache_clear()
    for key, content in modules.items():
        sys.modules[key] = ModuleType(key)
        sys.modules[key].__path__ = []
        vars(sys.modules[key]).update(content)
        parent, _, child = key.rpartition(".")
        if parent in modules:
            setattr(sys.modules[parent], child, sys.modules[key])
    try:
        yield import_module(adapter)
    finally:
        for key in [key for key in sys.modules if key == adapter or key.split(".")[0] == name]:
            del sys.modules[key]
        sys.modules.update(before)
        libraries._missing.cache_clear()


def liger_kernel() -> dict[str, dict]:
    """``LigerFusedMoEFunction.apply(x, gate_up_proj [E, 2 I, H], down_proj [E, H, I], index int32, weights)``."""

    class LigerFusedMoEFunction:
        @staticmethod
        def apply(x: Tensor, gate_up_proj: Tensor, down_proj: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            assert index.dtype == torch.int32
            assert all(t.is_contiguous() for t in (x, gate_up_proj, down_proj, index, weights))
            y = torch.zeros_like(x)
            for choice in range(index.shape[1]):
                mine = index[:, choice].long()
                gate, up = torch.einsum("th,tnh->tn", x, gate_up_proj[mine]).chunk(2, dim=-1)
                out = torch.einsum("ti,thi->th", torch.nn.functional.silu(gate) * up, down_proj[mine])
                y = y + weights[:, choice, None].to(x.dtype) * out
            return y

    return {
        "liger_kernel": {},
        "liger_kernel.ops": {},
        "liger_kernel.ops.fused_moe": {"LigerFusedMoEFunction": LigerFusedMoEFunction},
    }


def scattermoe() -> dict[str, dict]:
    """``parallel_linear`` with weights ``[E, D, N]``; pairs in the order of experts, or in their rows' order."""

    def parallel_linear(
        inputs: Tensor,
        expert_weights: Tensor,
        k: int,
        sorted_expert_idxs: Tensor,
        sorted_scattered_idxs: Tensor,
        expert_offsets: Tensor,
        expert_biases: Tensor | None = None,
        gates: Tensor | None = None,
        grouped_in: bool = False,
        grouped_out: bool = False,
    ) -> Tensor:
        pairs = len(sorted_expert_idxs)
        assert pairs == len(sorted_scattered_idxs) == inputs.shape[0] * k
        assert (sorted_expert_idxs.diff() >= 0).all()
        counts = torch.bincount(sorted_expert_idxs, minlength=len(expert_weights))
        assert torch.equal(expert_offsets.long(), counts.cumsum(0))
        rows = inputs if grouped_in else inputs[sorted_scattered_idxs // k]
        mine = sorted_expert_idxs.long()
        out = torch.einsum("nd,ndm->nm", rows, expert_weights[mine])
        out = out if expert_biases is None else out + expert_biases[mine]
        if not grouped_out:
            out = torch.zeros_like(out).index_copy(0, sorted_scattered_idxs, out)
        if gates is not None:
            assert gates.dtype == out.dtype
            out = (gates[:, None] @ out.view(*gates.shape, -1)).squeeze(1)
        return out

    return {
        "scattermoe": {},
        "scattermoe.kernels": {},
        "scattermoe.kernels.ops": {"ALLOW_TF32": True},
        "scattermoe.parallel_experts": {"parallel_linear": parallel_linear},
    }


def triton_kernels() -> dict[str, dict]:
    """``matmul``: rows gathered into slices of one expert each, gates in their order, results scattered."""

    def matmul(
        a: Tensor,
        b: Tensor,
        bias: Tensor,
        a_ragged_metadata: Ragged,
        *,
        gather_indx: Tensor,
        scatter_indx: Tensor,
        precision_config: PrecisionConfig,
        gammas: Tensor,
    ) -> Tensor:
        assert gather_indx.dtype == scatter_indx.dtype == torch.int32
        out = gammas[:, None] * a_ragged_metadata.products(a[gather_indx.long()], b, bias)
        return torch.zeros_like(out).index_copy(0, scatter_indx.long(), out).to(a.dtype)

    return _triton_kernels() | {"triton_kernels.matmul": {"matmul": matmul, "PrecisionConfig": PrecisionConfig}}


def triton_kernels_before() -> dict[str, dict]:
    """``matmul_ogs``: as above by :class:`RoutingData`, with each row's experts summed."""

    @dataclass
    class Indx:
        src_indx: Tensor
        dst_indx: Tensor

        def __post_init__(self) -> None:
            there_and_back = self.dst_indx[self.src_indx.long()]
            assert torch.equal(there_and_back, torch.arange(len(there_and_back), dtype=torch.int32))

    @dataclass
    class RoutingData:
        gate_scal: Tensor
        expt_hist: Tensor
        n_expts_tot: int
        n_expts_act: int
        expt_data: Ragged

    def matmul_ogs(
        x: Tensor,
        w: Tensor,
        bias: Tensor,
        routing_data: RoutingData,
        *,
        gather_indx: Indx,
        scatter_indx: Indx,
        precision_config: PrecisionConfig,
        gammas: Tensor,
    ) -> Tensor:
        assert torch.equal(routing_data.expt_hist, routing_data.expt_data.sizes)
        assert routing_data.n_expts_tot == len(w)
        rows = x[gather_indx.src_indx.long() // routing_data.n_expts_act]
        out = gammas[:, None] * routing_data.expt_data.products(rows, w, bias)
        by_pair = torch.zeros_like(out).index_copy(0, scatter_indx.dst_indx.long(), out)
        return by_pair.view(len(x), routing_data.n_expts_act, -1).sum(1).to(x.dtype)

    content = {"matmul_ogs": matmul_ogs, "RoutingData": RoutingData, "GatherIndx": Indx, "ScatterIndx": Indx}
    return _triton_kernels() | {"triton_kernels.matmul_ogs": {**content, "PrecisionConfig": PrecisionConfig}}


def triton_kernels_of_vllm() -> dict[str, dict]:
    """The copy in vLLM's wheel: ``matmul_ogs`` with the metadata of ``compute_expt_data``."""

    def compute_expt_data(expt_hist: Tensor, n_expts_tot: int, n_gates: int) -> Ragged:
        assert expt_hist.shape == (n_expts_tot,)
        return Ragged(expt_hist, n_gates)

    replaced = {"triton_kernels.tensor": {}, "triton_kernels.routing": {"compute_expt_data": compute_expt_data}}
    return triton_kernels_before() | replaced


@dataclass
class PrecisionConfig:
    """The part that adapters set."""

    allow_tf32: bool = True


@dataclass
class Ragged:
    """Sizes int32 ``[E]`` of slices of ``n`` rows."""

    sizes: Tensor
    n: int

    def __post_init__(self) -> None:
        assert self.sizes.dtype == torch.int32
        assert int(self.sizes.sum()) == self.n

    def products(self, rows: Tensor, b: Tensor, bias: Tensor) -> Tensor:
        """Each slice's rows with its weights ``[D, N]``, in float32 at least."""
        mine = torch.arange(len(b)).repeat_interleave(self.sizes.long())
        wide = torch.promote_types(rows.dtype, torch.float32)
        return torch.einsum("nd,ndm->nm", rows.to(wide), b[mine].to(wide)) + bias[mine].to(wide)


def _triton_kernels() -> dict[str, dict]:
    return {"triton_kernels": {}, "triton_kernels.tensor": {"make_ragged_tensor_metadata": Ragged}}


def megablocks() -> dict[str, dict]:
    """Sort, histogram, gather, grouped GEMM in bfloat16 with counts on the host, and a scatter that gates and sums."""

    def sort(x: Tensor, end_bit: int) -> tuple[Tensor, Tensor]:
        assert int(x.max()) < 2**end_bit
        ordered, places = x.sort(stable=True)
        return ordered, places.to(x.dtype)

    def gather(x: Tensor, indices: Tensor, bin_ids: Tensor, bins: Tensor, top_k: int) -> Tensor:
        assert bins.ndim == 1
        assert int(bins[-1]) == len(bin_ids) == len(x) * top_k
        return x[indices.long() // top_k]

    def scatter(x: Tensor, indices: Tensor, bin_ids: Tensor, weights: Tensor, bins: Tensor, top_k: int) -> Tensor:
        assert weights.ndim == 1
        out = torch.zeros_like(x).index_copy(0, indices.long(), x)
        return (out * weights[:, None]).view(-1, top_k, x.shape[1]).sum(1)

    def gmm(a: Tensor, b: Tensor, batch_sizes: Tensor, trans_a: bool = False, trans_b: bool = False) -> Tensor:
        assert a.dtype == b.dtype == torch.bfloat16
        assert batch_sizes.dtype == torch.int64
        assert trans_b
        assert not trans_a
        return torch.cat([part @ w.T for part, w in zip(a.split(batch_sizes.tolist()), b, strict=True)])

    ops = {
        "sort": sort,
        "histogram": lambda x, max_val: torch.bincount(x, minlength=max_val).int(),
        "inclusive_cumsum": lambda x, dim: x.cumsum(dim, dtype=x.dtype).squeeze(),
        "gather": gather,
        "scatter": scatter,
    }
    grouped = ModuleType("grouped_gemm.ops")
    grouped.gmm = gmm
    util = {"assert_grouped_gemm_is_available": lambda: None, "ops": grouped}
    return {"megablocks": {}, "megablocks.ops": ops, "megablocks.grouped_gemm_util": util}


def tutel() -> dict[str, dict]:
    """Routing by the k largest scores; dense blocks ``[E, capacity, D]``; back with gates."""

    def extract_critical(
        scores: Tensor,
        top_k: int,
        loss_fn: Callable | None,
        capacity_factor: float = 1.0,
        normalize_gate: bool = True,
        alignment: int = 1,
    ) -> tuple[tuple, Tensor | None]:
        assert loss_fn is None
        assert capacity_factor == 0
        assert not normalize_gate
        gates, chosen = scores.topk(top_k, dim=1)
        place = torch.zeros_like(chosen)
        taken = torch.zeros(scores.shape[1], dtype=torch.long)
        for choice in range(top_k):  # first choices before second ones, as Tutel has them
            hot = torch.nn.functional.one_hot(chosen[:, choice], scores.shape[1])
            place[:, choice] = ((hot.cumsum(0) - 1 + taken) * hot).sum(1)
            taken = taken + hot.sum(0)
        capacity = -(-int(taken.max()) // alignment) * alignment
        return (scores.shape[1], chosen.T, place.T, gates.T, capacity, taken), None

    def fast_encode(data: Tensor, routing: tuple) -> Tensor:
        assert data.is_contiguous()
        experts, chosen, place, _, capacity, _ = routing
        blocks = data.new_zeros(experts * capacity, data.shape[1])
        for mine, spot in zip(chosen, place, strict=True):
            blocks = blocks.index_add(0, mine * capacity + spot, data)
        return blocks.view(experts, capacity, -1)

    def fast_decode(data: Tensor, routing: tuple) -> Tensor:
        assert data.is_contiguous()
        _, chosen, place, gates, capacity, _ = routing
        flat = data.flatten(0, 1)
        parts = (
            gate[:, None].to(data.dtype) * flat[e * capacity + s]
            for e, s, gate in zip(chosen, place, gates, strict=True)
        )
        return sum(parts)

    content = {"extract_critical": extract_critical, "fast_encode": fast_encode, "fast_decode": fast_decode}
    return {"tutel": {}, "tutel.moe": content}


class ActivationType(Enum):
    """The members that adapters use."""

    SWIGLU = "swiglu"


def sonicmoe() -> dict[str, dict]:
    """``moe_general_routing_inputs`` in ``concat_layout``: ``w1 [2 I, H, E]``, ``w2 [H, I, E]``, experts outermost."""

    def moe_general_routing_inputs(
        x: Tensor,
        router_scores: Tensor,
        token_indices: Tensor,
        expert_indices: Tensor,
        w1: Tensor,
        b1: Tensor | None,
        w2: Tensor,
        b2: Tensor | None,
        E: int,
        stream_id: int,
        activation_type: ActivationType,
        is_inference_mode_enabled: bool = False,
        concat_layout: bool = False,
    ) -> tuple[Tensor, Tensor]:
        assert b1 is b2 is None
        assert concat_layout
        assert activation_type is ActivationType.SWIGLU
        assert token_indices.dtype == expert_indices.dtype == torch.int32
        assert len(token_indices) == len(expert_indices) == len(router_scores)
        assert (token_indices.diff() >= 0).all()
        assert w1.shape[-1] == w2.shape[-1] == E
        assert w1.permute(2, 0, 1).is_contiguous()
        assert w2.permute(2, 0, 1).is_contiguous()
        assert is_inference_mode_enabled != torch.is_grad_enabled()
        tokens, mine = token_indices.long(), expert_indices.long()
        gate, up = torch.einsum("nh,ihn->ni", x[tokens], w1[:, :, mine]).chunk(2, dim=-1)
        out = torch.einsum("ni,hin->nh", torch.nn.functional.silu(gate) * up, w2[:, :, mine])
        y = torch.zeros_like(x).index_add(0, tokens, out * router_scores[:, None].to(x.dtype))
        return y, torch.bincount(mine, minlength=E)

    return {
        "sonicmoe": {"moe_general_routing_inputs": moe_general_routing_inputs},
        "sonicmoe.enums": {"ActivationType": ActivationType},
    }
