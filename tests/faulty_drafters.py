"""Drafters with one planted fault each; none of them changes a text."""

import torch

from specdec.drafters.base import Draft, Drafter
from specdec.drafters.draft_model import DraftModelDrafter
from specdec.drafters.ngram import NgramDrafter
from specdec.verifier.context import get_forward_context
from specdec.verifier.modes import CUDAGraphMode


class UnreadPrompt(DraftModelDrafter):
    """Calls the prompt read without reading it, as after a prefix hit of the target's alone."""

    def prefill(self, batch):
        batch.rows.state.draft_len[batch.rows.slots] = batch.ends


class OldKeys(DraftModelDrafter):
    """Leaves another position's keys behind, some way back in what it calls valid."""

    def advance(self, state, num_accepted):
        super().advance(state, num_accepted)
        size = state.state.block_size
        valid = state.state.draft_len[state.slots]

        def slot(back):
            at = (valid - back).clamp_min(0)
            return (
                state.block_table.gather(1, (at // size)[:, None])[:, 0].long() * size + at % size
            )

        keys = self.kv_cache.keys.flatten(1, 2)
        keys[:, slot(4)] = keys[:, slot(7)]


class Wrapped(Drafter):
    """Hands all on to another drafter, of which nobody outside can tell."""

    name = "wrapped"
    catchup_width = 16

    def __init__(self, inner):
        self.inner = inner
        self.capturable = inner.capturable
        self.max_model_len = inner.max_model_len
        for name in ("propose", "prefill", "advance", "catch_up", "bytes_per_block", "attach"):
            setattr(self, name, getattr(inner, name))


class OnlyEager(NgramDrafter):
    """Right on the host; in a graph it proposes the token after the right one."""

    def propose(self, state, k):
        draft = super().propose(state, k)
        try:
            mode = get_forward_context().cudagraph_runtime_mode
        except RuntimeError:
            return draft
        if mode is not CUDAGraphMode.FULL:
            return draft
        return Draft(torch.where(draft.ids >= 0, (draft.ids + 1) % 128, -1))


def generous(rule):
    """An accept rule that lets the first draft pass whatever it is: it changes the text."""

    def accept(targets, finite, draft_ids, num_drafted, *rest):
        fooled = targets.clone()
        width = min(1, draft_ids.shape[1])
        given = draft_ids[:, :width].where(num_drafted[:, None] > 0, targets[:, :width])
        fooled[:, :width] = given
        return rule(fooled, finite, draft_ids, num_drafted, *rest)

    return accept
