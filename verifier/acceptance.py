"""The acceptance rule: which drafts stay, and the target's own token after them.

Shape letters: R requests, Q = 1 + k query length, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.kernels.sampler import SamplingRows, kept_weights, probabilities, scaled_logits
from specdec.verifier.processors import RuleRows, apply_masks, apply_rules
from specdec.verifier.sampling import accept_uniform, coupled_tokens, recover_noise

PLACEHOLDER_TOKEN_ID = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Acceptance:
    tokens: Tensor  # [R, Q] int64: accepted drafts, then one token of the target's, then -1
    num_accepted: Tensor  # [R] int64
    failed: Tensor  # [R] bool: the logits after the accepted run are not finite; no token follows


def accept_greedy(
    targets: Tensor,
    finite: Tensor,
    draft_ids: Tensor,
    num_drafted: Tensor,
    simulated: Tensor | None = None,
) -> Acceptance:
    """Keep the drafts up to the first that is not the target's own choice.

    Args:
        targets: [R, Q] int64, the target's choice after j drafts.
        finite: [R, Q] bool, whether the logits of that choice are sound; a draft is kept only where
            they are.
        draft_ids: [R, Q - 1] int64; entries at or past ``num_drafted`` are ignored.
        num_drafted: [R] int64.
        simulated: [R, Q - 1] bool: which drafts pass, instead of the comparison.
    """
    agrees = draft_ids == targets[:, :-1] if simulated is None else simulated
    num_accepted = _num_accepted(agrees, finite, num_drafted)
    own = targets.gather(1, num_accepted[:, None])[:, 0]
    # An accepted draft is the target's choice, and one that was drawn to pass reads as it.
    return _acceptance(targets[:, :-1], num_accepted, own, finite)


def _num_accepted(agrees: Tensor, finite: Tensor, num_drafted: Tensor) -> Tensor:
    """[R] int64: how many leading drafts are there and pass ``agrees`` [R, Q - 1]."""
    steps = torch.arange(agrees.shape[1], device=agrees.device)
    agrees = agrees & finite[:, :-1] & (steps < num_drafted[:, None])
    return agrees.long().cumprod(1).sum(1)


def _acceptance(draft_ids: Tensor, num_accepted: Tensor, own: Tensor, finite: Tensor) -> Acceptance:
    """The first ``num_accepted`` drafts, then the target's own token ``own`` [R]."""
    steps = torch.arange(finite.shape[1], device=finite.device)
    last = num_accepted[:, None]
    padded = torch.nn.functional.pad(draft_ids, (0, 1))
    tokens = padded.where(steps < last, own[:, None]).where(steps <= last, PLACEHOLDER_TOKEN_ID)
    failed = ~finite.gather(1, last)[:, 0]
    return Acceptance(tokens=tokens, num_accepted=num_accepted, failed=failed)


