"""How the flash-attn and flashinfer packages are used, over stand-ins that obey their documents.

The stand-ins align queries and keys at their ends, read pages as the packages do, and fail where
those would: a plan inside a capture, buffers that move. What the real kernels do is for the
conformance suite on a GPU.
"""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from attention_batch import NO_BLOCK
from attention_cases import (
    Case,
    assert_a_graph_follows,
    attend,
    keys_of_rows,
    metadata_of,
    positions,
)
from torch import Tensor

from specdec.verifier.attention.base import AttentionMetadata
from specdec.verifier.attention.flash_attn import FlashAttnBackend
from specdec.verifier.attention.flashinfer import FlashInferBackend
from specdec.verifier.graph import GraphPool
from specdec.verifier.modes import AttentionCGSupport


def aligned_attention(
    query: Tensor,  # [Q, H, D]
    keys: Tensor,  # [L, G, D]
    values: Tensor,
    scale: float,
    window: tuple[int, int],
    cap: float | None,
) -> Tensor:
    """One request, the last query at the last key; rows without keys give what they like: ones."""
    if not len(keys):
        return torch.ones_like(query)
    group = query.shape[1] // keys.shape[1]
    keys, values = (part.repeat_interleave(group, 1).transpose(0, 1) for part in (keys, values))
    scores = query.transpose(0, 1) @ keys.mT * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    place = torch.arange(len(query))[:, None] + keys.shape[1] - len(query)
    index = torch.arange(keys.shape[1])
    hidden = index > place
    if window[0] >= 0:
        hidden |= index < place - window[0]
    out = (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values).transpose(0, 1)
    return torch.where(hidden.all(-1)[:, None, None], 1, out)


def paged(cache: Tensor, pages: Tensor, length: int) -> Tensor:
    assert (pages < NO_BLOCK).all()
    return cache[pages.long()].flatten(0, 1)[:length]


_runs: dict[str, Callable[..., Tensor]] = {}


