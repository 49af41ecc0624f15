"""Mixture of experts: which experts a token takes, and what they make of it.

Shape letters: T token rows, E experts, k experts of a token, P = T * k pairs of a row and one of
its experts, K input features, F features inside an expert.

A row's bits depend on neither the other rows nor the experts those take: products add along K in
order, and a row adds up what its experts give in the order in which it chose them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels.activation import silu_mul_reference

# Where all weights of a token's experts are zero, they stay so.
_TINY = 1e-20


def route_experts_reference(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    sigmoid: bool,
    normalize: bool,
    scale: float,
    num_groups: int,
    top_groups: int,
) -> tuple[Tensor, Tensor]:
    """Plain PyTorch twin of ``route_experts``."""
    wide = logits.float()
    scores = wide.sigmoid() if sigmoid else torch.softmax(wide, dim=-1)
    choice = scores if bias is None else scores + bias.float()
    if top_groups < num_groups:
        groups = choice.unflatten(-1, (num_groups, -1))
        best = groups.topk(1 if bias is None else 2, dim=-1).values.sum(dim=-1)  # [T, groups]
        order = best.sort(dim=-1, descending=True, stable=True).indices
        left_out = torch.zeros_like(best).scatter_(1, order[:, top_groups:], 1.0) > 0
        choice = groups.masked_fill(left_out[..., None], -torch.inf).flatten(1)
    experts = choice.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, experts)
    if normalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + _TINY)
    return experts.int(), weights * scale


def route_experts(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    sigmoid: bool,
    normalize: bool,
    scale: float,
    num_groups: int,
    top_groups: int,
) -> tuple[Tensor, Tensor]:
    """The experts of each row, the best first, and their weights: [T, k] int32, [T, k] float32.

    logits [T, E] become scores in float32, by softmax over the row or by ``sigmoid``. The ``top_k``
    best scores win, of equal ones the lowest ids; NaN counts as the best, so that ids always lie in
    range. ``bias`` [E] is added for the choice alone. With ``top_groups < num_groups`` only
    experts of the best groups (of E / num_groups neighbours) can win: a group counts as its best
    score, or with a bias as the sum of its best two. Weights are the scores, divided by their sum
    if ``normalize``, times ``scale``.
    """
    if logits.is_cuda:
        from specdec.kernels import moe_triton

        run = moe_triton.route_experts
    else:
        run = route_experts_reference
    return run(logits, bias, top_k, sigmoid, normalize, scale, num_groups, top_groups)


def combine_experts_reference(pairs: Tensor, weights: Tensor) -> Tensor:
    """Plain PyTorch twin of ``combine_experts``."""
    weighted = pairs.view(*weights.shape, -1) * weights[..., None]  # rounded to the wider dtype
    total = weighted[:, 0].float()
    for number in range(1, weights.shape[1]):
        total = total + weighted[:, number].float()
    return total.to(pairs.dtype)


def apply_experts_reference(
    x: Tensor, gate_up: Tensor, down: Tensor, experts: Tensor, weights: Tensor
) -> Tensor:
    """Plain PyTorch twin of ``apply_experts``, expert by expert. Reads their loads on the host."""
    top_k = experts.shape[1]
    ids, order = experts.flatten().sort(stable=True)
    loads = torch.bincount(ids, minlength=gate_up.shape[0]).tolist()
    pairs = x.new_empty(order.shape[0], down.shape[1])
    first = 0
    for expert, load in enumerate(loads):
        if load:
            mine = order[first : first + load]
            hidden = silu_mul_reference(F.linear(x[mine // top_k], gate_up[expert]))
            pairs[mine] = F.linear(hidden, down[expert])
            first += load
    return combine_experts_reference(pairs, weights)


def apply_experts(
    x: Tensor, gate_up: Tensor, down: Tensor, experts: Tensor, weights: Tensor
) -> Tensor:
    """Each row through its experts, and the weighted sum of what they give.

    Args:
        x: [T, K].
        gate_up: [E, 2F, K], in each expert the gate's rows first.
        down: [E, K, F].
        experts: [T, k] int32, different ones in a row.
        weights: [T, k] in x's dtype or float32.

    An expert is ``linear_silu_mul``, then ``linear``, each rounded to x's dtype. Its result times
    the row's weight is rounded to the wider dtype of the two; the sum, in float32 and in the
    order of ``experts``, is rounded once. Returns [T, K].
    """
    if x.is_cuda:
        from specdec.kernels import moe_triton

        return moe_triton.apply_experts(x, gate_up, down, experts, weights)
    return torch.ops.specdec.apply_experts_cpu(x, gate_up, down, experts, weights)


# One opaque operator, so that a recorded graph holds one call whose body reads the experts of the
# step at hand.
_library = torch.library.Library("specdec", "FRAGMENT")
_library.define(
    "apply_experts_cpu(Tensor x, Tensor gate_up, Tensor down, Tensor experts, Tensor weights) "
    "-> Tensor"
)
_library.impl("apply_experts_cpu", apply_experts_reference, "CPU")
_library.impl("apply_experts_cpu", lambda x, *_: torch.empty_like(x), "Meta")
