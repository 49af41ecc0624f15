"""The paged KV cache: its memory, and the pool that hands out its blocks."""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from specdec.verifier.recurrent import RecurrentStates


class KVCache:
    """Keys and values of all layers, in blocks of ``block_size`` positions.

    ``keys[layer]`` and ``values[layer]`` are [num_blocks + 1, block_size, num_kv_heads, head_size].
    The last block lies on top of the pool: rows of padding write there and nothing reads it.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        latent_size: int | None = None,
        recurrent: RecurrentStates | None = None,
    ) -> None:
        """
        latent_size: leading features of a key that are its value; keys and values are then the same
            memory.
        recurrent: states of the layers without keys and values.
        """
        self.recurrent = recurrent
        self.latent_size = latent_size
        self.num_blocks = num_blocks
        self.block_size = block_size
        copies = 2 if latent_size is None else 1
        shape = (copies, num_layers, num_blocks + 1, block_size, num_kv_heads, head_size)
        self.data = torch.zeros(shape, dtype=dtype, device=device)
        self.keys: Tensor = self.data[0]
        self.values: Tensor = self.data[-1]

    @property
    def num_bytes(self) -> int:
        return self.data.numel() * self.data.element_size()


class OutOfBlocks(Exception):
    """The pool has fewer free blocks than were asked for."""


class BlockPool:
    """Hands out blocks by id and remembers what full blocks hold.

    A block has as many holders as texts share it; without one it is free. A free block keeps its
    published content until it is handed out again, the longest unused first, so that a text with
    the same beginning can take it back.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_kv_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self._holders = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._block_of: dict[bytes, int] = {}
        self._content_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks. Raises OutOfBlocks, taking none, where there are fewer."""
        if count > len(self._free):
            raise OutOfBlocks(f"{count} blocks asked for, {len(self._free)} free")
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._holders[block] = 1
            content = self._content_of.pop(block, None)
            if content is not None:
                del self._block_of[content]
        return blocks

    def take_prefix(self, contents: Sequence[bytes]) -> list[int]:
        """Hold the blocks of the longest run of ``contents``, from the first on, that is there."""
        blocks = []
        for content in contents:
            block = self._block_of.get(content)
            if block is None:
                break
            self._holders[block] += 1
            self._free.pop(block, None)
            blocks.append(block)
        return blocks

    def publish(self, block: int, content: bytes) -> None:
        """Say what a held, full block holds. The first block with a content stands for it."""
        if content not in self._block_of and block not in self._content_of:
            self._block_of[content] = block
            self._content_of[block] = content

    def release(self, blocks: Sequence[int]) -> None:
        """Let go of blocks; the last of a text are handed out before its first."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free[block] = None
                if block not in self._content_of:
                    self._free.move_to_end(block, last=False)

    def check_integrity(self, held: Iterable[Sequence[int]]) -> None:
        """Holders are those of ``held``, and free blocks have none. Raises AssertionError."""
        counts = [0] * self.num_blocks
        for blocks in held:
            for block in blocks:
                counts[block] += 1
        wrong = {
            block: (counted, recorded, block in self._free)
            for block, (counted, recorded) in enumerate(zip(counts, self._holders, strict=True))
            if counted != recorded or (recorded == 0) != (block in self._free)
        }
        if wrong:
            raise AssertionError(
                f"KV blocks (holders counted, holders recorded, free): {wrong}; "
                f"{len(self._free)} of {self.num_blocks} are free"
            )


def block_contents(
    tokens: Sequence[int], block_size: int, salt: str, lookahead: int = 0, before: bytes = b""
) -> Iterator[tuple[bytes, bytes]]:
    """For each full block of a text: what it holds, and the key of the text up to its end.

    What a block holds depends on its tokens, all tokens before it, and ``salt``, which tells apart
    texts whose KV differs for the same tokens (adapter and its version).

    Args:
        lookahead: tokens after a block that its content depends on too; ``tokens`` must hold them.
        before: the key of the text before ``tokens``, where they do not begin it.
    """
    key = before or salt.encode()
    for end in range(block_size, len(tokens) + 1 - lookahead, block_size):
        block = array("q", tokens[end - block_size : end]).tobytes()
        key = hashlib.blake2b(key + block, digest_size=16).digest()
        content = key
        if lookahead:
            ahead = array("q", tokens[end : end + lookahead]).tobytes()
            content = hashlib.blake2b(key + ahead, digest_size=16).digest()
        yield content, key
