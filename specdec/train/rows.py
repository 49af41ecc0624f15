"""Documents packed into training rows of one length, and batches of rows.

Shape letters: S rows, B rows of a batch, T tokens of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specdec.train.corpus import Document

PADDING = -1
# A document goes into the first of so many open rows that has room for it.
OPEN_ROWS = 64


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of whole documents side by side."""

    tokens: Tensor  # [B, T] int64
    document: Tensor  # [B, T] int64: which one of its row a token belongs to, PADDING for none
    positions: Tensor  # [B, T] int64, from 0 in each document
    answer: Tensor  # [B, T] bool: the target wrote it as an answer
    rows: tuple[int, ...]  # which ones of all rows these are
    num_rows: int  # of how many

    def mask(self) -> Tensor:
        """Which keys a query sees, [B, 1, T, T] bool: its own document up to itself."""
        same = self.document[:, :, None] == self.document[:, None, :]
        return same.tril()[:, None]


@dataclass(frozen=True, slots=True)
class Row:
    """Where documents lie in one row: (document, its first position)."""

    places: list[tuple[Document, int]]


class PackedRows:
    """Every document once, in rows of ``seq_len`` tokens on one device."""

    def __init__(
        self, documents: Sequence[Document], seq_len: int, device: torch.device | str
    ) -> None:
        """Raises ValueError where there is no document, or one longer than a row."""
        if not documents:
            raise ValueError("no documents to train on: let the target write more --tokens")
        self.rows = _pack(documents, seq_len)
        shape = (len(self.rows), seq_len)
        tokens, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        document = np.full(shape, PADDING, np.int32)
        answer = np.zeros(shape, np.bool_)
        for i, row in enumerate(self.rows):
            for j, (each, at) in enumerate(row.places):
                end = at + len(each.tokens)
                tokens[i, at:end] = each.tokens
                document[i, at:end] = j
                positions[i, at:end] = np.arange(end - at)
                for first, last in each.spans:
                    answer[i, at + first : at + last] = True
        self._tensors = [
            torch.from_numpy(array).to(device) for array in (tokens, document, positions, answer)
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, rows: Sequence[int]) -> Batch:
        index = torch.tensor(rows, device=self._tensors[0].device)
        tokens, document, positions, answer = (tensor[index] for tensor in self._tensors)
        return Batch(
            tokens.long(), document.long(), positions.long(), answer, tuple(rows), len(self)
        )


class BatchOrder:
    """Which rows each training step takes: every epoch all of them, in another order.

    A function of the seed and the step alone, so that a resumed run goes on as it would have.
    """

    def __init__(self, num_rows: int, rows_per_batch: int, seed: int) -> None:
        self.num_rows = num_rows
        self.rows_per_batch = min(rows_per_batch, num_rows)
        self.steps_per_epoch = num_rows // self.rows_per_batch
        self._seed = seed
        self._epoch = -1
        self._order: list[int] = []

    def rows(self, step: int) -> list[int]:
        epoch, place = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            rng = np.random.default_rng((self._seed, epoch))
            self._epoch, self._order = epoch, rng.permutation(self.num_rows).tolist()
        start = place * self.rows_per_batch
        return self._order[start : start + self.rows_per_batch]


def _pack(documents: Sequence[Document], seq_len: int) -> list[Row]:
    rows: list[Row] = []
    room: list[tuple[int, Row]] = []  # of the rows that are still open
    for document in documents:
        length = len(document.tokens)
        if length > seq_len:
            raise ValueError(f"a document of {length} tokens does not fit --seq-len {seq_len}")
        at = next((i for i, (left, _) in enumerate(room) if left >= length), None)
        if at is None:
            rows.append(Row([]))
            room.append((seq_len, rows[-1]))
            at = len(room) - 1
        left, row = room[at]
        row.places.append((document, seq_len - left))
        room[at] = (left - length, row)
        if len(room) > OPEN_ROWS:
            room.remove(min(room, key=lambda each: each[0]))
    return rows
