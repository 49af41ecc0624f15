"""A target and a draft model: what of their files must agree, and what should."""

from collections.abc import Iterator, Sequence

from specdec.doctor.checks import TURNS
from specdec.doctor.facts import name_of
from specdec.doctor.plan import Plan
from specdec.doctor.report import FAULT, OK, UNSEEN, WARNING, Check
from specdec.doctor.subject import Subject
from specdec.sources import Source
from specdec.tokenizer import Tokenizer, compare_tokenizers
from specdec.verifier.models.rope import RopeConfig

# What tokenizers of the same vocabulary split in different ways.
PROBES = (
    "The quick brown fox, doesn't it?\n\n1. first\n\t2. second   third",
    "x = {'a': [1, 23, 456, 7890]}  # 3.14159e-10\nif x:\n    return None",
    "né Ünïcödé 漢字かな 한국어 привет مرحبا 😀 👩‍👧 e\u0301",
    " leading and trailing ",
)


def pair_checks(subject: Subject, plan: Plan | None) -> Iterator[Check]:
    """Checks of a draft model beside its target, or which of them a drafter does without.

    ``plan`` is None where the pair cannot be served.
    """
    draft = subject.draft_model
    if draft is None:
        if subject.draft is not None:
            yield Check(name="pairing", status=UNSEEN, found=_no_files(subject))
        return
    target = subject.target
    yield tokenizers_agree(target, draft)
    if target.tokenizer is not None and draft.tokenizer is not None:
        yield _encodings(target.tokenizer, draft.tokenizer)
        yield _special_tokens(target.tokenizer, draft.tokenizer)
        yield _templates(target.tokenizer, draft.tokenizer)
    yield _padding(target, draft)
    yield _rope(target.config.rope, draft.config.rope)
    yield _contexts(target, draft, plan)
    yield _eos(target, draft)
    yield _dtypes(target, draft, plan)


def tokenizers_agree(target: Source, draft: Source) -> Check:
    name = "tokenizers"
    if target.tokenizer is None or draft.tokenizer is None:
        missing = "target" if target.tokenizer is None else "draft"
        return Check(
            name=name,
            status=WARNING,
            found=f"the {missing} has none, so its ids cannot be compared with the other's",
            todo=f"put the tokenizer of the {missing} beside its weights",
        )
    difference = compare_tokenizers(target.tokenizer, draft.tokenizer)
    if difference is None:
        found = f"all {target.tokenizer.vocab_size} ids are the same strings"
        return Check(name=name, status=OK, found=found)
    return Check(
        name=name,
        status=FAULT,
        found=difference,
        todo="take a draft of the target's own family; such a pair is refused",
    )


def _encodings(target: Tokenizer, draft: Tokenizer) -> Check:
    """The same strings may still be split, or turned to bytes, in another way."""
    name = "tokenizer bytes"
    ids = [i for i, string in enumerate(target.strings) if string is not None]
    ids = [i for i in ids if i < len(draft.strings) and draft.strings[i] == target.strings[i]]
    ours, theirs = (_decoded(each, ids) for each in (target, draft))
    for token, our, their in zip(ids, ours, theirs, strict=True):
        if our != their:
            return Check(
                name=name,
                status=WARNING,
                found=f"id {token} is the text {our!r} in the target and {their!r} in the draft",
                todo="take the target's tokenizer.json for both if the draft was trained with it",
            )
    for text in PROBES:
        our_ids, their_ids = target.encode(text, False), draft.encode(text, False)
        if our_ids != their_ids:
            at = first_difference(our_ids, their_ids)
            return Check(
                name=name,
                status=WARNING,
                found=f"{text!r} is split otherwise from token {at} on: "
                f"{_strings(target, our_ids[at : at + 3])} in the target, "
                f"{_strings(draft, their_ids[at : at + 3])} in the draft",
                todo="the draft learnt other splits; compare the two tokenizer.json",
            )
    found = f"{len(ids)} ids give the same bytes, {len(PROBES)} probe texts the same ids"
    return Check(name=name, status=OK, found=found)


def _special_tokens(target: Tokenizer, draft: Tokenizer) -> Check:
    name, ours, theirs = "special tokens", target.special_tokens, draft.special_tokens
    differing = [key for key in sorted({*ours, *theirs}) if ours.get(key) != theirs.get(key)]
    if differing:
        parts = [
            f"{key} is {ours.get(key)!r} in the target and {theirs.get(key)!r} in the draft"
            for key in differing
        ]
        return Check(
            name=name,
            status=WARNING,
            found="; ".join(parts),
            todo="the target's are used; make sure that the draft was trained with them",
        )
    return Check(name=name, status=OK, found=", ".join(sorted(ours)) or "none are named")


