"""A mixed batch run through a ``FlatModel`` on the CPU, for tests of graphs in pieces."""

import torch
from paged import BLOCK_SIZE

from specdec.verifier.attention.base import AttentionMetadata
from specdec.verifier.compile import CompilationConfig
from specdec.verifier.context import set_forward_context
from specdec.verifier.flat_model import FlatModel
from specdec.verifier.graph import GraphPool
from specdec.verifier.modes import BatchDescriptor, CUDAGraphMode

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
MAX_TOKENS, MAX_SEQS, WIDTH = 32, 4, 8
# One mixed batch: a verify row of 3 tokens at position 9, a prompt of 7, one token at position 0.
LENGTHS, CONTEXTS = [3, 7, 1], [9, 0, 0]
LIVE = sum(LENGTHS)


def mixed_batch(seed: int = 0, slots=None):
    """Ids, positions and metadata of a batch; request r owns blocks r * WIDTH and up.

    ``slots``: the requests' adapter slots, or None.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 128, (LIVE,), generator=generator)
    positions = torch.cat([torch.arange(c, c + n) for c, n in zip(CONTEXTS, LENGTHS, strict=True)])
    table = torch.arange(MAX_SEQS * WIDTH, dtype=torch.int32).view(MAX_SEQS, WIDTH)[: len(LENGTHS)]
    owner = torch.repeat_interleave(torch.tensor(LENGTHS))
    blocks = table[owner, positions // BLOCK_SIZE].long()
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    context = torch.tensor(CONTEXTS, dtype=torch.int32)
    metadata = AttentionMetadata(
        query_start_loc=starts,
        context_lens=context,
        seq_lens=context + torch.tensor(LENGTHS, dtype=torch.int32),
        block_table=table,
        slot_mapping=blocks * BLOCK_SIZE + positions % BLOCK_SIZE,
        max_query_len=max(LENGTHS),
        uniform=False,
        adapter_slots=None if slots is None else torch.tensor(slots)[owner],
    )
    return ids, positions, metadata


def flat(model, *, debug=True, verify=False, **compilation):
    cache = model.make_kv_cache(MAX_SEQS * WIDTH, BLOCK_SIZE)
    cache.data.normal_(generator=torch.Generator().manual_seed(3))
    return FlatModel(
        model, cache, GraphPool("cpu"), max_num_tokens=MAX_TOKENS, max_num_seqs=MAX_SEQS,
        table_width=WIDTH, compilation=CompilationConfig(**compilation), debug=debug, verify=verify,
    )  # fmt: skip


def key_for(num_tokens: int, has_lora: bool = False) -> BatchDescriptor:
    return BatchDescriptor(num_tokens, min(num_tokens, MAX_SEQS), False, has_lora)


@torch.inference_mode()
def run(runner: FlatModel, mode, num_tokens: int = LIVE, seed: int = 0, slots=None):
    """Hidden states and the cache after one mixed batch, from the same cache each time."""
    runner.kv_cache.data.normal_(generator=torch.Generator().manual_seed(3))
    ids, positions, metadata = mixed_batch(seed, slots)
    key = key_for(num_tokens, slots is not None)
    with set_forward_context(cudagraph_runtime_mode=mode, batch_descriptor=key):
        hidden = runner.forward(ids, positions, runner.kv_cache, metadata)
    return hidden.clone(), runner.kv_cache.data[:, :, :-1].clone()


def capture(runner: FlatModel, mode, *sizes: int, has_lora: bool = False) -> None:
    with runner.pool.capture_window():
        for size in sizes:
            runner.capture(mode, key_for(size, has_lora))


def same(one, other) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
