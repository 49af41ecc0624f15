"""Triton side of ``specdec.kernels.moe``.

Shape letters: T token rows, E experts, k experts of a token, P = T * k pairs of a row and one of
its experts, K input features, F features inside an expert.

Pairs are sorted by expert on the device, and a tile of the products holds rows of one expert. How
many tiles an expert has is data: the grid has room for any distribution, and programs without a
tile end at once. Each tile adds along K in order, so that no bit depends on who shares it.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.activation_triton import silu_product
from specdec.kernels.attention_tree import scalar_at
from specdec.kernels.launch import pdl_options, wait_for_inputs
from specdec.kernels.linear_triton import accumulate, unit_stride
from specdec.kernels.tuning import TileConfig, skinny_config

_BLOCK = 1024
# Rows of a tile, for few token rows and for many: just two, so that start-up can run both.
_FEW_ROWS, _SMALL_TILE, _LARGE_TILE = 64, 16, 64


@triton.jit
def _best(choice, experts, E: tl.constexpr):
    """Of the largest values the lowest index."""
    top = tl.max(choice, axis=0)
    return tl.min(tl.where(choice == top, experts, E), axis=0)


@triton.jit
def _route_kernel(
    logits,  # [T, E], rows row_stride apart
    bias,  # [E], or anything without HAS_BIAS
    experts_out,  # [T, TOP_K] int32
    weights_out,  # [T, TOP_K] float32
    row_stride,
    scale,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NORMALIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row. How it is laid out depends on E alone, and so does the order of the sums."""
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    ids = tl.arange(0, BLOCK)
    present = ids < E
    values = tl.load(logits + row * row_stride + ids, mask=present, other=float("-inf"))
    values = values.to(tl.float32)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-values))
    else:
        powers = tl.exp(values - tl.max(values, axis=0))
        scores = powers / tl.sum(powers, axis=0)
    choice = scores
    if HAS_BIAS:
        choice += tl.load(bias + ids, mask=present, other=0.0).to(tl.float32)
    choice = tl.where(choice != choice, float("inf"), choice)
    choice = tl.where(present, choice, float("-inf"))
    if TOP_GROUPS < NUM_GROUPS:
        groups = ids // (E // NUM_GROUPS)
        numbers = tl.arange(0, BLOCK_G)
        best = tl.full([BLOCK_G], float("-inf"), tl.float32)
        for group in tl.static_range(NUM_GROUPS):
            own = tl.where(groups == group, choice, float("-inf"))
            first = _best(own, ids, BLOCK - 1)
            score = tl.max(own, axis=0)
            if HAS_BIAS:
                score += tl.max(tl.where(ids == first, float("-inf"), own), axis=0)
            best = tl.where(numbers == group, score, best)
        allowed = ids < 0
        for _ in tl.static_range(TOP_GROUPS):
            chosen = _best(best, numbers, BLOCK_G - 1)
            allowed = allowed | (groups == chosen)
            best = tl.where(numbers == chosen, float("-inf"), best)
        choice = tl.where(allowed & present, choice, float("-inf"))

    ranks = tl.arange(0, BLOCK_K)
    experts = tl.zeros([BLOCK_K], tl.int32)
    weights = tl.zeros([BLOCK_K], tl.float32)
    for rank in tl.static_range(TOP_K):
        chosen = _best(choice, ids, E - 1)
        weight = tl.sum(tl.where(ids == chosen, scores, 0.0), axis=0)
        experts = tl.where(ranks == rank, chosen, experts)
        weights = tl.where(ranks == rank, weight, weights)
        choice = tl.where(ids == chosen, float("-inf"), choice)
    if NORMALIZE:
        weights = weights / (tl.sum(weights, axis=0) + 1e-20)
    kept = ranks < TOP_K
    tl.store(experts_out + row * TOP_K + ranks, experts, mask=kept)
    tl.store(weights_out + row * TOP_K + ranks, weights * scale, mask=kept)


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
    """``specdec.kernels.moe.route_experts``."""
    logits = unit_stride(logits)
    num_rows, num_experts = logits.shape
    experts = torch.empty(num_rows, top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(num_rows, top_k, dtype=torch.float32, device=logits.device)
    if num_rows == 0:
        return experts, weights
    _route_kernel[(num_rows,)](
        logits,
        bias if bias is not None else logits,
        experts,
        weights,
        logits.stride(0),
        scale,
        E=num_experts,
        TOP_K=top_k,
        SIGMOID=sigmoid,
        HAS_BIAS=bias is not None,
        NORMALIZE=normalize,
        NUM_GROUPS=num_groups,
        TOP_GROUPS=top_groups,
        BLOCK=triton.next_power_of_2(num_experts),
        BLOCK_G=triton.next_power_of_2(num_groups),
        BLOCK_K=triton.next_power_of_2(top_k),
        num_warps=1,
        enable_fp_fusion=False,
        **pdl_options(logits),
    )
    return experts, weights


@triton.jit
def _expert_tile(
    ends, tile, NUM_EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr
):
    """The expert of a tile (NUM_EXPERTS or more for none), its rows among the sorted pairs, and
    which of them are the expert's own."""
    experts = tl.arange(0, BLOCK_E)
    present = experts < NUM_EXPERTS
    end = tl.load(ends + experts, mask=present, other=0)
    start = tl.load(ends + experts - 1, mask=present & (experts > 0), other=0)
    tiles = (end - start + BLOCK_M - 1) // BLOCK_M
    tile_ends = tl.cumsum(tiles, 0)
    expert = tl.sum((tile_ends <= tile).to(tl.int32))
    before = tile - scalar_at(tile_ends - tiles, expert, BLOCK_E)
    rows = scalar_at(start, expert, BLOCK_E) + before * BLOCK_M + tl.arange(0, BLOCK_M)
    return expert, rows, rows < scalar_at(end, expert, BLOCK_E)


@triton.jit(do_not_specialize=["max_tiles"])
def _gate_up_kernel(
    x,  # [T, K], rows x_stride apart
    weight,  # [E, 2F, K], gate rows first
    order,  # [P] int64: pairs, sorted by expert
    ends,  # [E] int32: where each expert's pairs end in it
    out,  # [P, F], in sorted order
    max_tiles,
    F,
    K,
    x_stride,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    SWAP: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    # Row tiles of one column tile are neighbours, so that those of one expert share its weights.
    expert, rows, row_mask = _expert_tile(
        ends, tl.program_id(0) % max_tiles, NUM_EXPERTS, BLOCK_E, BLOCK_M
    )
    if expert >= NUM_EXPERTS:
        return
    pairs = tl.load(order + rows, mask=row_mask, other=0)
    first = tl.program_id(0) // max_tiles * (BLOCK_N // 2)
    # Gate and up columns take turns, so that the two of a feature lie side by side in the sums.
    turns = tl.arange(0, BLOCK_N)
    features = first + turns // 2
    acc = accumulate(
        x,
        weight + expert.to(tl.int64) * (2 * F) * K,
        pairs // TOP_K,
        features + turns % 2 * F,
        row_mask,
        features < F,
        K,
        x_stride,
        BLOCK_K,
        EVEN_K,
        STAGES,
        SWAP,
        PRECISION,
    )
    dtype: tl.constexpr = out.dtype.element_ty
    gate, up = tl.split(acc.to(dtype).reshape(BLOCK_M, BLOCK_N // 2, 2))
    columns = first + tl.arange(0, BLOCK_N // 2)
    offsets = rows[:, None].to(tl.int64) * F + columns[None, :]
    product = silu_product(gate, up, dtype)
    tl.store(out + offsets, product, mask=row_mask[:, None] & (columns < F)[None, :])


@triton.jit(do_not_specialize=["max_tiles"])
def _down_kernel(
    x,  # [P, F], in sorted order
    weight,  # [E, N, F]
    order,  # [P] int64: pairs, sorted by expert
    ends,  # [E] int32: where each expert's pairs end in it
    out,  # [P, N], in the order of the pairs
    max_tiles,
    N,
    F,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    SWAP: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    expert, rows, row_mask = _expert_tile(
        ends, tl.program_id(0) % max_tiles, NUM_EXPERTS, BLOCK_E, BLOCK_M
    )
    if expert >= NUM_EXPERTS:
        return
    columns = tl.program_id(0) // max_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = accumulate(
        x,
        weight + expert.to(tl.int64) * N * F,
        rows,
        columns,
        row_mask,
        columns < N,
        F,
        F,
        BLOCK_K,
        EVEN_K,
        STAGES,
        SWAP,
        PRECISION,
    )
    pairs = tl.load(order + rows, mask=row_mask, other=0)
    offsets = pairs[:, None] * N + columns[None, :]
    mask = row_mask[:, None] & (columns < N)[None, :]
    tl.store(out + offsets, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _combine_kernel(
    pairs,  # [T * TOP_K, N]
    weights,  # [T, TOP_K]
    out,  # [T, N]
    N,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < N
    wider: tl.constexpr = weights.dtype.element_ty
    total = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(TOP_K):
        pair = row * TOP_K + rank
        values = tl.load(pairs + pair * N + columns, mask=mask, other=0.0).to(tl.float32)
        weighted = (values * tl.load(weights + pair).to(tl.float32)).to(wider)
        total += weighted.to(tl.float32)
    tl.store(out + row * N + columns, total.to(out.dtype.element_ty), mask=mask)


def _tile_arguments(
    x: Tensor, num_features: int, depth: int, block_m: int, config: TileConfig | None
) -> dict[str, Any]:
    config = config or skinny_config(num_features, depth, block_m, x)
    return {
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "EVEN_K": depth % config.block_k == 0,
        "STAGES": config.stages,
        "SWAP": config.swap,
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
        "num_warps": config.num_warps,
    }


def apply_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    experts: Tensor,
    weights: Tensor,
    *,
    config: TileConfig | None = None,
) -> Tensor:
    """``specdec.kernels.moe.apply_experts``. All weights are contiguous."""
    x = unit_stride(x)
    num_rows, depth = x.shape
    num_experts, width = gate_up.shape[0], gate_up.shape[1] // 2
    top_k = experts.shape[1]
    num_pairs = num_rows * top_k
    out = torch.empty(num_rows, depth, dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    ids, order = torch.sort(experts.flatten(), stable=True)
    every = torch.arange(num_experts, dtype=ids.dtype, device=x.device)
    ends = torch.searchsorted(ids, every, right=True, out_int32=True)

    is_small = num_rows <= _FEW_ROWS or x.dtype == torch.float32
    block_m = _SMALL_TILE if is_small else _LARGE_TILE
    # An expert's last tile may be all but empty.
    max_tiles = min(num_pairs, num_pairs // block_m + num_experts)
    common = {
        "NUM_EXPERTS": num_experts,
        "BLOCK_E": triton.next_power_of_2(num_experts),
        "BLOCK_M": block_m,
        "enable_fp_fusion": False,
        **pdl_options(x),
    }
    tiles = _tile_arguments(x, 2 * width, depth, block_m, config)
    hidden = torch.empty(num_pairs, width, dtype=x.dtype, device=x.device)
    _gate_up_kernel[(max_tiles * triton.cdiv(width, tiles["BLOCK_N"] // 2),)](
        x,
        gate_up,
        order,
        ends,
        hidden,
        max_tiles,
        width,
        depth,
        x.stride(0),
        TOP_K=top_k,
        **common,
        **tiles,
    )
    tiles = _tile_arguments(x, depth, width, block_m, config)
    pairs = torch.empty(num_pairs, depth, dtype=x.dtype, device=x.device)
    _down_kernel[(max_tiles * triton.cdiv(depth, tiles["BLOCK_N"]),)](
        hidden, down, order, ends, pairs, max_tiles, depth, width, **common, **tiles
    )
    _combine_kernel[(num_rows, triton.cdiv(depth, _BLOCK))](
        pairs,
        weights,
        out,
        depth,
        TOP_K=top_k,
        BLOCK=_BLOCK,
        enable_fp_fusion=False,
        **pdl_options(x),
    )
    return out
