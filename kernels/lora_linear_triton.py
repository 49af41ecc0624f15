"""Triton side of ``lora_linear`` and ``lora_linear_silu_mul``: a layer's product and its deltas.

Few rows leave most of the GPU's arithmetic idle while the weights stream in. So rows are shrunk by
a small launch beside which the product's starts at once: its programs are tiles of the sums of
``linear_triton``, added in the same order, and each waits for the shrunk rows only when its sums
are done, expands them, and adds its rows' deltas to its rounded product. Many rows go through
``lora_triton``, after the product. Chunks, and the order in which they are added, are the same, so
that a row's bits do not tell which way it went.

Shape letters as in ``lora_triton``, and G slots of the batch, J slots in one product.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from specdec.kernels.activation_triton import silu_product
from specdec.kernels.launch import pdl_options, wait_for_inputs
from specdec.kernels.linear_triton import accumulate, linear, tile_arguments, unit_stride
from specdec.kernels.lora_lanes import expand_lanes
from specdec.kernels.lora_rows import FEW_ROWS, SlotTiles
from specdec.kernels.lora_rows_triton import slot_tiles
from specdec.kernels.lora_tiles import shrink_rows, shrunk_rows
from specdec.kernels.lora_triton import Shrink, chunk_size, expand_, expand_silu_mul

# Lanes of the product with the expanding weights, slots at once times rank. Without tensor cores
# lanes of zeros take their time: one slot after the other.
_MAX_LANES, _MAX_LANES_FLOAT32 = 128, 16
_OPTIONS = {
    "do_not_specialize": ["num_rows", "num_groups", "TILES_0", "TILES_1"],
    "do_not_specialize_on_alignment": ["slot_of_token", "tile_slot"],
}


@triton.jit(**_OPTIONS)
def _shrink_kernel(
    x,  # [T, K], rows x_stride apart
    a_stack,  # [S, P * r, K], slots a_stride apart
    slot_of_token,  # [T]
    tile_slot,  # [G] int32: the slots of the batch, each once; negative where there is none
    partial,  # [C, T, P * r] float32
    num_rows,
    K,
    x_stride,
    a_stride,
    WIDTH: tl.constexpr,  # P * r
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """A tile of rows, those of one slot, for one chunk and BLOCK_W of all parts' ranks."""
    wait_for_inputs(PDL)
    # What earlier kernels wrote is there, for the next launch too: it reads the layer's input and
    # the rows' slots right away. It starts when all programs have come here: none lacks room.
    if PDL:
        gdc_launch_dependents()
    slot = tl.load(tile_slot + tl.program_id(0))
    if slot >= 0:
        blocks: tl.constexpr = (WIDTH + BLOCK_W - 1) // BLOCK_W
        rows = tl.program_id(1) // blocks * BLOCK_M + tl.arange(0, BLOCK_M)
        slots = tl.load(slot_of_token + rows, mask=rows < num_rows, other=-1).to(tl.int32)
        outputs = tl.program_id(1) % blocks * BLOCK_W + tl.arange(0, BLOCK_W)
        shrink_rows(
            rows,
            slots == slot,
            slot,
            outputs,
            outputs < WIDTH,
            tl.program_id(2),
            x,
            a_stack,
            partial,
            num_rows,
            K,
            x_stride,
            a_stride,
            WIDTH,
            CHUNK,
            BLOCK_K,
            EVEN_K,
            STAGES,
            PRECISION,
        )


