"""Attention by the flashinfer package (arXiv:2501.01005) over our paged cache.

flashinfer splits work on the host: ``plan()`` reads the requests' lengths there, and its kernels
then walk what was planned. A step of ours keeps its lengths on the device, and the host learns of
them one step late. So the plan of a uniform batch is made once per shape, before its capture, for
the longest text that a block table holds. The kernels cut each request's chunks at the length that
they read on the device, and a chunk past it is empty; the page lists they read are rewritten inside
the graph. A text much shorter than the longest one keeps few multiprocessors busy. Partial results
of several rows lie as far apart as the text has chunks, and are merged as if it had the planned
number: so batches of several rows are planned without chunks.

Batches of other kinds are planned for their own lengths, which waits for the device: they run
outside of graphs.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.verifier.attention.aligned import AlignedRows, align_rows
from specdec.verifier.attention.base import AttentionMetadata, AttentionNeeds
from specdec.verifier.modes import AttentionCGSupport, BatchDescriptor

# The first release whose chunks past the end of a text are empty instead of huge.
MIN_VERSION = (0, 6, 14)
HEAD_SIZES = (64, 128, 256)
# A plan lists tiles of queries and chunks of keys, about a thousand at most.
PLAN_BYTES = 1 << 20
# No GPU has more; a plan spreads partial results over two tiles on each.
MULTIPROCESSORS = 192


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pages:
    """The keys of each request as flashinfer lists them, at fixed addresses."""

    starts: Tensor  # [R + 1] int32: pages before each request's
    ids: Tensor  # [R * W] int32: the requests' pages one after the other
    last_sizes: Tensor  # [R] int32: keys of each request's last page
    query_starts: Tensor  # [R + 1] int32

    @classmethod
    def empty(cls, num_reqs: int, width: int, device: torch.device) -> "_Pages":
        def integers(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        return cls(
            starts=integers(num_reqs + 1),
            ids=integers(num_reqs * width),
            last_sizes=integers(num_reqs),
            query_starts=integers(num_reqs + 1),
        )

    def fill(self, rows: AlignedRows, block_table: Tensor, page_size: int) -> None:
        num_pages = (rows.num_keys + page_size - 1) // page_size
        self.starts[1:] = num_pages.cumsum(0, dtype=torch.int32)
        place = torch.arange(self.ids.shape[0], device=self.ids.device, dtype=torch.int32)
        request = torch.searchsorted(self.starts[1:], place, right=True)
        request = request.clamp_max(block_table.shape[0] - 1)
        column = (place - self.starts[request]).clamp_max(block_table.shape[1] - 1)
        self.ids.copy_(block_table[request, column.long()])
        # Past the last page stands a page that exists.
        self.ids.masked_fill_(place >= self.starts[-1], 0)
        self.last_sizes.copy_(rows.num_keys - (num_pages - 1).clamp_min(0) * page_size)


class FlashInferBackend:
    """A wrapper per shape of a uniform batch, and one for all other batches.

    Run a batch of a shape once before capturing it: that plans it.
    """

    name = "flashinfer"
    cg_support = AttentionCGSupport.UNIFORM_BATCH
    batch_invariant = False

    def __init__(self) -> None:
        """Raises ImportError where the package is missing, does not load or is too old."""
        import flashinfer

        found = tuple(int(part) for part in flashinfer.__version__.split(".")[:3] if part.isdigit())
        if found < MIN_VERSION:
            wanted = ".".join(map(str, MIN_VERSION))
            raise ImportError(f"flashinfer {flashinfer.__version__} is older than {wanted}")
        self._wrapper_class = flashinfer.BatchPrefillWithPagedKVCacheWrapper
        self._workspace: Tensor | None = None
        self._pages: dict[tuple, _Pages] = {}
        self._wrappers: dict[tuple, Any] = {}

    def unsupported(self, needs: AttentionNeeds) -> str | None:
        if needs.device.type != "cuda":
            return f"it runs on CUDA, not on {needs.device.type}"
        if needs.latent_size is not None:
            return "latent attention; that is what 'mla' is for"
        if needs.dtype not in (torch.bfloat16, torch.float16):
            return f"dtype {needs.dtype}; it has bfloat16 and float16"
        if needs.head_size not in HEAD_SIZES:
            sizes = ", ".join(map(str, HEAD_SIZES))
            return f"head size {needs.head_size}; it has {sizes}"
        if not 1 <= needs.block_size <= 256 or needs.block_size & (needs.block_size - 1):
            return f"block size {needs.block_size}; it has powers of two from 1 to 256"
        return None

    def forbids_full(self, batch: BatchDescriptor) -> str | None:
        return None

    def forward(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
    ) -> Tensor:
        rows = align_rows(metadata)
        queries = rows.queries(query).contiguous()
        shape = {
            "num_qo_heads": query.shape[1],
            "num_kv_heads": key_cache.shape[2],
            "head_dim_qk": query.shape[2],
            "page_size": key_cache.shape[1],
            "causal": True,
            "sm_scale": scale,
            "window_left": -1 if sliding_window is None else sliding_window - 1,
            "logits_soft_cap": soft_cap,
            "q_data_type": query.dtype,
            "kv_data_type": key_cache.dtype,
        }
        make = self._uniform if metadata.uniform else self._planned_now
        wrapper = make(metadata, rows, shape, query.device)
        # With a dependent launch it would read the page lists before they are written.
        out = wrapper.run(queries, (key_cache, value_cache), enable_pdl=False)
        return rows.results(out)

    def _uniform(
        self, metadata: AttentionMetadata, rows: AlignedRows, shape: dict, device: torch.device
    ) -> Any:
        """The wrapper of this shape, its page lists those of the batch."""
        num_reqs, width = metadata.block_table.shape
        size = (num_reqs, width, metadata.max_query_len, shape["page_size"], device)
        key = (*size, *shape.values())
        if key not in self._wrappers:
            self._wrappers[key] = self._plan_longest(size, shape)
            # To plan wrote to the page lists.
            metadata.prepared.pop(self.name, None)
        pages = self._pages[size]
        # All layers of a pass read the same lists.
        if metadata.prepared.get(self.name) is not pages:
            pages.fill(rows, metadata.block_table, shape["page_size"])
            metadata.prepared[self.name] = pages
        return self._wrappers[key]

    def _plan_longest(self, size: tuple, shape: dict) -> Any:
        num_reqs, width, query_len, page_size, device = size
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"flashinfer has no plan for {num_reqs} requests of {query_len} rows; run a batch "
                "of this shape once before capturing it"
            )
        if size not in self._pages:
            self._pages[size] = _Pages.empty(num_reqs, width, device)
        pages = self._pages[size]
        workspace = self._float_workspace(num_reqs, num_reqs * query_len, shape, device)
        wrapper = self._wrapper_class(
            workspace,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=pages.query_starts,
            paged_kv_indptr_buf=pages.starts,
            paged_kv_indices_buf=pages.ids,
            paged_kv_last_page_len_buf=pages.last_sizes,
            backend="fa2",
        )
        # Its own eight megabytes for the plan, on both sides, would be kept for each shape.
        plan = torch.empty(PLAN_BYTES, dtype=torch.uint8, device=device)
        wrapper.reset_workspace_buffer(workspace, plan)
        host = torch.arange(num_reqs + 1, dtype=torch.int32)
        wrapper.plan(
            host * query_len,
            host * width,
            torch.zeros_like(pages.ids),
            torch.full((num_reqs,), page_size, dtype=torch.int32),
            disable_split_kv=query_len > 1,
            **shape,
        )
        return wrapper

    def _planned_now(
        self, metadata: AttentionMetadata, rows: AlignedRows, shape: dict, device: torch.device
    ) -> Any:
        """The wrapper of batches that are no graph's, planned for this one."""
        # Target and draft, each with a backend of its own, may read one batch.
        planned = f"{self.name} {tuple(shape.values())}"
        if planned not in metadata.prepared:
            num_reqs, width = metadata.block_table.shape
            num_rows = metadata.slot_mapping.shape[0]
            workspace = self._float_workspace(num_reqs, num_rows, shape, device)
            wrapper = self._wrapper_class(workspace, "NHD", backend="fa2")
            pages = _Pages.empty(num_reqs, width, device)
            pages.fill(rows, metadata.block_table, shape["page_size"])
            starts = pages.starts.cpu()
            wrapper.plan(
                metadata.query_start_loc.cpu(),
                starts,
                pages.ids[: int(starts[-1])],
                pages.last_sizes.cpu(),
                **shape,
            )
            metadata.prepared[planned] = wrapper
        return metadata.prepared[planned]

    def _float_workspace(
        self, num_reqs: int, num_rows: int, shape: dict, device: torch.device
    ) -> Tensor:
        """Room for the partial results of a plan: a wrapper keeps the one that it was given."""
        heads, head_size = shape["num_qo_heads"], shape["head_dim_qk"]
        group = heads // shape["num_kv_heads"]
        # Tiles of up to 128 rows: each request's own, and as many again as fill the GPU.
        rows = num_rows * group + 128 * (num_reqs + 2 * MULTIPROCESSORS // shape["num_kv_heads"])
        num_bytes = max(128 << 20, 4 * heads * rows * (head_size + 1))
        if self._workspace is None or self._workspace.numel() < num_bytes:
            self._workspace = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        return self._workspace
