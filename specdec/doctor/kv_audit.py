"""Is the draft KV that the engine calls valid what the draft model computes for that text?"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec.doctor.forced import BLOCK_SIZE, forced_pass
from specdec.doctor.inside import running, step_of
from specdec.drafters.base import Drafter
from specdec.drafters.combined import CombinedDrafter
from specdec.drafters.draft_model import FIRST_PASS_LEN, DraftModelDrafter
from specdec.engine import Engine
from specdec.verifier.kv_cache import KVCache
from specdec.verifier.models.base import LanguageModel

# A key or value of another token or another context differs by about its own size; rounding in the
# order of sums does not come near these shares of it.
TOLERANCE = {torch.float32: 1e-2, torch.float16: 0.2, torch.bfloat16: 0.2}


@dataclass(frozen=True, slots=True)
class StaleKV:
    """A position that is called valid and is not."""

    prompt: int  # number of the request, in the order of arrival
    position: int
    prompt_tokens: int
    valid_to: int  # positions that the engine calls valid
    layer: int
    error: float  # relative, of the key or value

    def __str__(self) -> str:
        where = "in the prompt" if self.position < self.prompt_tokens else "in the output"
        return (
            f"the draft KV of prompt {self.prompt} is stale at position {self.position} ({where}; "
            f"called valid up to {self.valid_to}), from layer {self.layer} on, by "
            f"{self.error:.0%} of its size"
        )


@dataclass(slots=True)
class KVAudit:
    """Compares one row of the draft cache after every step, in turn, and every row's length."""

    model: LanguageModel
    cache: KVCache
    checked: int = 0  # positions compared
    lagging: int = 0  # rows that could not be drafted because too much of their KV was missing
    stale: StaleKV | None = None  # the first found
    _turn: int = 0
    _seen: dict[int, int] = field(default_factory=dict)

    def after_step(self, engine: Engine, first_arrival: int) -> None:
        """Look at the device as the last launch left it; waits for it."""
        rows = [r for r in running(engine) if r.is_prefilled and r.output_ids]
        if not rows or self.stale is not None:
            return
        state = step_of(engine).state
        lengths = {r: (int(state.seq_len[r.row]), int(state.draft_len[r.row])) for r in rows}
        self.lagging += sum(
            draft_len < length - FIRST_PASS_LEN for length, draft_len in lengths.values()
        )
        request = rows[self._turn % len(rows)]
        self._turn += 1
        length, valid = lengths[request]
        valid = min(valid, length, self.model.config.max_position_embeddings)
        if valid == 0 or self._seen.get(request.arrival) == valid:
            return
        self._seen[request.arrival] = valid
        ids = state.tokens[request.row, :valid].tolist()
        _, fresh = forced_pass(self.model, ids)
        table = state.block_table[request.row].long()
        found = first_stale(self.cache, table, fresh, valid, TOLERANCE[self.model.dtype])
        self.checked += valid
        if found is not None:
            position, layer, error = found
            self.stale = StaleKV(
                prompt=request.arrival - first_arrival,
                position=position,
                prompt_tokens=len(request.prompt_ids),
                valid_to=valid,
                layer=layer,
                error=error,
            )


def audit_of(engine: Engine) -> KVAudit | None:
    """An audit of the engine's drafter; None where it keeps no KV that this can read."""
    drafter: Drafter | None = step_of(engine).drafter
    if isinstance(drafter, CombinedDrafter):
        drafter = drafter.second
    if not isinstance(drafter, DraftModelDrafter) or drafter.uses_adapters:
        return None
    assert drafter.kv_cache is not None
    return KVAudit(drafter.model, drafter.kv_cache)


@torch.inference_mode()
def first_stale(
    cache: KVCache, table: Tensor, fresh: KVCache, valid: int, tolerance: float
) -> tuple[int, int, float] | None:
    """The first of ``valid`` positions whose keys or values are not those of ``fresh``, which holds
    them in order: position, first layer, relative error there. ``table`` [W] int64: the blocks.
    """
    at = torch.arange(valid, device=table.device)
    block, offset = table[at // cache.block_size], at % cache.block_size
    ours = cache.data[:, :, block, offset].float()  # [2, layers, valid, heads, size]
    theirs = fresh.data[:, :, at // BLOCK_SIZE, at % BLOCK_SIZE].float()
    distance = (ours - theirs).flatten(3).norm(dim=-1)
    size = theirs.flatten(3).norm(dim=-1)
    # [layers, valid]; what is not a number is as wrong as can be
    error = (distance / size.clamp_min(1e-6)).amax(0).nan_to_num(torch.inf)
    wrong = error > tolerance
    if not bool(wrong.any()):
        return None
    position = int(wrong.any(0).float().argmax())
    layer = int(wrong[:, position].float().argmax())
    return position, layer, float(error[layer, position])
