"""What every attention backend must get right: the cases, and how one is checked.

A backend serves a case or refuses it by name (``AttentionBackend.unsupported``); which of the two
is reported, nothing is skipped. Errors are measured against float64, head by head, and may be at
most twice those of PyTorch's own attention in the same dtype, which reads the same keys without
pages. Slots and table entries that no row may read hold NaN and impossible blocks.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from attention_batch import Batch, make_batch

from specdec.verifier.attention.base import AttentionBackend, AttentionMetadata, AttentionNeeds

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MIXED_CONTEXTS = (0, 12, 0, 333, 700, -1, 0)
MIXED_QUERIES = (333, 5, 0, 1, 75, 3, 63)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One batch. ``query_len`` 0 is a mixed one; lengths at the borders of blocks are added."""

    query_len: int = 5
    heads: tuple[int, int] = (6, 2)
    head_size: int = 64
    dtype: str = "bf16"
    block_size: int | None = None  # None: what the backend takes by default
    sliding_window: int | None = None
    soft_cap: float | None = None
    far: bool = False  # a text of 4097 tokens too

    def __str__(self) -> str:
        words = [f"q{self.query_len}" if self.query_len else "mixed"]
        words += [f"{self.heads[0]}/{self.heads[1]}x{self.head_size}", self.dtype]
        words += [f"block{self.block_size}"] * (self.block_size is not None)
        words += [f"window{self.sliding_window}"] * (self.sliding_window is not None)
        words += [f"cap{self.soft_cap}"] * (self.soft_cap is not None)
        return "-".join([*words, *["far"] * self.far])

    def needs(self, block_size: int, device: str) -> AttentionNeeds:
        return AttentionNeeds(
            head_size=self.head_size,
            dtype=DTYPES[self.dtype],
            block_size=block_size,
            device=torch.device(device),
            sliding_window=self.sliding_window,
            soft_cap=self.soft_cap,
        )

    def batch(self, block_size: int, device: str) -> Batch:
        if self.query_len:
            contexts = [0, 1, block_size - 1, block_size, block_size + 1, 333, -1]
            contexts = [max(-1, context) for context in contexts]
            contexts += [4097] * self.far
            queries = [self.query_len] * len(contexts)
        else:
            contexts, queries = list(MIXED_CONTEXTS), list(MIXED_QUERIES)
            contexts += [4097] * self.far
            queries += [9] * self.far
        return on(device, DTYPES[self.dtype], self._make(contexts, queries, block_size))

    def short_batch(self, block_size: int, device: str) -> Batch:
        """Rows that stand past the last key, and requests of padding."""
        query_len = max(2, self.query_len)
        lens = [7, block_size + query_len - 1, 300 + query_len, 0, 0]
        batch = self._make(
            [6, block_size - 1, 300, 0, 3],
            [query_len] * 5,
            block_size,
            seq_lens=lens,
            table_width=-(-(300 + query_len) // block_size) + 1,
        )
        return on(device, DTYPES[self.dtype], batch)

    def _make(
        self, contexts: list[int], queries: list[int], block_size: int, **options: object
    ) -> Batch:
        return make_batch(
            contexts,
            queries,
            uniform=self.query_len > 0,
            num_heads=self.heads[0],
            num_kv_heads=self.heads[1],
            head_size=self.head_size,
            block_size=block_size,
            sliding_window=self.sliding_window,
            soft_cap=self.soft_cap,
            **options,  # type: ignore[arg-type]
        )


GROUPS = ((2, 2), (6, 2), (8, 2), (7, 1), (16, 2))
HEAD_SIZES = (64, 80, 96, 128, 256)
VARIANTS = (
    {"sliding_window": 1},
    {"sliding_window": 16},
    {"sliding_window": 300},
    {"soft_cap": 2.0},
    {"soft_cap": 50.0},
    {"sliding_window": 100, "soft_cap": 5.0},
)
CASES = [
    *(Case(query_len=q, heads=heads) for heads in GROUPS for q in (5, 0)),
    *(Case(head_size=size, dtype=dtype) for size in HEAD_SIZES for dtype in DTYPES),
    *(Case(query_len=0, head_size=size) for size in HEAD_SIZES),
    *(Case(query_len=q, heads=(8, 2), head_size=128) for q in (1, 2, 5, 9, 17, 0)),
    *(Case(query_len=q, heads=(8, 2), head_size=128, far=True) for q in (1, 5, 9, 0)),
    *(
        Case(query_len=q, far=True, dtype="fp32", sliding_window=w)
        for q in (5, 0)
        for w in (None, 9)
    ),
    *(Case(query_len=q, block_size=size) for size in (1, 4, 16, 32, 256) for q in (5, 0)),
    *(Case(query_len=q, **variant) for variant in VARIANTS for q in (1, 5, 0)),
    *(Case(head_size=256, heads=(8, 4), query_len=q, soft_cap=50.0) for q in (5, 0)),
    Case(dtype="fp32", soft_cap=2.0, sliding_window=30),
    Case(dtype="fp32", soft_cap=30.0),
    Case(query_len=0, dtype="fp16", heads=(8, 1)),
]
CASES = list(dict.fromkeys(CASES))


def on(device: str, dtype: torch.dtype, batch: Batch) -> Batch:
    """The batch elsewhere, floats in ``dtype`` (the exact result is that of the rounded ones)."""
    moved = {
        name: value.to(device, dtype) if value.is_floating_point() else value.to(device)
        for name, value in batch.arguments().items()
        if isinstance(value, torch.Tensor)
    }
    return replace(batch, **moved)


def metadata_of(batch: Batch) -> AttentionMetadata:
    return AttentionMetadata(
        query_start_loc=batch.query_start_loc,
        context_lens=batch.context_lens,
        seq_lens=batch.seq_lens,
        block_table=batch.block_table,
        slot_mapping=torch.full((len(batch.query),), -1, device=batch.query.device),
        max_query_len=batch.max_query_len,
        uniform=batch.uniform,
    )


def attend(backend: AttentionBackend, batch: Batch) -> torch.Tensor:
    return backend.forward(
        *(batch.query, batch.key_cache, batch.value_cache, metadata_of(batch), batch.scale),
        *(batch.sliding_window, batch.soft_cap),
    )


def positions(batch: Batch) -> torch.Tensor:
    """[T] int64: where each row stands; rows of no request stand at -1."""
    out = torch.full((len(batch.query),), -1)
    starts = batch.query_start_loc.tolist()
    for request, context_len in enumerate(batch.context_lens.tolist()):
        start, end = starts[request], starts[request + 1]
        out[start:end] = torch.arange(context_len, context_len + end - start)
    return out.to(batch.query.device)


def keys_of_rows(batch: Batch) -> torch.Tensor:
    """[T] int64: the number of keys of each row's request."""
    request = torch.searchsorted(
        batch.query_start_loc[1:].long(),
        torch.arange(len(batch.query), device=batch.query.device),
        right=True,
    )
    padded = F.pad(batch.seq_lens.long(), (0, 1))
    return padded[request]


def plain_attention(batch: Batch) -> torch.Tensor:
    """PyTorch's own attention in the batch's dtype, request by request over contiguous keys.

    With a soft cap, which it does not have, the same in PyTorch's products, the weights in the
    batch's dtype and all else in float32.
    """
    out = torch.zeros_like(batch.query)
    device, group = batch.query.device, batch.query.shape[1] // batch.key_cache.shape[2]
    starts = batch.query_start_loc.tolist()
    for request, context_len in enumerate(batch.context_lens.tolist()):
        keys, values = (
            part.repeat_interleave(group, dim=1).transpose(0, 1)
            for part in batch.keys_and_values(request)
        )
        start, end = starts[request], starts[request + 1]
        if start == end or not keys.shape[1]:
            continue
        last = torch.arange(end - start, device=device)[:, None] + context_len
        index = torch.arange(keys.shape[1], device=device)
        mask = index <= last
        if batch.sliding_window is not None:
            mask = mask & (index > last - batch.sliding_window)
        rows = batch.query[start:end].transpose(0, 1)
        if batch.soft_cap is None:
            mixed = F.scaled_dot_product_attention(rows, keys, values, mask, scale=batch.scale)
        else:
            scores = (rows.float() @ keys.float().mT) * batch.scale
            scores = batch.soft_cap * torch.tanh(scores / batch.soft_cap)
            weights = scores.masked_fill(~mask, -torch.inf).softmax(-1).to(values.dtype)
            mixed = (weights.float() @ values.float()).to(values.dtype)
        out[start:end] = torch.where(mask.any(-1)[:, None, None], mixed.transpose(0, 1), 0)
    return out


def error(result: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Relative error of each head."""
    return (result.double() - exact).norm(dim=(0, 2)) / exact.norm(dim=(0, 2))


def assert_as_good(backend: AttentionBackend, batch: Batch, value_size: int | None = None) -> None:
    """As close as PyTorch, finite everywhere, zero where no key is seen.

    ``value_size``: the result's features where they are fewer than the query's.
    """
    result = attend(backend, batch)
    width = value_size or batch.query.shape[-1]
    assert result.dtype == batch.query.dtype
    assert result.shape == (*batch.query.shape[:2], width)
    assert result.isfinite().all()
    position, num_keys = positions(batch), keys_of_rows(batch)
    assert not result[(position < 0) | (num_keys == 0)].any()
    used = (position >= 0) & (position < num_keys)
    exact = on(str(batch.query.device), torch.float64, batch).exact()[used][..., :width]
    limit = 2 * error(plain_attention(batch)[used][..., :width], exact) + 1e-7
    measured = error(result[used], exact)
    assert (measured <= limit).all(), (measured / limit).max()


def assert_a_graph_follows(
    backend: AttentionBackend, batch: Batch, capture: Callable[[Callable], Callable[[], None]]
) -> None:
    """Captured on texts of one token, replayed on others: each replay gives eager's bits.

    ``capture`` records a function and returns what replays it.
    """
    query_lens = batch.query_start_loc.diff()
    static = replace(
        batch,
        context_lens=torch.ones_like(batch.context_lens),
        seq_lens=1 + query_lens,
        block_table=torch.zeros_like(batch.block_table),
    )
    # A backend may set itself up for a shape on first sight.
    out = torch.empty_like(attend(backend, static))
    replay = capture(lambda: out.copy_(attend(backend, static)))
    nothing = torch.zeros_like(batch.seq_lens)
    for seq_lens in (batch.seq_lens, batch.seq_lens.minimum(query_lens + 16), nothing):
        static.block_table.copy_(batch.block_table)
        static.seq_lens.copy_(seq_lens)
        static.context_lens.copy_(torch.where(seq_lens > 0, seq_lens - query_lens, 0))
        for _ in range(2):
            out.fill_(torch.nan)
            replay()
        assert torch.equal(out, attend(backend, static))
        assert out.isfinite().all()
        assert not out[keys_of_rows(static) == 0].any()