def _templates(target: Tokenizer, draft: Tokenizer) -> Check:
    name = "chat templates"
    todo = "prompts follow the target's; a draft trained on another layout accepts less"
    if target.is_chat != draft.is_chat:
        has, lacks = ("target", "draft") if target.is_chat else ("draft", "target")
        found = f"the {has} has one, the {lacks} has none"
        return Check(name=name, status=WARNING, found=found, todo=todo)
    if target.chat_template is None or draft.chat_template is None:
        return Check(name=name, status=OK, found="neither has one")
    if target.chat_template.text == draft.chat_template.text:
        return Check(name=name, status=OK, found="the same")
    try:
        ours, theirs = (
            each.apply_chat_template(TURNS, add_generation_prompt=False) for each in (target, draft)
        )
    except ValueError as error:
        found = f"they differ, and one refuses a plain turn: {error}"
        return Check(name=name, status=WARNING, found=found, todo=todo)
    if ours == theirs:
        found = "the sources differ, what they write for a plain turn does not"
        return Check(name=name, status=OK, found=found)
    at = first_difference(ours, theirs)
    found = (
        f"they differ from character {at} on: {ours[at : at + 20]!r} in the target, "
        f"{theirs[at : at + 20]!r} in the draft"
    )
    return Check(name=name, status=WARNING, found=found, todo=todo)


def _padding(target: Source, draft: Source) -> Check:
    rows = (target.config.vocab_size, draft.config.vocab_size)
    name = "vocabulary padding"
    if rows[0] == rows[1]:
        return Check(name=name, status=OK, found=f"both have {rows[0]} rows")
    if target.tokenizer is None or draft.tokenizer is None:
        return Check(
            name=name,
            status=WARNING,
            found=f"{rows[0]} rows in the target, {rows[1]} in the draft, and no tokenizer tells "
            "which of them are padding",
            todo="add the tokenizers",
        )
    found = f"{rows[0]} rows in the target, {rows[1]} in the draft; what is padding is not drafted"
    return Check(name=name, status=OK, found=found)


def _rope(target: RopeConfig, draft: RopeConfig) -> Check:
    names = ("rope_type", "theta", "factor", "original_max_position", "attention_factor")
    parts = [
        f"{name} {_number(getattr(target, name))} in the target, "
        f"{_number(getattr(draft, name))} in the draft"
        for name in names
        if getattr(target, name) != getattr(draft, name)
    ]
    if not parts:
        return Check(name="rope", status=OK, found=f"both {target.rope_type} {target.theta:g}")
    return Check(
        name="rope",
        status=WARNING,
        found="; ".join(parts),
        todo="right for a draft trained so; for one cut from the target, correct its config.json",
    )


def _contexts(target: Source, draft: Source, plan: Plan | None) -> Check:
    name = "draft context"
    longest = plan.max_model_len if plan is not None else target.config.max_position_embeddings
    reach = draft.config.max_position_embeddings
    if reach >= longest:
        return Check(name=name, status=OK, found=f"{reach} tokens, texts have {longest} at most")
    return Check(
        name=name,
        status=WARNING,
        found=f"the draft reads {reach} tokens, texts may have {longest}",
        todo=f"expect no drafts past {reach} tokens, or lower max_model_len",
    )


def _eos(target: Source, draft: Source) -> Check:
    ours, theirs = set(target.config.eos_token_ids), set(draft.config.eos_token_ids)
    if ours == theirs:
        return Check(name="EOS sets", status=OK, found=f"both {sorted(ours)}")
    return Check(
        name="EOS sets",
        status=WARNING,
        found=f"{sorted(ours)} in the target, {sorted(theirs)} in the draft",
        todo="texts end at the target's; a draft trained to end elsewhere misses the last token",
    )


def _dtypes(target: Source, draft: Source, plan: Plan | None) -> Check:
    stored = [name_of(each.config.dtype) for each in (target, draft)]
    name = "dtypes"
    runs = "" if plan is None else f"run in {name_of(plan.dtype)} and {name_of(plan.draft_dtype)}"
    found = f"checkpoints of {stored[0]} and {stored[1]}"
    found += f"; they {runs}" if runs else ""
    lossy = plan is not None and plan.draft_dtype not in (None, draft.config.dtype)
    narrows = lossy and plan is not None and plan.draft_dtype.itemsize < 4  # type: ignore[union-attr]
    if stored[0] == stored[1] and not narrows:
        return Check(name=name, status=OK, found=found)
    return Check(
        name=name,
        status=WARNING,
        found=found,
        todo="--acceptance runs the draft in float32 too and says what its dtype costs",
    )


def _no_files(subject: Subject) -> str:
    if subject.head is not None:
        return (
            "the head reads the target's own states and tokens: its shapes fit, and no more tells"
        )
    if not isinstance(subject.draft, str):
        return "the drafter is an object: tokenizer, template, rope and dtype are not compared"
    return "the drafter reads the target's own tokens: there is nothing to compare"


def first_difference(ours: Sequence, theirs: Sequence) -> int:
    """Where two sequences that differ do so first; the end of the shorter one counts."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))


def _decoded(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    batch = [[token] for token in ids]
    return list(tokenizer.backend.decode_batch(batch, skip_special_tokens=False))


def _strings(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return repr([tokenizer.strings[i] for i in ids])


def _number(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