@triton.jit(**_OPTIONS)
def _lora_linear_kernel(
    x,  # [T, K], rows x_stride apart
    weight,  # [N, K]; with SILU gate rows first
    bias,  # [N], or anything without HAS_BIAS
    out,  # [T, N]; with SILU [T, N / 2]
    b_stack,  # [S, N, r], slots b_stride apart
    slot_of_token,  # [T]
    tile_slot,  # [G] int32, as above: ascending, -1 first where there is one, -2 at the end
    partial,  # [C, T, P * r] float32
    num_groups,
    num_rows,
    N,
    K,
    x_stride,
    b_stride,
    WIDTH_0,  # output features of the first two parts; the third has the rest
    WIDTH_1,
    TILES_0,  # column tiles of the first two parts
    TILES_1,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    RANK: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    J: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    SWAP: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    row_tiles = (num_rows + BLOCK_M - 1) // BLOCK_M
    rows = tl.program_id(0) % row_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    tile = tl.program_id(0) // row_tiles
    row_mask = rows < num_rows
    slots = tl.load(slot_of_token + rows, mask=row_mask, other=-1).to(tl.int32)
    first_group = (tl.load(tile_slot) < 0).to(tl.int32)
    turns = tl.arange(0, BLOCK_N)
    if SILU:
        # Gate and up columns take turns, so that a pair lies side by side in the sums.
        first = tile * (BLOCK_N // 2)
        pairs = first + turns // 2
        weight_rows = pairs + turns % 2 * (N // 2)
        weight_mask = pairs < N // 2
        columns = first + tl.arange(0, BLOCK_N // 2)
        column_mask = columns < N // 2
        part = 0
    else:
        # A tile lies within one part, so that it needs one part's shrunk rows.
        in_1 = tile >= TILES_0
        in_2 = tile >= TILES_0 + TILES_1
        part = in_1.to(tl.int32) + in_2.to(tl.int32)
        first = tl.where(in_2, WIDTH_0 + WIDTH_1, tl.where(in_1, WIDTH_0, 0))
        end = tl.where(in_2, N, tl.where(in_1, WIDTH_0 + WIDTH_1, WIDTH_0))
        tile -= tl.where(in_2, TILES_0 + TILES_1, tl.where(in_1, TILES_0, 0))
        columns = first + tile * BLOCK_N + turns
        column_mask = columns < end
        weight_rows = columns
        weight_mask = column_mask
    acc = accumulate(
        x,
        weight,
        rows,
        weight_rows,
        row_mask,
        weight_mask,
        K,
        x_stride,
        BLOCK_K,
        EVEN_K,
        STAGES,
        SWAP,
        PRECISION,
    )
    # For the shrunk rows; all else that is read here was written before they were begun.
    wait_for_inputs(PDL)
    dtype: tl.constexpr = out.dtype.element_ty
    operand: tl.constexpr = b_stack.dtype.element_ty
    own = slots >= 0
    shrunk = shrunk_rows(
        partial, rows, own, part, num_rows, operand, RANK, NUM_PARTS, NUM_CHUNKS, BLOCK_R
    )
    delta = expand_lanes(
        shrunk,
        slots,
        b_stack,
        tile_slot,
        first_group,
        num_groups,
        columns,
        column_mask,
        b_stride,
        dtype,
        RANK,
        BLOCK_R,
        J,
        PRECISION,
    )
    if SILU:
        gate, up = tl.split(acc.to(dtype).reshape(BLOCK_M, BLOCK_N // 2, 2))
        # Rows without an adapter keep their bits, a negative zero's sign too.
        gate = tl.where(own[:, None], (gate.to(tl.float32) + delta).to(dtype), gate)
        shrunk = shrunk_rows(
            partial, rows, own, 1, num_rows, operand, RANK, NUM_PARTS, NUM_CHUNKS, BLOCK_R
        )
        delta = expand_lanes(
            shrunk,
            slots,
            b_stack + (N // 2).to(tl.int64) * RANK,
            tile_slot,
            first_group,
            num_groups,
            columns,
            column_mask,
            b_stride,
            dtype,
            RANK,
            BLOCK_R,
            J,
            PRECISION,
        )
        up = tl.where(own[:, None], (up.to(tl.float32) + delta).to(dtype), up)
        product = silu_product(gate, up, dtype)
        width = N // 2
    else:
        product = acc.to(dtype)
        if HAS_BIAS:
            added = tl.load(bias + columns, mask=column_mask, other=0.0)
            product = (product.to(tl.float32) + added.to(tl.float32)[None, :]).to(dtype)
        product = tl.where(own[:, None], (product.to(tl.float32) + delta).to(dtype), product)
        width = N
    offsets = rows[:, None].to(tl.int64) * width + columns[None, :]
    tl.store(out + offsets, product, mask=row_mask[:, None] & column_mask[None, :])


def _slots_at_once(dtype: torch.dtype, block_r: int, num_slots: int, num_groups: int) -> int:
    """J. A batch of one request, whose slots are one and -1, needs no lanes for others.

    It depends on the batch through this alone, so that two kernels are all there is.
    """
    if num_groups <= 2:
        return 1
    lanes = _MAX_LANES_FLOAT32 if dtype == torch.float32 else _MAX_LANES
    return max(1, min(lanes // block_r, triton.next_power_of_2(num_slots)))


def _few_rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    a_stack: Tensor,
    b_stack: Tensor,
    slot_of_token: Tensor,
    widths: Sequence[int],
    tiles: Tensor | None,
    silu: bool = False,
) -> Tensor:
    """``lora_linear``, or with ``silu`` ``lora_linear_silu_mul``, of 1 to FEW_ROWS rows."""
    assert a_stack.stride(2) == 1 and a_stack.stride(1) == x.shape[1]
    assert b_stack.stride(2) == 1 and b_stack.stride(1) == b_stack.shape[2]
    assert len(widths) <= 3 and sum(widths) == weight.shape[0]
    x = unit_stride(x)
    (num_rows, depth), num_features = x.shape, weight.shape[0]
    if tiles is None:
        tiles = slot_tiles(slot_of_token, a_stack.shape[0] + 1, x.dtype)
    tile_slot = SlotTiles.of(tiles, num_rows, x.dtype).slot
    num_groups = tile_slot.shape[0]
    config = tile_arguments(x, num_features, depth, None)
    block_m, block_n = config["BLOCK_M"], config["BLOCK_N"]
    row_tiles = triton.cdiv(num_rows, block_m)
    width, num_parts = a_stack.shape[1], len(widths)
    rank, chunk = width // num_parts, chunk_size(depth)
    block_r = max(16, triton.next_power_of_2(rank))
    num_chunks = triton.cdiv(depth, chunk)
    partial = torch.empty(num_chunks, num_rows, width, dtype=torch.float32, device=x.device)
    out_features = num_features // 2 if silu else num_features
    out = torch.empty(num_rows, out_features, dtype=x.dtype, device=x.device)
    block_w = max(16, min(64, triton.next_power_of_2(width)))
    shrink_k = 32 if x.dtype == torch.float32 else 128
    # No more shared memory than the product's tiles have, so that they fit beside each other.
    room = (block_m + block_n) * config["BLOCK_K"] * config["STAGES"]
    options: dict[str, Any] = {"enable_fp_fusion": False, **pdl_options(x)}
    _shrink_kernel[(num_groups, row_tiles * triton.cdiv(width, block_w), num_chunks)](
        x,
        a_stack,
        slot_of_token,
        tile_slot,
        partial,
        num_rows,
        depth,
        x.stride(0),
        a_stack.stride(0),
        WIDTH=width,
        CHUNK=chunk,
        BLOCK_M=block_m,
        BLOCK_W=block_w,
        BLOCK_K=shrink_k,
        EVEN_K=depth % shrink_k == 0,
        STAGES=max(2, min(5, room // ((block_m + block_w) * shrink_k))),
        PRECISION=config["PRECISION"],
        num_warps=4,
        **options,
    )
    column_tiles = [triton.cdiv(each, block_n) for each in widths]
    if silu:
        column_tiles = [triton.cdiv(out_features, block_n // 2)]
    _lora_linear_kernel[(row_tiles * sum(column_tiles),)](
        x,
        weight,
        bias if bias is not None else weight,
        out,
        b_stack,
        slot_of_token,
        tile_slot,
        partial,
        num_groups,
        num_rows,
        num_features,
        depth,
        x.stride(0),
        b_stack.stride(0),
        widths[0],
        widths[1] if num_parts > 1 else 0,
        column_tiles[0],
        column_tiles[1] if len(column_tiles) > 1 else 0,
        HAS_BIAS=bias is not None,
        SILU=silu,
        RANK=rank,
        NUM_PARTS=num_parts,
        NUM_CHUNKS=num_chunks,
        BLOCK_R=block_r,
        J=_slots_at_once(x.dtype, block_r, a_stack.shape[0], num_groups),
        **config,
    )
    return out


def _is_few(x: Tensor) -> bool:
    """Rows for ``_few_rows``. On a GPU it has other bits in float32 than the way of many rows."""
    return x.shape[0] <= FEW_ROWS and not (x.is_cuda and x.dtype == torch.float32)


def _tall(x: Tensor, tiles: Tensor | None) -> Tensor | None:
    """``tiles``, but for few rows of float32: those a pass makes are for ``_few_rows``."""
    return None if x.shape[0] <= FEW_ROWS else tiles


def lora_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    a_stack: Tensor,
    b_stack: Tensor,
    slot_of_token: Tensor,
    parts: Sequence[int] | None = None,
    tiles: Tensor | None = None,
) -> Tensor:
    """``specdec.kernels.lora.lora_linear``."""
    widths = tuple(parts or (weight.shape[0],))
    if x.shape[0] == 0:
        return linear(x, weight, bias)
    if _is_few(x):
        return _few_rows(x, weight, bias, a_stack, b_stack, slot_of_token, widths, tiles)
    shrink = Shrink.of(x, a_stack, slot_of_token, _tall(x, tiles), len(widths))
    shrink.launch()
    return expand_(shrink, linear(x, weight, bias), b_stack, widths)


def lora_linear_silu_mul(
    x: Tensor,
    weight: Tensor,
    a_stack: Tensor,
    b_stack: Tensor,
    slot_of_token: Tensor,
    tiles: Tensor | None = None,
) -> Tensor:
    """``specdec.kernels.lora.lora_linear_silu_mul``."""
    features = weight.shape[0] // 2
    if x.shape[0] == 0:
        return x.new_empty(0, features)
    if _is_few(x):
        widths = (features, features)
        return _few_rows(x, weight, None, a_stack, b_stack, slot_of_token, widths, tiles, silu=True)
    shrink = Shrink.of(x, a_stack, slot_of_token, _tall(x, tiles), 2)
    shrink.launch()
    return expand_silu_mul(shrink, linear(x, weight), b_stack)