def accept(
    logits: Tensor,
    draft_ids: Tensor,
    num_drafted: Tensor,
    draft_probs: Tensor | None = None,
    rows: SamplingRows | None = None,
    rules: RuleRows | None = None,
    allowed: Tensor | None = None,
    simulated: Tensor | None = None,
) -> Acceptance:
    """Keep the longest valid prefix of the drafts and add one token of the target's own.

    Greedy rows accept a draft that is the target's argmax. Coupled rows accept a draft that is the
    target's Gumbel-max sample under noise that depends on (seed, output index, token id) only, so
    that the text does not depend on the drafts. The other rows follow speculative sampling
    (Leviathan et al. 2023, Chen et al. 2023): accept with probability min(1, p/q), then sample
    from the normalised positive part of p - q; a draft without probabilities counts as one-hot.

    Args:
        logits: [R, Q, V] float32 of the target; row j follows j drafts.
        draft_ids: [R, Q - 1] int64; entries at or past ``num_drafted`` are ignored.
        num_drafted: [R] int64.
        draft_probs: [R, Q - 1, V] float32, the distributions that the drafts were sampled from.
        rows: sampling parameters; None means that every row is greedy.
        rules: penalties, biases and bans, applied to every row with its own prefix; None for none.
        allowed: [R, Q, ceil(V / 32)] int32 bit masks of the tokens that may stand at each row.
        simulated: [R, Q - 1] bool: which drafts pass, instead of every comparison above.
    """
    if rules is not None:
        logits = apply_rules(logits, draft_ids, rules)
    if allowed is not None:
        logits = apply_masks(logits, allowed)
    if rows is not None and logits.is_cuda:
        from specdec.kernels import accept_sampled_triton

        tokens, num_accepted, failed = accept_sampled_triton.accept(
            logits, draft_ids, num_drafted, draft_probs, rows, simulated
        )
        return Acceptance(tokens=tokens, num_accepted=num_accepted, failed=failed)
    # NaN and +inf reach the maximum; rules that ban every token leave none to choose.
    finite = logits.amax(-1).isfinite()  # [R, Q]
    targets = logits.argmax(-1)  # [R, Q]
    if rows is None:
        return accept_greedy(targets, finite, draft_ids, num_drafted, simulated)
    scaled = scaled_logits(logits, rows)
    weights = kept_weights(logits, scaled, rows)
    scores = scaled.where(weights > 0, -torch.inf)
    targets = torch.where(rows.greedy[:, None], targets, coupled_tokens(scores, rows))
    probs = probabilities(weights)
    by_rejection = ~rows.greedy & ~rows.coupled
    passes = _passes_rejection(probs, draft_ids, draft_probs, rows)
    agrees = torch.where(by_rejection[:, None], passes, draft_ids == targets[:, :-1])
    agrees = agrees if simulated is None else simulated
    num_accepted = _num_accepted(agrees, finite, num_drafted)
    own = targets.gather(1, num_accepted[:, None])[:, 0]
    recovered = _recovered_tokens(probs, draft_ids, num_drafted, draft_probs, num_accepted, rows)
    return _acceptance(draft_ids, num_accepted, torch.where(by_rejection, recovered, own), finite)


def _passes_rejection(
    target_probs: Tensor, draft_ids: Tensor, draft_probs: Tensor | None, rows: SamplingRows
) -> Tensor:
    """[R, Q - 1] bool: u * q(draft) < p(draft). A q that is not finite fails."""
    ids = draft_ids.clamp_min(0)[..., None]
    target = target_probs[:, :-1].gather(2, ids)[..., 0]
    uniform = accept_uniform(rows, draft_ids.shape[1])
    if draft_probs is None:
        return uniform < target
    return uniform * draft_probs.gather(2, ids)[..., 0] < target


def _recovered_tokens(
    target_probs: Tensor,
    draft_ids: Tensor,
    num_drafted: Tensor,
    draft_probs: Tensor | None,
    num_accepted: Tensor,
    rows: SamplingRows,
) -> Tensor:
    """[R] int64: a sample of (p - q)+ where a draft was rejected, of p after the last draft."""
    vocab_size = target_probs.shape[2]
    probs = target_probs.gather(1, num_accepted[:, None, None].expand(-1, 1, vocab_size))[:, 0]
    if draft_ids.shape[1]:
        at = num_accepted.clamp_max(draft_ids.shape[1] - 1)[:, None]
        if draft_probs is None:
            ids = draft_ids.gather(1, at).clamp_min(0)
            proposal = torch.zeros_like(probs).scatter_(1, ids, 1.0)
        else:
            proposal = draft_probs.gather(1, at[..., None].expand(-1, 1, vocab_size))[:, 0]
            proposal = torch.nan_to_num(proposal, nan=0.0, posinf=0.0, neginf=0.0)
        rejected = (num_accepted < num_drafted)[:, None]
        residual = (probs - proposal.where(rejected, 0.0)).clamp_min(0.0)
        # Rounding alone can leave nothing of p - q where the two are equal: then p is the residual.
        probs = residual.where(residual.sum(-1, keepdim=True) > 0, probs)
    return (probs.log() + recover_noise(rows, num_accepted, vocab_size)).argmax(-1)
