"""What an acceptance test says: is the drafter weak, or are the engine or the pairing at fault?"""

from collections.abc import Iterator

from specdec.doctor.acceptance import Acceptance, predict
from specdec.doctor.causes import Cause
from specdec.doctor.report import FAULT, OK, UNSEEN, WARNING, Check
from specdec.tokenizer import Tokenizer

# A drafter that promises less than this against plain decoding is called weak, or costly where
# its first draft is accepted so often.
WORTH = 1.1
GOOD = 0.5


def verdict_checks(
    result: Acceptance,
    causes: list[Cause],
    cost: float | None,
    tokenizer: Tokenizer | None,
) -> Iterator[Check]:
    """
    causes: what was found to lower the acceptance.
    cost: bytes that one draft pass reads, as a share of the target's; None if that is not known.
    """
    if result.failed:
        yield Check(
            name="requests",
            status=FAULT,
            found=f"{result.failed} texts ended with an error: logits that are not finite",
            todo="run the target in a wider dtype",
        )
    yield _target_text(result, tokenizer)
    yield _draft_kv(result)
    for cause in causes:
        yield Check(name=cause.name, status=FAULT, found=cause.found, todo=cause.todo)
    yield _counts(result, causes)
    if result.measured.steps:
        yield _worth(result, cost)


def _target_text(result: Acceptance, tokenizer: Tokenizer | None) -> Check:
    name, other = "target's text", result.other_text
    num_tokens = sum(len(text.token_ids) for text in result.texts if text.adapter is None)
    if other is not None:
        token, choice = (_shown(tokenizer, i) for i in (other.token, other.choice))
        return Check(
            name=name,
            status=FAULT,
            found=f"prompt {other.prompt}, token {other.position}: the engine wrote {token}, the "
            f"target over this text chooses {choice}, by a margin of {other.margin:.3g}",
            todo="run --verify-lossless, and report what it finds",
        )
    if not num_tokens:
        found = "all texts are of adapters, which the target alone is not forced over"
        return Check(name=name, status=UNSEEN, found=found)
    found = f"{num_tokens} tokens are the target's own choices, forced over the text"
    if result.unforced:
        found += f"; {result.unforced} texts of adapters are not looked at"
    return Check(name=name, status=OK, found=found)


def _draft_kv(result: Acceptance) -> Check:
    name, audit = "draft KV", result.audit
    if audit is None:
        found = "the drafter keeps none that can be read from outside, or none at all"
        return Check(name=name, status=UNSEEN, found=found)
    if audit.stale is not None:
        return Check(
            name=name,
            status=FAULT,
            found=str(audit.stale),
            todo="the drafter's prefill, advance or catch_up leaves old keys behind",
        )
    if audit.lagging:
        return Check(
            name=name,
            status=WARNING,
            found=f"{audit.lagging} times a row lacked too much of it to be drafted",
            todo="see max_model_len of the draft, and the drafter's catch_up",
        )
    if not audit.checked:
        return Check(name=name, status=UNSEEN, found="no step left any to compare")
    found = f"{audit.checked} positions called valid are what the draft model computes"
    return Check(name=name, status=OK, found=found)


def _counts(result: Acceptance, causes: list[Cause]) -> Check:
    name, measured, predicted = "acceptance", result.measured, result.predicted
    if not measured.steps:
        found = "no decode step ran: every text ended with its first token"
        return Check(name=name, status=UNSEEN, found=found)
    numbers = (
        f"predicted {predicted.mean:.2f} tokens per step ({result.guesser.how}), "
        f"measured {measured.mean:.2f}"
    )
    wrong = result.unexplained
    if not wrong:
        close = len(result.mismatches)
        found = f"{numbers}: every step is as it should be"
        if close:
            found = f"{numbers}: {close} of {measured.steps} steps differ, all by near ties"
        return Check(name=name, status=OK, found=f"{found}; {measured.steps} steps")
    first = wrong[0]
    step = (
        f"prompt {first.prompt}, the step after {first.measured.committed} tokens: "
        f"{first.measured.accepted} of {first.measured.drafted} accepted, "
        f"{first.expected.accepted} of {first.expected.drafted} expected"
    )
    found = f"{numbers}: {len(wrong)} of {measured.steps} steps differ; first {step}"
    lower = sum(each.measured.accepted < each.expected.accepted for each in wrong)
    undrafted = sum(each.measured.drafted < each.expected.drafted for each in wrong)
    if not lower and not undrafted:
        return Check(
            name=name,
            status=WARNING,
            found=f"{found}; none accepts less",
            todo="the drafter reads more than the text; what it proposes cannot be worked out here",
        )
    named = ", ".join(cause.name for cause in causes)
    if result.audit is not None and result.audit.stale is not None:
        named = ", ".join(filter(None, ["draft KV", named]))
    todo = f"at fault: {named}, as above" if named else "the engine or the drafter is at fault"
    return Check(name=name, status=FAULT, found=found, todo=todo)


def _worth(result: Acceptance, cost: float | None) -> Check:
    name, k = "drafter", result.k
    by_position = ", ".join(f"{rate:.0%}" for rate in result.predicted.by_position)
    found = f"accepted by position {by_position or 'nothing drafted'}"
    if cost is None:
        found += "; what a draft pass costs is not known here"
        cost = 0.0
    worth = {k: result.predicted.mean / (1 + k * cost)}
    if result.guesser.runs_alone:
        for fewer in range(1, k):
            mean = predict(result.texts, result.guesses, fewer).mean
            worth[fewer] = mean / (1 + fewer * cost)
    best = max(worth, key=lambda each: worth[each])
    found += (
        f"; by the bytes that are read, a token takes {1 / worth[k]:.2f} of a plain step at k={k}"
    )
    first = next(iter(result.predicted.by_position), 0.0)
    if worth[best] < WORTH and first >= GOOD:
        return Check(
            name=name,
            status=WARNING,
            found=f"{found}: the drafter is good but costly, each pass reads {cost:.0%} of what "
            "the target's does",
            todo="take a smaller draft model or a head (`specdec train-draft`), or decode with k=0",
        )
    if worth[best] < WORTH:
        return Check(
            name=name,
            status=WARNING,
            found=f"{found}: the drafter is weak for these prompts",
            todo="train one for this model with `specdec train-draft`, or decode with k=0",
        )
    if worth[best] > 1.05 * worth[k]:
        return Check(
            name=name,
            status=WARNING,
            found=f"{found}, {1 / worth[best]:.2f} at k={best}",
            todo=f"take k={best}, or k=auto",
        )
    return Check(name=name, status=OK, found=found)


def _shown(tokenizer: Tokenizer | None, token: int) -> str:
    if tokenizer is None or token >= tokenizer.vocab_size:
        return f"id {token}"
    return f"{tokenizer.strings[token]!r} (id {token})"
