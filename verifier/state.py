"""Per-request state on the device, and the view of it that one batch works on.

Shape letters: S state rows, R requests of the batch, Q query length, L context, W table width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdec.kernels.sampler import SamplingColumns, SamplingFields, SamplingRows
from specdec.verifier.attention.base import PAD_SLOT_ID, AttentionMetadata
from specdec.verifier.processors import (
    MAX_BAD_WORD_LEN,
    MAX_BAD_WORDS,
    MAX_STOP_IDS,
    LogitRules,
    RuleRows,
)

if TYPE_CHECKING:
    from specdec.kernels.pass_triton import StateTensors

_INT_FIELDS = (
    *("seq_len", "end", "k", "prompt_len", "draft_len", "top_k", "seed", "coupled"),
    "logprobs",  # 1 where the request asks for log-probabilities
    "adapter",  # adapter slot; -1 for the base model
)
_FLOAT_FIELDS = ("temperature", "top_p", "min_p")


class DecodeState:
    """Everything about requests that changes from step to step, at fixed addresses.

    A request owns one row from admission to its end. The host writes a row when a request enters
    (and its block table when blocks are added); after that only the step itself changes it, on the
    device. The last row, ``dump_row``, stands for padding: it is empty and stays empty.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        device: torch.device | str,
    ) -> None:
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.device = torch.device(device)
        self.dump_row = max_num_seqs
        rows = max_num_seqs + 1
        width = -(-max_model_len // block_size)
        # One spare column past the context takes the writes of positions that do not exist.
        self.tokens = torch.zeros(rows, max_model_len + 1, dtype=torch.int32, device=device)
        self.block_table = torch.zeros(rows, width, dtype=torch.int32, device=device)
        self.ints = torch.zeros(rows, len(_INT_FIELDS), dtype=torch.int64, device=device)
        self.floats = torch.zeros(rows, len(_FLOAT_FIELDS), dtype=torch.float32, device=device)
        self.column("adapter").fill_(-1)
        self.rules = LogitRules(num_rows=rows, vocab_size=vocab_size, device=self.device)

    def column(self, name: str) -> Tensor:
        """The state of every row for one field, [S]: a view, so writing it writes the state."""
        if name in _INT_FIELDS:
            return self.ints[:, _INT_FIELDS.index(name)]
        return self.floats[:, _FLOAT_FIELDS.index(name)]

    @property
    def sampling_columns(self) -> SamplingColumns:
        return SamplingColumns(*(self.column(name) for name in SamplingColumns._fields))

    @property
    def seq_len(self) -> Tensor:  # [S] int64: committed tokens, prompt included
        return self.column("seq_len")

    @property
    def draft_len(self) -> Tensor:  # [S] int64: positions whose draft KV is valid
        return self.column("draft_len")

    def write_row(
        self, row: int, tokens: list[int], ints: dict[str, int], floats: dict[str, float]
    ) -> None:
        """Install a request: its committed tokens and fields. Fields left out become 0, and the
        adapter none.
        """
        seed = ints.get("seed", 0)
        ints = (
            {"adapter": -1}
            | ints
            | {"seq_len": len(tokens), "seed": seed - 2**64 if seed >= 2**63 else seed}
        )
        self._upload(self.tokens[row, : len(tokens)], tokens)
        self._upload(self.ints[row], [ints.get(name, 0) for name in _INT_FIELDS])
        self._upload(self.floats[row], [floats.get(name, 0.0) for name in _FLOAT_FIELDS])

    def write_rules(
        self,
        row: int,
        *,
        bias: dict[int, float],
        penalties: list[float],
        min_tokens: int,
        stop_ids: list[int],
        bad_words: list[list[int]],
    ) -> None:
        """Install a request's rules; ``penalties``: presence, frequency, log of repetition."""
        rules = self.rules
        rules.bias[row].zero_()
        if bias:
            index = torch.empty(len(bias), dtype=torch.int64, device=self.device)
            self._upload(index, list(bias))
            values = torch.empty(len(bias), dtype=torch.float32, device=self.device)
            self._upload(values, list(bias.values()))
            rules.bias[row].index_copy_(0, index, values)
        self._upload(rules.penalties[row], penalties)
        self._upload(rules.min_tokens[row : row + 1], [min_tokens])
        self._upload(rules.stop_ids[row], stop_ids + [-1] * (MAX_STOP_IDS - len(stop_ids)))
        words = [[-1] * (MAX_BAD_WORD_LEN - len(word)) + word for word in bad_words]
        empty = [-1] * MAX_BAD_WORD_LEN
        self._upload(rules.bad_words[row], words + [empty] * (MAX_BAD_WORDS - len(words)))

    def write_blocks(self, entries: Sequence[tuple[int, int, list[int]]]) -> None:
        """Append blocks to tables: for each (row, first, blocks), from column ``first`` on."""
        places = [
            (row, column, block)
            for row, first, blocks in entries
            for column, block in enumerate(blocks, first)
        ]
        # One copy for all of them.
        index = torch.empty(len(places), 3, dtype=torch.int64, device=self.device)
        self._upload(index, places)
        rows, columns, blocks = index.unbind(1)
        self.block_table[rows, columns] = blocks.int()

    def _upload(self, target: Tensor, values: list) -> None:
        source = torch.tensor(values, dtype=target.dtype)
        if self.device.type == "cuda":
            source = source.pin_memory()
        target.copy_(source, non_blocking=True)


@dataclass(frozen=True)
class RowState:
    """The rows of one uniform batch, as a drafter and the step see them.

    All tensors are on the device. Padding rows are there too, with ``active`` false.
    """

    state: DecodeState
    slots: Tensor  # [R] int64: the state row of each batch row
    sampled: bool = False  # some row has a temperature, a logit rule or asks for logprobs
    has_lora: bool = False  # some row has an adapter

    @cached_property
    def seq_lens(self) -> Tensor:
        """Committed tokens of each row, [R] int64; the last of them has no KV yet."""
        return self.state.seq_len[self.slots]

    @cached_property
    def remaining(self) -> Tensor:
        """Tokens each row may still commit, [R] int64."""
        return self.state.column("end")[self.slots] - self.seq_lens

    @cached_property
    def active(self) -> Tensor:
        """Rows that still write, [R] bool: neither padding nor at their end."""
        return self.remaining > 0

    @cached_property
    def max_drafts(self) -> Tensor:
        """Drafts each row may take, [R] int64: its own k, and one less than it may still write."""
        return torch.minimum(self.state.column("k")[self.slots], self.remaining - 1).clamp_min(0)

    @cached_property
    def last_token(self) -> Tensor:
        """The newest committed token of each row, [R] int64."""
        return self.tokens_at(self.seq_lens[:, None] - 1)[:, 0]

    @property
    def tokens(self) -> Tensor:
        """Prompt and output so far, [R, L] int32; entries at or past ``seq_lens`` are undefined."""
        return self.state.tokens[self.slots, : self.state.max_model_len]

    @cached_property
    def block_table(self) -> Tensor:  # [R, W] int32
        return self.state.block_table[self.slots]

    @property
    def known_block_table(self) -> Tensor | None:
        """``block_table`` if it was gathered already."""
        return self.__dict__.get("block_table")

    def remember(
        self, block_table: Tensor, seq_lens: Tensor, remaining: Tensor, max_drafts: Tensor
    ) -> None:
        """Keep values that a kernel has read, instead of reading them one by one."""
        values = {
            "block_table": block_table,
            "seq_lens": seq_lens,
            "remaining": remaining,
            "max_drafts": max_drafts,
        }
        for name, value in values.items():
            self.__dict__.setdefault(name, value)

    @property
    def simulation_keys(self) -> Tensor:  # [R] int64
        return self.state.column("seed")[self.slots] + self.slots

    @property
    def tensors(self) -> "StateTensors":
        """The same state, as the kernels of a GPU read it."""
        from specdec.kernels.pass_triton import StateTensors

        column = self.state.column
        return StateTensors(
            slots=self.slots,
            tokens=self.state.tokens,
            block_table=self.state.block_table,
            seq_len=self.state.seq_len,
            end=column("end"),
            k=column("k"),
            draft_len=self.state.draft_len,
            seed=column("seed"),
            adapter=column("adapter"),
            stop_ids=self.state.rules.stop_ids,
            block_size=self.state.block_size,
        )

    @cached_property
    def adapter_slots(self) -> Tensor | None:
        """Adapter slot of each row, [R] int64, -1 for none; None where no row has one."""
        return self.state.column("adapter")[self.slots] if self.has_lora else None

    @cached_property
    def sampling(self) -> SamplingRows | None:
        """Sampling parameters of the rows, or None where the whole batch is greedy."""
        if not self.sampled:
            return None
        fields = self._sampling_fields
        return SamplingRows(
            temperature=fields.temperature,
            top_k=fields.top_k,
            top_p=fields.top_p,
            min_p=fields.min_p,
            seed=fields.seed,
            coupled=fields.coupled,
            output_index=fields.output_index,
        )

    @property
    def rules(self) -> RuleRows | None:
        """Logit rules of the rows, or None where the whole batch is greedy without rules."""
        if not self.sampled:
            return None
        return RuleRows(
            rules=self.state.rules,
            slots=self.slots,
            text=self.state.tokens,
            seq_lens=self.seq_lens,
            prompt_lens=self._sampling_fields.prompt_len,
        )

    @property
    def wants_logprobs(self) -> Tensor:  # [R] bool; only of batches that are sampled
        return self._sampling_fields.wants_logprobs

    @cached_property
    def _sampling_fields(self) -> SamplingFields:
        column = self.state.column
        if self.slots.is_cuda:
            from specdec.kernels.sampling_rows_triton import sampling_fields

            return sampling_fields(self.slots, self.state.sampling_columns)
        prompt_len = column("prompt_len")[self.slots]
        return SamplingFields(
            prompt_len=prompt_len,
            output_index=self.seq_lens - prompt_len,
            top_k=column("top_k")[self.slots],
            seed=column("seed")[self.slots],
            coupled=column("coupled")[self.slots] > 0,
            wants_logprobs=column("logprobs")[self.slots] > 0,
            temperature=column("temperature")[self.slots],
            top_p=column("top_p")[self.slots],
            min_p=column("min_p")[self.slots],
        )

    def tokens_at(self, positions: Tensor) -> Tensor:
        """Committed tokens at ``positions`` [R, n], as [R, n] int64; out of range gives any id."""
        clamped = positions.clamp(0, self.state.max_model_len - 1)
        return self.state.tokens[self.slots[:, None], clamped].long()

    def slot_mapping(self, positions: Tensor, valid: Tensor) -> Tensor:
        """KV slots of ``positions`` [R, n] as [R * n] int64; PAD_SLOT_ID where not valid."""
        block_size = self.state.block_size
        column = (positions // block_size).clamp(0, self.block_table.shape[1] - 1)
        block = self.block_table.gather(1, column).long()
        slot = block * block_size + positions % block_size
        return torch.where(valid, slot, PAD_SLOT_ID).flatten()

    def uniform_metadata(
        self, first: Tensor, query_len: int, num_valid: Tensor
    ) -> tuple[Tensor, AttentionMetadata]:
        """Positions and attention metadata of a pass over ``query_len`` tokens of every row.

        Args:
            first: [R] int64, position of each row's first query token (may be negative).
            num_valid: [R] int64, how many of the query tokens exist; the rest write nowhere.

        Returns:
            Positions, [R * query_len] int64 and never negative, and the metadata.
        """
        steps = torch.arange(query_len, device=first.device)
        positions = first[:, None] + steps
        valid = (steps < num_valid[:, None]) & (positions >= 0)
        num_reqs = first.shape[0]
        loc = torch.arange(num_reqs + 1, device=first.device, dtype=torch.int32) * query_len
        metadata = AttentionMetadata(
            query_start_loc=loc,
            context_lens=first.int(),
            seq_lens=(first + num_valid).clamp_min(0).where(num_valid > 0, 0).int(),
            block_table=self.block_table,
            slot_mapping=self.slot_mapping(positions, valid),
            max_query_len=query_len,
            uniform=True,
            adapter_slots=_repeated(self.adapter_slots, query_len),
            state_rows=self.slots,
        )
        return positions.clamp_min(0).flatten(), metadata

    def up_to_stop(self, tokens: Tensor, num_new: Tensor) -> tuple[Tensor, Tensor]:
        """``num_new`` [R] cut behind the first of ``tokens`` [R, Q] that ends its row's text.

        Returns it and which rows have such a token, [R] bool.
        """
        stop_ids = self.state.rules.stop_ids[self.slots]
        steps = torch.arange(tokens.shape[1], device=tokens.device)
        stops = (tokens[..., None] == stop_ids[:, None]).any(-1) & (steps < num_new[:, None])
        before = torch.where(stops, steps, tokens.shape[1]).amin(1)
        return torch.minimum(num_new, before + 1), stops.any(1)

    def commit(self, tokens: Tensor, num_new: Tensor, ended: Tensor) -> None:
        """Append the first ``num_new`` [R] of ``tokens`` [R, Q] to each row, in place.

        Rows that have ``ended`` [R] bool may write nothing more.
        """
        steps = torch.arange(tokens.shape[1], device=tokens.device)
        positions = self.seq_lens[:, None] + steps
        positions = positions.where(steps < num_new[:, None], self.state.max_model_len)
        self.state.tokens[self.slots[:, None], positions] = tokens.int()
        seq_lens = self.seq_lens + num_new
        self.state.seq_len[self.slots] = seq_lens
        end = self.state.column("end")
        end[self.slots] = torch.where(ended, seq_lens, end[self.slots])


def _repeated(values: Tensor | None, times: int) -> Tensor | None:
    """[R] -> [R * times]: each value, ``times`` times."""
    return None if values is None else values[:, None].expand(-1, times).flatten()
