"""Earlier outputs, bounded in number of tokens and sorted for lookup. On the host, in NumPy."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specdec.kernels.suffix import SEPARATOR

Ints = np.ndarray  # of int32


@dataclass(frozen=True, slots=True)
class _Text:
    first: int  # cell of its first token
    length: int
    group: str


class TextHistory:
    """The newest texts, as many as fit in ``capacity`` cells; each takes one more than its tokens.

    Texts of different groups never meet in a lookup: every group has an order of its own.

    Attributes:
        pool: [capacity + 2] int32, the cells; see ``specdec.kernels.suffix.SuffixHistory``.
    """

    def __init__(self, capacity: int, max_match: int) -> None:
        self.capacity = capacity
        self.max_match = max_match
        self.pool: Ints = np.full(capacity + 2, SEPARATOR, np.int32)
        self._head = 1
        self._texts: deque[_Text] = deque()  # the oldest first, which is the next to be overwritten
        self._orders: dict[str, Ints] = {}

    @property
    def num_tokens(self) -> int:
        return sum(text.length for text in self._texts)

    def kept(self) -> list[tuple[str, list[int]]]:
        """Group and tokens of every text that is held, the oldest first."""
        return [
            (text.group, self.pool[text.first : text.first + text.length].tolist())
            for text in self._texts
        ]

    def add(self, token_ids: Sequence[int], group: str) -> bool:
        """Take a text in, in place of the oldest ones. One that is too long keeps its end.

        False where nothing can be learnt from it, and then nothing has changed.
        """
        tokens = np.asarray(token_ids[-max(self.capacity - 1, 0) :], np.int32)
        if min(len(tokens), self.capacity - 1) < 2:
            return False
        first = self._make_room(len(tokens) + 1)
        self.pool[first : first + len(tokens)] = tokens
        self.pool[first + len(tokens)] = SEPARATOR
        self._head = first + len(tokens) + 1
        self._texts.append(_Text(first, len(tokens), group))
        places = np.arange(first + 1, first + len(tokens), dtype=np.int32)
        self._merge(places, group)
        return True

    def flatten(self) -> tuple[Ints, dict[str, tuple[int, int]]]:
        """The orders of all groups one after the other, and where each group's stands."""
        bounds, start = {}, 0
        for group, order in self._orders.items():
            bounds[group] = (start, start + len(order))
            start += len(order)
        return np.concatenate([*self._orders.values(), np.empty(0, np.int32)]), bounds

    def _make_room(self, num_cells: int) -> int:
        """The first of ``num_cells`` free cells."""
        head = self._head
        if head + num_cells > self.capacity + 2:
            # What lies between here and the end is older than what lies at the beginning.
            while self._texts and self._texts[0].first >= head:
                self._forget_oldest()
            head = 1
        while self._texts and head <= self._texts[0].first < head + num_cells:
            self._forget_oldest()
        return head

    def _forget_oldest(self) -> None:
        text = self._texts.popleft()
        order = self._orders[text.group]
        order = order[(order < text.first) | (order >= text.first + text.length)]
        if len(order):
            self._orders[text.group] = order
        else:
            del self._orders[text.group]

    def _merge(self, places: Ints, group: str) -> None:
        """Put places of the newest text into the order of its group, before those like them."""
        keys = self._keys(places)
        by_key = np.lexsort(keys.T[::-1])
        places, keys = places[by_key], keys[by_key]
        order = self._orders.get(group, np.empty(0, np.int32))
        low, high = np.zeros(len(places), int), np.full(len(places), len(order))
        while (low < high).any():
            middle = (low + high) // 2
            theirs = self._keys(order[np.minimum(middle, len(order) - 1)])
            at = (theirs != keys).argmax(axis=1)[:, None]
            differing = [np.take_along_axis(each, at, axis=1)[:, 0] for each in (theirs, keys)]
            is_less = (differing[0] < differing[1]) & (low < high)
            high = np.where(is_less | (low >= high), high, middle)
            low = np.where(is_less, middle + 1, low)
        self._orders[group] = np.insert(order, low, places)

    def _keys(self, places: Ints) -> Ints:
        """What stands before each place in its text, backwards: [n, max_match]."""
        back = np.arange(1, self.max_match + 1)
        keys = self.pool[np.maximum(places[:, None] - back, 0)]
        inside = np.logical_and.accumulate(keys != SEPARATOR, axis=1)
        return np.where(inside, keys, SEPARATOR)