def fake_flash_attn() -> ModuleType:
    module = ModuleType("flash_attn")

    def varlen(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        *,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float,
        block_table: Tensor,
        uniform: bool = False,
    ) -> Tensor:
        assert causal and k.shape[1] % 256 == 0 and cu_seqlens_k.dtype == torch.int32
        assert max_seqlen_k >= int(cu_seqlens_k.diff().max())
        assert max_seqlen_q >= int(cu_seqlens_q.diff().max())
        out = torch.full_like(q, 7.0)
        for request, length in enumerate(cu_seqlens_k.diff().tolist()):
            start, end = cu_seqlens_q[request : request + 2].tolist()
            # Without keys the package writes past its sums.
            assert length or start == end or uniform
            pages = block_table[request, : -(-length // k.shape[1])]
            keys, values = paged(k, pages, length), paged(v, pages, length)
            options = (softmax_scale, window_size, softcap)
            out[start:end] = aligned_attention(q[start:end], keys, values, *options)
        return out

    def with_kvcache(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        cache_seqlens: Tensor,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float,
        block_table: Tensor,
    ) -> Tensor:
        assert causal and cache_seqlens.dtype == torch.int32
        tensors = (q, k_cache, v_cache, cache_seqlens, block_table)
        return torch.ops.specdec_test.flash_run(*tensors, softmax_scale, *window_size, softcap)

    def run(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        cache_seqlens: Tensor,
        block_table: Tensor,
        scale: float,
        left: int,
        right: int,
        softcap: float,
    ) -> Tensor:
        num_reqs, query_len = q.shape[:2]
        assert cache_seqlens.shape == (num_reqs,)
        starts = torch.arange(num_reqs + 1) * query_len
        ends = torch.cat([torch.zeros(1, dtype=torch.int32), cache_seqlens.cumsum(0).int()])
        out = varlen(
            *(q.flatten(0, 1), k_cache, v_cache, starts, ends, query_len),
            int(cache_seqlens.max()),
            softmax_scale=scale,
            causal=True,
            window_size=(left, right),
            softcap=softcap,
            block_table=block_table,
            uniform=True,
        )
        return out.view(q.shape)

    _runs["flash"] = run
    module.flash_attn_varlen_func = varlen
    module.flash_attn_with_kvcache = with_kvcache
    return module


class FakeWrapper:
    """flashinfer's wrapper: what is planned is fixed, page lists are read when it runs."""

    def __init__(self, workspace: Tensor, layout: str, *, backend: str, **buffers: Any) -> None:
        assert layout == "NHD" and backend == "fa2"
        self.is_graph = bool(buffers.pop("use_cuda_graph", False))
        self.buffers = [
            buffers[name]
            for name in (
                *("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf"),
                "paged_kv_last_page_len_buf",
            )
            if self.is_graph
        ]

    def reset_workspace_buffer(self, workspace: Tensor, plan: Tensor) -> None:
        assert self.is_graph

    def plan(self, *lists: Tensor, disable_split_kv: bool = False, **shape: Any) -> None:
        self.shape = shape
        self.may_split = not disable_split_kv
        planned = [lists[1].diff() * shape["page_size"], lists[0]]
        self.longest, self.query_starts = (each.clone() for each in planned)
        if not self.is_graph:
            self.buffers = [each.clone() for each in lists]
        for buffer, given in zip(self.buffers, lists, strict=True):
            buffer[: len(given)].copy_(given)

    def run(self, q: Tensor, caches: tuple[Tensor, Tensor], *, enable_pdl: bool) -> Tensor:
        # No early start: the page lists are written just before.
        assert not enable_pdl
        return torch.ops.specdec_test.flashinfer_run(q, *caches, _WRAPPERS.index(self))


_WRAPPERS: list[FakeWrapper] = []


def _run(q: Tensor, keys: Tensor, values: Tensor, wrapper_id: int) -> Tensor:
    wrapper = _WRAPPERS[wrapper_id]
    query_starts, starts, ids, last_sizes = wrapper.buffers
    assert torch.equal(query_starts.long(), wrapper.query_starts.long())
    page_size, cap = keys.shape[1], wrapper.shape["logits_soft_cap"]
    assert page_size == wrapper.shape["page_size"]
    out = torch.full_like(q, 7.0)
    for request in range(len(starts) - 1):
        first, end = starts[request : request + 2].tolist()
        length = 0 if first == end else (end - first - 1) * page_size + int(last_sizes[request])
        assert length <= wrapper.longest[request]
        rows = slice(*query_starts[request : request + 2].tolist())
        # It lays partial results out by the chunks there are, and merges those that were planned.
        several = rows.stop - rows.start > 1
        is_shorter = wrapper.is_graph and length < wrapper.longest[request]
        assert not (several and wrapper.may_split and is_shorter)
        window = (wrapper.shape["window_left"], 0)
        parts = (paged(keys, ids[first:end], length), paged(values, ids[first:end], length))
        options = (wrapper.shape["sm_scale"], window, cap)
        out[rows] = aligned_attention(q[rows], *parts, *options)
    return out


# The stand-ins are opaque to the recorder, as kernels are to a capture.
_runs["flashinfer"] = _run
_library = torch.library.Library("specdec_test", "FRAGMENT")
_library.define("flashinfer_run(Tensor q, Tensor keys, Tensor values, int wrapper_id) -> Tensor")
_library.define(
    "flash_run(Tensor q, Tensor keys, Tensor values, Tensor cache_seqlens, Tensor block_table, "
    "float scale, int left, int right, float softcap) -> Tensor"
)
for _name in ("flash", "flashinfer"):
    _library.impl(f"{_name}_run", lambda *args, name=_name: _runs[name](*args), "CPU")
    _library.impl(f"{_name}_run", lambda q, *_: torch.empty_like(q), "Meta")


def fake_flashinfer() -> ModuleType:
    module = ModuleType("flashinfer")
    module.__version__ = "0.6.14"

    def make(*args: Any, **kwargs: Any) -> FakeWrapper:
        _WRAPPERS.append(FakeWrapper(*args, **kwargs))
        return _WRAPPERS[-1]

    module.BatchPrefillWithPagedKVCacheWrapper = make
    return module


@pytest.fixture(params=["flash_attn", "flashinfer"])
def backend(request, monkeypatch):
    if request.param == "flash_attn":
        monkeypatch.setitem(sys.modules, "flash_attn", fake_flash_attn())
        return FlashAttnBackend()
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer())
    return FlashInferBackend()


CASES = [
    Case(query_len=q, dtype="fp32", block_size=256, **options)
    for q in (1, 5, 0)
    for options in ({}, {"sliding_window": 30}, {"soft_cap": 2.0}, {"heads": (7, 1)})
]


def assert_exact(backend: Any, batch: Any) -> None:
    result = attend(backend, batch)
    position, num_keys = positions(batch), keys_of_rows(batch)
    assert not result[(position < 0) | (num_keys == 0)].any()
    used = (position >= 0) & (position < num_keys)
    assert result.isfinite().all()
    torch.testing.assert_close(result[used].double(), batch.exact()[used], rtol=0, atol=3e-6)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(backend, case) -> None:
    assert_exact(backend, case.batch(case.block_size, "cpu"))


@pytest.mark.parametrize("query_len", [2, 5])
def test_rows_that_drafted_less_and_padding(backend, query_len) -> None:
    case = Case(query_len=query_len, dtype="fp32", block_size=256)
    assert_exact(backend, case.short_batch(256, "cpu"))


@pytest.mark.parametrize("query_len", [1, 5])
def test_a_recording_follows_the_lengths_of_the_step(backend, query_len) -> None:
    assert backend.cg_support is AttentionCGSupport.UNIFORM_BATCH
    batch = Case(query_len=query_len, dtype="fp32", block_size=256).batch(256, "cpu")
    pool = GraphPool("cpu")
    assert_a_graph_follows(backend, batch, lambda fn: pool.capture(fn).replay)


def test_layers_with_and_without_a_window_share_the_page_lists(monkeypatch) -> None:
    """Planning the second kind in the middle of a pass overwrites the lists of the first."""
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer())
    backend = FlashInferBackend()
    batch = Case(dtype="fp32", block_size=256).batch(256, "cpu")
    windowed = Case(dtype="fp32", block_size=256, sliding_window=9).batch(256, "cpu")
    for each in (batch, windowed, batch, windowed):
        assert_exact(backend, each)
    assert len(backend._pages) == 1


