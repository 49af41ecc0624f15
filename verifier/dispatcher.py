"""Which graphs exist, and which of them a batch takes. Pure Python: no torch, no device.

The dispatcher is the only source of truth. It is told the mode and the sizes once, yields the list
of what to capture, and afterwards answers for every batch with a runtime mode and a padded shape
that lies in that list. Wrappers obey it (see ``graph.py``).
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

from specdec.verifier.modes import BatchDescriptor, CUDAGraphMode, Downgrade

FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE

# Tokens of prompts for which default graphs of mixed batches have room beside all decode rows, or a
# quarter of the budget where that is more. A pass over more computes for longer than its launches
# take.
DEFAULT_MIXED_PROMPT_TOKENS = 512


def capture_ladder(limit: int) -> list[int]:
    """Sizes 1, 2, 4, 8, 12, 16, 24, 32, then four to the octave, and always ``limit`` itself.

    The padding is at most 3 up to 8, at most half of the batch up to 32 and a quarter beyond: few
    rows are bound by the weights read, where a padding row is nearly free; many are not.
    """
    sizes = [size for size in (1, 2, 4, 8, 12, 16, 24) if size < limit]
    octave = 32
    while octave < limit:
        sizes += [size for size in range(octave, 2 * octave, octave // 4) if size < limit]
        octave *= 2
    return [*sizes, limit]


def round_counts(counts: Sequence[int]) -> list[int]:
    """Of ascending request counts, those that 1, 2, 4, 8, ... take, and the last.

    A graph of several rounds takes their number times the memory and capture time of one, and pays
    where a step is short: at few requests, where a padding row costs next to nothing.
    """
    powers = (1 << exponent for exponent in range(counts[-1].bit_length()))
    return sorted({counts[bisect_left(counts, power)] for power in powers} | {counts[-1]})


class CudagraphDispatcher:
    """Owns the keys of all graphs of one engine, or of one drafter.

    FULL keys are exact in all four fields of ``BatchDescriptor``; uniform keys of several query
    lengths live side by side. PIECEWISE keys stand for (num_tokens, has_lora) alone.
    """

    def __init__(self, *, max_num_seqs: int) -> None:
        if max_num_seqs < 1:
            raise ValueError(f"max_num_seqs must be at least 1, not {max_num_seqs}")
        self.max_num_seqs = max_num_seqs
        self.mode = NONE
        # Ascending request counts of the uniform FULL keys, per (query_len, has_lora, rounds).
        self._uniform_counts: dict[tuple[int, bool, int], list[int]] = {}
        # Ascending token counts of the keys for all other batches, per (mode, has_lora).
        self._mixed_sizes: dict[tuple[CUDAGraphMode, bool], list[int]] = {}
        self._removed: dict[tuple[CUDAGraphMode, BatchDescriptor, int], str] = {}
        self._downgrade: Downgrade | None = None

    def initialize_cudagraph_keys(
        self,
        mode: CUDAGraphMode,
        capture_sizes: Sequence[int] | None = None,
        uniform_query_lens: Sequence[int] = (1,),
        lora: bool = False,
        uniform_request_counts: Sequence[int] | None = None,
        max_num_batched_tokens: int | None = None,
        rounds: Sequence[int] = (),
        downgrade: Downgrade | None = None,
    ) -> None:
        """Replaces all keys by those of ``mode``, which must be resolved already.

        capture_sizes: tokens (the engine's ``cudagraph_capture_sizes``). Mixed batches take them
            as they are; for each uniform query length each is rounded up to a multiple of it, and
            sizes of more than ``max_num_seqs`` requests are left to the others.
        uniform_query_lens: ``1 + k`` for each allowed ``k``.
        lora: keys with ``has_lora`` too, next to the base keys.
        uniform_request_counts: sets the grid of uniform keys directly.
        max_num_batched_tokens: no mixed batch is larger; bounds the default mixed sizes.
        rounds: numbers of rounds above 1 that uniform batches have graphs of, beside those of one
            round; at request counts of ``round_counts``.
        downgrade: from what was asked for to ``mode`` and these lengths, for ``explain``.

        Raises ``ValueError`` where a list lacks the widest uniform shape (``max_num_seqs``
        requests), naming the field and the list to use: a list is never cut or completed silently.
        """
        sizes = _checked("cudagraph_capture_sizes", capture_sizes)
        counts = _checked("uniform_request_counts", uniform_request_counts)
        query_lens = _checked("uniform_query_lens", uniform_query_lens) or []
        rounds = _checked("rounds", rounds or None) or []
        if 1 in rounds:
            raise ValueError(f"rounds must be above 1, not {rounds}: graphs of one always exist")
        if max_num_batched_tokens is not None and max_num_batched_tokens < 1:
            raise ValueError(f"max_num_batched_tokens must be >= 1, not {max_num_batched_tokens}")

        adapters = (False, True) if lora else (False,)
        uniform_counts: dict[tuple[int, bool, int], list[int]] = {}
        if mode.decode_mode() is FULL:
            grid = self._uniform_grid(sizes, counts, query_lens)
            for has_lora in adapters:
                for query_len in query_lens:
                    uniform_counts[query_len, has_lora, 1] = list(grid[query_len])
                    for each in rounds:
                        few = round_counts(grid[query_len])
                        uniform_counts[query_len, has_lora, each] = few
        mixed_sizes: dict[tuple[CUDAGraphMode, bool], list[int]] = {}
        if mode.mixed_mode() is not NONE:
            if sizes is None:
                budget = max_num_batched_tokens or 0
                room = max(DEFAULT_MIXED_PROMPT_TOKENS, budget // 4)
                largest = self.max_num_seqs * max(query_lens, default=1) + room
                sizes = capture_ladder(min(largest, budget or largest))
            for has_lora in adapters:
                mixed_sizes[mode.mixed_mode(), has_lora] = list(sizes)

        self.mode = mode
        self._uniform_counts = uniform_counts
        self._mixed_sizes = mixed_sizes
        self._removed = {}
        self._downgrade = downgrade

    @property
    def largest_mixed(self) -> int | None:
        """Tokens of the largest graph that holds batches of any kind; None where there is none."""
        return max((sizes[-1] for sizes in self._mixed_sizes.values() if sizes), default=None)

    def dispatch(
        self, batch: BatchDescriptor, *, allow_full: bool = True, rounds: int = 1
    ) -> tuple[CUDAGraphMode, BatchDescriptor]:
        """The runtime mode of ``batch`` and the shape to pad it to.

        FULL > PIECEWISE > NONE, each padded to the smallest key that fits: a padded FULL beats an
        exact PIECEWISE. Whether a batch is uniform is the caller's word, never a guess from the
        shape: prompts of exactly ``1 + k`` tokens come with ``uniform=False``. The query length of
        a uniform batch never changes. A uniform batch without a uniform key may ride in a graph for
        mixed batches, whose descriptor says ``uniform=False``. With NONE the batch comes back as it
        is; with PIECEWISE only its tokens are padded. ``allow_full=False`` is for a batch whose
        attention cannot lie in a graph. Several ``rounds`` are FULL and uniform, or else NONE: the
        batch then takes one. Why a batch got no FULL graph is told by ``explain``.
        """
        self._check_batch(batch)
        if allow_full and batch.num_reqs <= self.max_num_seqs:
            if batch.uniform:
                counts = self._uniform_counts.get((batch.query_len, batch.has_lora, rounds), [])
                num_reqs = _smallest_that_fits(counts, batch.num_reqs)
                if num_reqs is not None:
                    num_tokens = num_reqs * batch.query_len
                    return FULL, BatchDescriptor(num_tokens, num_reqs, True, batch.has_lora)
            if rounds > 1:
                return NONE, batch
            size = self._smallest_mixed(FULL, batch)
            if size is not None:
                return FULL, self._mixed_key(size, batch.has_lora)
        size = self._smallest_mixed(PIECEWISE, batch)
        if size is not None and rounds == 1:
            return PIECEWISE, BatchDescriptor(size, batch.num_reqs, False, batch.has_lora)
        return NONE, batch

    def explain(
        self,
        batch: BatchDescriptor,
        *,
        allow_full: bool = True,
        rounds: int = 1,
        forbidden: str = "a property of the batch forbids FULL",
    ) -> str | None:
        """Why ``dispatch`` gives ``batch`` no FULL graph, in one line; None where it does.

        Where it gives no graph at all under a mode with PIECEWISE, why not that one either.
        ``forbidden`` says what ``allow_full=False`` stands for.
        """
        served = self.dispatch(batch, allow_full=allow_full, rounds=rounds)[0]
        if served is FULL:
            return None
        if not allow_full and self.dispatch(batch, rounds=rounds)[0] is FULL:
            why = forbidden
        else:
            why = self._why_not_full(batch, rounds)
        if rounds == 1 and served is NONE and self.mode.has_piecewise_cudagraphs():
            why += f"; {self._why_not_mixed(PIECEWISE, batch)}"
        return why

    def _why_not_full(self, batch: BatchDescriptor, rounds: int) -> str:
        if not self.mode.has_full_cudagraphs():
            return f"cudagraph_mode is {self.mode}{self._in_place_of()}"
        if batch.num_reqs > self.max_num_seqs:
            return f"{batch.num_reqs} requests are more than max_num_seqs {self.max_num_seqs}"
        in_mixed = self.mode.mixed_mode() is FULL
        if not batch.uniform and not in_mixed:
            only = f"cudagraph_mode {self.mode} has FULL graphs of uniform batches only"
            return only + self._in_place_of()
        removed = self._why_removed(FULL, batch, rounds)
        if removed is not None:
            return removed
        if rounds > 1:
            return f"no graph of {rounds} rounds holds such a batch"
        reasons = []
        if batch.uniform:
            adapted = " with adapters" if batch.has_lora else ""
            why = self._downgrade and self._downgrade.reasons.get(batch.query_len)
            lacking = f"no FULL graph{adapted} has query length {batch.query_len}"
            reasons.append(f"{lacking} ({why})" if why else lacking)
        if in_mixed:
            reasons.append(self._why_not_mixed(FULL, batch))
        return "; ".join(reasons)

    def _why_not_mixed(self, mode: CUDAGraphMode, batch: BatchDescriptor) -> str:
        """Why no graph of ``mode`` for batches of any kind holds this one."""
        removed = self._why_removed(mode, batch, 1)
        if removed is not None:
            return removed
        sizes = self._mixed_sizes.get((mode, batch.has_lora), [])
        adapted = " with adapters" if batch.has_lora else ""
        if not sizes:
            return f"there is no {mode} graph{adapted}"
        return (
            f"{batch.num_tokens} tokens are more than the largest {mode} graph{adapted} holds, "
            f"{sizes[-1]}"
        )

    def _why_removed(self, mode: CUDAGraphMode, batch: BatchDescriptor, rounds: int) -> str | None:
        """Why a key that would hold the batch is gone."""
        for (of_mode, key, of_rounds), why in self._removed.items():
            if (
                (of_mode, of_rounds) == (mode, rounds)
                and key.has_lora == batch.has_lora
                and self._fits(batch, key)
            ):
                return why
        return None

    def _in_place_of(self) -> str:
        """The mode that was asked for, where it is another, and why it is not served."""
        if self._downgrade is None or self._downgrade.asked is self.mode:
            return ""
        why = ", ".join(dict.fromkeys(self._downgrade.reasons.values()))
        return f" where {self._downgrade.asked} was asked for ({why})"

    @property
    def rounds(self) -> list[int]:
        """The numbers of rounds, above 1, that some batch has a graph of."""
        return sorted(
            {each for (_, _, each), counts in self._uniform_counts.items() if counts} - {1}
        )

    def capture_list(self, rounds: int = 1) -> list[tuple[CUDAGraphMode, BatchDescriptor]]:
        """Every key of ``rounds`` rounds, in capture order: PIECEWISE before FULL, largest first.

        A PIECEWISE key comes with the number of requests to run it with, as many as fit.
        """
        keys = [
            (mode, self._mixed_key(num_tokens, has_lora))
            for (mode, has_lora), sizes in self._mixed_sizes.items()
            for num_tokens in sizes
            if rounds == 1
        ]
        keys += [
            (FULL, BatchDescriptor(num_reqs * query_len, num_reqs, True, has_lora))
            for (query_len, has_lora, each), counts in self._uniform_counts.items()
            for num_reqs in counts
            if each == rounds
        ]
        return sorted(keys, key=lambda item: (item[0] is FULL, *(-field for field in item[1])))

    def remove_key(
        self, mode: CUDAGraphMode, key: BatchDescriptor, reason: str, rounds: int = 1
    ) -> None:
        """Takes one key away, as where its capture failed; batches then take the next that fits.

        ``explain`` gives ``reason`` for a batch that it leaves without such a graph. Raises
        ``KeyError`` if there is no such key.
        """
        if (mode, key) not in self.capture_list(rounds):
            raise KeyError(f"no {mode} graph for {key}")
        if key.uniform:
            self._uniform_counts[key.query_len, key.has_lora, rounds].remove(key.num_reqs)
        else:
            self._mixed_sizes[mode, key.has_lora].remove(key.num_tokens)
        self._removed[mode, key, rounds] = reason

    def add_lora_keys(self) -> None:
        """Gives every key a twin with ``has_lora``, for adapters that come later.

        The same as ``initialize_cudagraph_keys(lora=True)`` does.
        """
        for (query_len, has_lora, rounds), counts in list(self._uniform_counts.items()):
            if not has_lora:
                self._uniform_counts[query_len, True, rounds] = list(counts)
        for (mode, has_lora), sizes in list(self._mixed_sizes.items()):
            if not has_lora:
                self._mixed_sizes[mode, True] = list(sizes)

    def restore_key(self, mode: CUDAGraphMode, key: BatchDescriptor, rounds: int = 1) -> None:
        """Gives back a key that ``remove_key`` took. Raises ``KeyError`` if it took none such."""
        del self._removed[mode, key, rounds]
        if key.uniform:
            insort(self._uniform_counts[key.query_len, key.has_lora, rounds], key.num_reqs)
        else:
            insort(self._mixed_sizes[mode, key.has_lora], key.num_tokens)

    def _uniform_grid(
        self, sizes: list[int] | None, counts: list[int] | None, query_lens: list[int]
    ) -> dict[int, list[int]]:
        """Request counts per query length, always with ``max_num_seqs`` among them."""
        limit = self.max_num_seqs
        if counts is not None:
            if counts[-1] != limit:
                fitting = sorted({*(count for count in counts if count < limit), limit})
                raise ValueError(
                    f"uniform_request_counts {counts} must end at max_num_seqs, {limit}; "
                    f"use {fitting}"
                )
            return dict.fromkeys(query_lens, counts)
        if sizes is None:
            return dict.fromkeys(query_lens, capture_ladder(limit))

        grid = {}
        for query_len in query_lens:
            rounded = {-(-size // query_len) for size in sizes}
            grid[query_len] = sorted(count for count in rounded if count <= limit)
        missing = [q for q in query_lens if limit not in grid[q]]
        if missing:
            usable = sorted({*sizes, *(limit * query_len for query_len in missing)})
            raise ValueError(
                f"cudagraph_capture_sizes {sizes} lacks the widest batch, max_num_seqs={limit} "
                f"requests, at query length {', '.join(map(str, missing))}; use {usable}"
            )
        return grid

    def _mixed_key(self, num_tokens: int, has_lora: bool) -> BatchDescriptor:
        """A mixed graph has room for every request its tokens allow; spare ones have length 0."""
        return BatchDescriptor(num_tokens, min(num_tokens, self.max_num_seqs), False, has_lora)

    def _smallest_mixed(self, mode: CUDAGraphMode, batch: BatchDescriptor) -> int | None:
        sizes = self._mixed_sizes.get((mode, batch.has_lora), [])
        return _smallest_that_fits(sizes, batch.num_tokens)

    def _fits(self, batch: BatchDescriptor, key: BatchDescriptor) -> bool:
        if key.uniform and (not batch.uniform or batch.query_len != key.query_len):
            return False
        return batch.num_tokens <= key.num_tokens and batch.num_reqs <= key.num_reqs

    @staticmethod
    def _check_batch(batch: BatchDescriptor) -> None:
        if not 1 <= batch.num_reqs <= batch.num_tokens:
            raise ValueError(f"a batch has at least one token for each request, not {batch}")
        if batch.uniform and batch.num_tokens % batch.num_reqs:
            raise ValueError(f"a uniform batch has equal query lengths, not {batch}")


def _checked(name: str, values: Iterable[int] | None) -> list[int] | None:
    """``values`` ascending and without repeats; ``ValueError`` unless they are positive ints."""
    if values is None:
        return None
    values = list(values)
    if not values or any(type(value) is not int or value < 1 for value in values):
        raise ValueError(f"{name} must be a list of positive integers, not {values}")
    return sorted(set(values))


def _smallest_that_fits(ascending: list[int], needed: int) -> int | None:
    index = bisect_left(ascending, needed)
    return ascending[index] if index < len(ascending) else None
