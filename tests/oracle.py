"""What the engine must produce, by slow means: transformers, float32, a full recompute, no cache.

A drafted token is committed only where it equals the target's own next token, so one pass of the
draft over the finished text tells which of its proposals the target would have accepted.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# Below this distance between the two best logits, float32 rounding may pick either token.
CLOSE_CALL = 1e-4


@dataclass(frozen=True, kw_only=True)
class Expected:
    token_ids: list[int]
    finish_reason: str
    drafted: list[int]
    accepted: list[int]
    num_certain: int  # leading tokens that no rounding can change


class Oracle:
    """One checkpoint's greedy choices. ``vocab`` masks the ids from there on."""

    def __init__(
        self, folder: str | Path, *, num_layers: int | None = None, vocab: int | None = None
    ) -> None:
        from transformers import AutoModelForCausalLM

        # PyTorch's own attention has no soft cap.
        attention = {"attn_implementation": "eager"} if _caps_scores(folder) else {}
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **attention)
        self.model.eval()
        if num_layers is not None:
            self.model.model.layers = self.model.model.layers[:num_layers]
        self.vocab = vocab
        self._next: dict[tuple[int, ...], int] = {}

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> Tensor:
        """[len(ids), vocab] float32: row i scores the token after ids[: i + 1]."""
        positions = torch.arange(len(ids))[None]
        out = self.model(torch.tensor([ids]), position_ids=positions, use_cache=False)
        return out.logits[0, :, : self.vocab].float()

    def next_token(self, ids: Sequence[int]) -> int:
        key = tuple(ids)
        if key not in self._next:
            # numpy's argmax gives ties to the lowest id.
            self._next[key] = int(self.logits(ids)[-1].numpy().argmax())
        return self._next[key]

    def choices(self, ids: Sequence[int]) -> tuple[list[int], list[float]]:
        """After each prefix of ``ids``: the greedy token and its margin over the second best."""
        logits = self.logits(ids)
        best = logits.topk(2).values
        return [int(row.argmax()) for row in logits.numpy()], (best[:, 0] - best[:, 1]).tolist()

    def greedy(
        self, prompt: Sequence[int], budget: int, eos: Collection[int] = ()
    ) -> tuple[list[int], str]:
        text: list[int] = []
        while len(text) < budget:
            text.append(self.next_token([*prompt, *text]))
            if text[-1] in eos:
                return text, "stop"
        return text, "length"


def _caps_scores(folder: str | Path) -> bool:
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    return config.get("attn_logit_softcapping") is not None


def speculate(
    target: Oracle,
    draft: Oracle | None,
    prompt: Sequence[int],
    *,
    k: int,
    max_new_tokens: int,
    max_model_len: int = 10**9,
    eos: Collection[int] = (),
) -> Expected:
    """The greedy text of ``target`` and what each decode step drafts and accepts on the way.

    The first token comes from the prefill. A step drafts min(k, remaining - 1) tokens, whatever
    ends it; accepted are the committed tokens that were drafts.
    """
    budget = min(max_new_tokens, max_model_len - len(prompt))
    text, finish_reason = target.greedy(prompt, budget, eos)
    whole = [*prompt, *text]
    start = len(prompt) - 1
    _, margins = target.choices(whole)
    guesses = text
    if draft is not None and k > 0:
        proposals, draft_margins = draft.choices(whole)
        guesses = proposals[start:]
        margins = [min(pair) for pair in zip(margins, draft_margins, strict=True)]
    drafted, accepted, committed = [], [], 1
    while committed < len(text):
        count = 0 if draft is None else min(k, budget - committed - 1)
        ahead = zip(guesses[committed : committed + count], text[committed:], strict=False)
        matches = [guess == token for guess, token in ahead]
        hits = (*matches, False).index(False)
        drafted.append(count)
        accepted.append(hits)
        committed += hits + 1
    close = [margin < CLOSE_CALL for margin in margins[start : start + len(text)]]
    return Expected(
        token_ids=text,
        finish_reason=finish_reason,
        drafted=drafted,
        accepted=accepted,
        num_certain=(*close, True).index(True),
    )


def expect(generation: object, expected: Expected, *, counts: bool = True) -> None:
    """Assert that a Generation is what the oracle says; past a close call nothing is compared."""
    certain = expected.num_certain
    assert generation.token_ids[:certain] == expected.token_ids[:certain]
    if certain < len(expected.token_ids):
        return
    assert generation.token_ids == expected.token_ids
    assert generation.finish_reason == expected.finish_reason
    if counts:
        assert generation.stats.drafted_per_step == expected.drafted
        assert generation.stats.accepted_per_step == expected.accepted