def test_requests_of_padding_have_rows_and_no_keys(backend) -> None:
    """As in the batches that an engine warms up with; more rows than the table has positions."""
    batch = Case(query_len=0, dtype="fp32", block_size=256).batch(256, "cpu")
    rows = 600
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, rows, rows], dtype=torch.int32),
        context_lens=torch.zeros(2, dtype=torch.int32),
        seq_lens=torch.zeros(2, dtype=torch.int32),
        block_table=torch.zeros(2, 1, dtype=torch.int32),
        slot_mapping=torch.full((rows,), -1),
        max_query_len=rows,
        uniform=False,
    )
    query = batch.query[:1].expand(rows, -1, -1).contiguous()
    out = backend.forward(query, batch.key_cache, batch.value_cache, metadata, batch.scale)
    assert not out.any()


def test_target_and_draft_read_one_batch(backend) -> None:
    """Each with a backend of its own, which is what the draft's reading of a prompt does."""
    batch = Case(query_len=0, dtype="fp32", block_size=256).batch(256, "cpu")
    metadata = metadata_of(batch)
    arguments = (batch.query, batch.key_cache, batch.value_cache, metadata, batch.scale)
    first = backend.forward(*arguments)
    assert torch.equal(type(backend)().forward(*arguments), first)


def test_an_old_flashinfer_is_refused(monkeypatch) -> None:
    module = fake_flashinfer()
    module.__version__ = "0.5.9"
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    with pytest.raises(ImportError, match=r"0\.5\.9 is older than 0\.6\.14"):
        FlashInferBackend()
