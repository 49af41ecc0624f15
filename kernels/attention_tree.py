"""The reduction tree of attention: one order of arithmetic for every batch, split and tile.

Shape letters: M query rows of a tile, D head size.

Query rows are the columns of every tile here: keys and head size, of which there are always many,
fill the tall side of the tensor cores' instructions, and few query rows waste little of the other.

The keys of a request are cut at fixed absolute positions into leaves of ``LEAF`` keys. A *leaf* is
a softmax computed from scratch: (top, mass, acc) = largest score, sum of weights and weighted sum
of values, relative to top. ``NODE`` leaves are folded in order into a *node*, and nodes are folded
in order into the result. Whoever computes a part of that tree gets the same bits:

- the products add along the head size or the keys in order, whatever the tile (so the weights are
  summed as a product with ones: a reduction over a tile would depend on its layout);
- a largest value is exact in any order;
- every multiply-add that could be contracted is written as ``fma``, and the kernels are compiled
  with ``enable_fp_fusion=False``;
- a leaf in which a row sees no key is (-inf, 0, 0), which folds into anything without changing it,
  so leaves that lie before every row's sliding window are left out.

With a soft cap c, scores are kept as tanh(score / c) and ``scale_log2`` holds the factor c.
"""

import triton
import triton.language as tl

# Leaves of a node. With the size of a leaf, this is the tree: changing either changes bits.
NODE = 4


def leaf_size(head_size: int, itemsize: int) -> int:
    """Keys of a leaf. Wide dots in float32 run on few registers' worth of keys only."""
    if itemsize == 4:
        return 32 if head_size <= 128 else 16
    return 128 if head_size <= 128 else 64


def request_block(num_reqs: int) -> int:
    """BLOCK_R, at least ``num_reqs``: few values, since each is a kernel that takes seconds to
    compile."""
    block = 1
    while block < num_reqs:
        block *= 8
    return block


@triton.jit
def empty_part(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """The part of no key."""
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    return top, tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_D, BLOCK_M], tl.float32)


@triton.jit
def fold(top, mass, acc, next_top, next_mass, next_acc, scale_log2):
    """Two parts over neighbouring keys as one."""
    new_top = tl.maximum(top, next_top)
    # Where neither part has a key, any finite base gives zeros without inf - inf.
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    a = tl.exp2((top - base) * scale_log2)
    b = tl.exp2((next_top - base) * scale_log2)
    mass = tl.fma(mass, a, next_mass * b)
    return new_top, mass, tl.fma(acc, a[None, :], next_acc * b[None, :])


@triton.jit
def bounded(x):
    """tanh(x), to a few units in the last place for small x too; NaN stays NaN."""
    square = x * x
    # Fitted to (tanh(x) / x - 1) / x^2 for |x| <= 0.6, relative error 1.1e-8.
    p = tl.fma(square, -0.00627639, 0.02111621)
    p = tl.fma(square, p, -0.05387514)
    p = tl.fma(square, p, 0.13332924)
    p = tl.fma(square, p, -0.3333333)
    near = tl.fma(x * square, p, x)
    far = 1.0 - 2.0 / (tl.exp2(tl.abs(x) * 2.8853900817779268) + 1.0)
    far = tl.where(x < 0.0, -far, far)
    return tl.where(tl.abs(x) > 0.6, far, near)


@triton.jit
def load_leaf(
    keys,  # [LEAF] int32: positions
    wanted,  # [LEAF]: which of them to read; the others are zero
    key_cache,  # at the first slot's row of this head
    value_cache,  # the same, at the first of the BLOCK_V features that are wanted
    blocks,  # [LEAF] int32: the block of each key
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
):
    """Keys [LEAF, BLOCK_D] and values [LEAF, BLOCK_V] of a leaf."""
    slot = blocks.to(tl.int64) * BLOCK_SIZE + keys % BLOCK_SIZE
    features = tl.arange(0, BLOCK_D)
    offsets = slot[:, None] * SLOT_STRIDE + features[None, :]
    mask = wanted[:, None] & (features < D)[None, :]
    k = tl.load(key_cache + offsets, mask=mask, other=0.0)
    if BLOCK_V == BLOCK_D:
        v = tl.load(value_cache + offsets, mask=mask, other=0.0)
    else:
        some = slot[:, None] * SLOT_STRIDE + tl.arange(0, BLOCK_V)[None, :]
        v = tl.load(value_cache + some, mask=wanted[:, None], other=0.0)
    return k, v


