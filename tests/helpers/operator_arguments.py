"""Legal arguments of every operator, for the tests that go over all of them."""

import torch

from rbm_kernels import NetworkLayer, pack_network

B, D, N, E, K = 5, 4, 3, 4, 2


def arguments(b=B, d=D, n=N, e=E, k=K):
    """Legal arguments of each operator, by name. Sizes that no memory holds are made of one element."""

    def of(draw, *shape):
        large = max(shape) > 2**30
        return draw(*(1 for _ in shape)).expand(shape) if large else draw(*shape)

    x, memory, weight, bias = (
        of(torch.randn, b, d),
        of(torch.randn, e, d),
        of(torch.randn, e, n, d),
        of(torch.randn, e, n),
    )
    gates, grad, scale = of(torch.rand, b, k), of(torch.randn, b, n), of(torch.rand, e, d)
    experts = of(lambda *shape: torch.zeros(*shape, dtype=torch.int32), b, k)
    values = of(torch.randn, min(b, 5))
    crow = torch.arange(b + 1).int() if b < 2**30 else torch.zeros(1, dtype=torch.int32).expand(b + 1)
    # Packed for no processor where it could not be: sizes are looked at first.
    fits = max(b, d, n, e) < 2**30
    packed = torch.ops.rbm.pack_experts(weight, None) if fits else of(torch.randn, e, d + 1, n)
    second = torch.ops.rbm.pack_experts(weight.mT, None) if fits else of(torch.randn, e, n + 1, d)
    int8 = torch.zeros((), dtype=torch.int8).expand(e, -(-n // 16), 3 - (-d // 4), 64)
    layer = NetworkLayer(torch.randn(1, n, d), None, n, d) if fits else NetworkLayer(torch.randn(1, 1, 1), None, 1, 1)
    rows = {"crow": crow, "col": torch.zeros_like(values, dtype=torch.int32), "values": values}
    pairs = {"gates": gates, "experts": experts}
    folded = {"weight": weight, "bias": bias, "attention": scale, "log_scale": torch.randn(1)}
    return {
        "cosine_topk": {"h": x, "memory": memory, "k": k},
        "cosine_topk_backward": {"grad_gates": gates, "grad_cosines": gates, "h": x, "memory": memory}
        | {"gates": gates, "experts": experts, "cosines": gates},
        "expert_order": {"experts": experts, "num_experts": e, "block_m": 8},
        "expert_matmul": {"x": x, "weight": weight, "bias": bias, **pairs},
        "expert_matmul_backward_input": {"grad": grad, "x": x, "weight": weight, "bias": bias, **pairs},
        "expert_matmul_backward_weight": {"grad": grad, "x": x, **pairs, "num_experts": e},
        "routed_matmul": {"x": x, "memory": memory, "weight": weight, "bias": bias, "k": k},
        "pack_experts": {"weight": weight, "bias": bias},
        "routed_matmul_packed": {"x": x, "memory": memory, "packed": packed, "out_features": n, "k": k},
        "packed_feed_forward": {"x": x, "memory": memory, "packed_in": packed, "packed_out": second}
        | {"hidden_features": n, "out_features": d, "k": k, "activation": "relu"},
        "routed_matmul_int8": {"x": x, "memory": memory, "experts": int8, "out_features": n, "k": k},
        "packed_network": {"x": x, "network": pack_network([layer]), "out_features": n},
        "sparse_expert_matmul": rows | {"weight": weight, "bias": bias, "scale": scale, **pairs},
        "sparse_expert_matmul_backward_gates": {"grad": grad}
        | rows
        | {"weight": weight, "bias": bias, "scale": scale, **pairs},
        "sparse_expert_matmul_backward_weight": {"grad": grad} | rows | {"weight": weight, "scale": scale, **pairs},
        "fold_experts": folded,
        "fold_experts_backward": {"grad_weight": weight, "grad_bias": bias} | folded,
        "memory_statistics": {"h": x, **pairs, "num_experts": e},
        "memory_update_": {"memory": memory, "weighted_sum": of(torch.rand, e, d), "total": of(torch.rand, e)}
        | {"decay": 0.5},
    }