@triton.jit
def attend_leaf(
    q,  # [BLOCK_D, BLOCK_M], zero past the head size
    k,  # [LEAF, BLOCK_D]
    v,  # [LEAF, BLOCK_V]
    keys,  # [LEAF] int32: positions
    last,  # [BLOCK_M] int32: the last key each row sees; -1 for none
    first,  # [BLOCK_M] int32: the first one; read where WINDOWED
    scale_log2,
    cap_scale,  # what a product is multiplied by inside the tanh; read where CAPPED
    LEAF: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One leaf for a tile of query rows: (top [M], mass [M], acc [BLOCK_V, M]) in float32."""
    scores = tl.dot(k, q, input_precision=PRECISION)  # [LEAF, BLOCK_M]
    if CAPPED:
        scores = bounded(scores * cap_scale)
    scores = tl.where(keys[:, None] <= last[None, :], scores, float("-inf"))
    if WINDOWED:
        scores = tl.where(keys[:, None] >= first[None, :], scores, float("-inf"))
    top = tl.max(scores, axis=0)
    base = tl.where(top == float("-inf"), 0.0, top) * scale_log2
    weights = tl.exp2(tl.fma(scores, scale_log2, -base[None, :])).to(v.dtype)
    acc = tl.dot(tl.trans(v), weights, input_precision=PRECISION)
    # All rows of this product are the same sum. 64 of them make it the tensor cores' tall side.
    ones = tl.full([64 if v.dtype.primitive_bitwidth == 16 else 16, LEAF], 1.0, v.dtype)
    mass = tl.max(tl.dot(ones, weights, input_precision=PRECISION), axis=0)
    return top, mass, acc


@triton.jit
def attend_leaves(
    q,
    last,
    first,
    first_leaf,
    end_leaf,
    num_keys,
    key_cache,
    value_cache,
    block_table,  # at the request's row
    known,  # with EARLY: [LEAF] int32, the blocks of the only leaf, if ``is_known``
    is_known,
    scale_log2,
    cap_scale,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    LEAF: tl.constexpr,
    NODE: tl.constexpr,
    STAGES: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The part of the leaves ``first_leaf .. end_leaf - 1``, folded as the tree says.

    The range lies within one node, or begins and ends at nodes' borders (or the last leaf); leaves
    that no row sees may be missing at its beginning.
    """
    top, mass, acc = empty_part(BLOCK_M, BLOCK_V)
    node_top, node_mass, node_acc = empty_part(BLOCK_M, BLOCK_V)
    for leaf in tl.range(first_leaf, end_leaf, num_stages=STAGES):
        keys = leaf * LEAF + tl.arange(0, LEAF)
        if EARLY:
            wanted = (keys < num_keys) & (is_known == 0)
            blocks = tl.load(block_table + keys // BLOCK_SIZE, mask=wanted, other=0)
            blocks = tl.where(is_known, known, blocks)
        else:
            blocks = tl.load(block_table + keys // BLOCK_SIZE, mask=keys < num_keys, other=0)
        k, v = load_leaf(
            keys,
            keys < num_keys,
            key_cache,
            value_cache,
            blocks,
            D,
            BLOCK_D,
            BLOCK_V,
            BLOCK_SIZE,
            SLOT_STRIDE,
        )
        leaf_top, leaf_mass, leaf_acc = attend_leaf(
            q, k, v, keys, last, first, scale_log2, cap_scale, LEAF, WINDOWED, CAPPED, PRECISION
        )
        node_top, node_mass, node_acc = fold(
            node_top, node_mass, node_acc, leaf_top, leaf_mass, leaf_acc, scale_log2
        )
        if leaf % NODE == NODE - 1:
            top, mass, acc = fold(top, mass, acc, node_top, node_mass, node_acc, scale_log2)
            node_top, node_mass, node_acc = empty_part(BLOCK_M, BLOCK_V)
    return fold(top, mass, acc, node_top, node_mass, node_acc, scale_log2)


@triton.jit
def normalise(mass, acc):
    """The attention output of a part that holds all keys; zeros where there was none."""
    return acc * (1.0 / tl.where(mass == 0.0, 1.0, mass))[None, :]


@triton.jit
def scalar_at(values, index, BLOCK: tl.constexpr):
    """Element ``index`` of a vector of integers."""
    return tl.sum(tl.where(tl.arange(0, BLOCK) == index, values, 0))
