"""One model on its own: what its files promise each other."""

from collections.abc import Iterator
from pathlib import Path

from specdec.doctor.report import FAULT, OK, UNSEEN, WARNING, Check
from specdec.sources import Source
from specdec.tokenizer import Tokenizer
from specdec.verifier.hub import resolve_model
from specdec.verifier.loading import check_weights
from specdec.verifier.made import MadeModel
from specdec.verifier.models.llama import CausalLM

# A turn of each source, to see how a template writes the end of one.
TURNS = (
    {"role": "user", "content": "Is this a question?"},
    {"role": "assistant", "content": "It is."},
)


def model_checks(source: Source, role: str) -> Iterator[Check]:
    """Checks of one model; ``role`` ("target", "draft") is part of their names."""
    yield _weights(source, role)
    yield _context(source, role)
    if source.tokenizer is None:
        yield Check(
            name=f"{role} tokenizer",
            status=WARNING,
            found="the model's files have none: prompts must be token ids, and texts stay empty",
            todo="put tokenizer.json beside the weights",
        )
        return
    yield _rows(source, source.tokenizer, role)
    yield _ends(source, source.tokenizer, role)
    if role == "target":
        yield _template(source.tokenizer)


def _weights(source: Source, role: str) -> Check:
    name = f"{role} weights"
    if isinstance(source.model, CausalLM | MadeModel):
        return Check(name=name, status=OK, found="the model is in memory already")
    # A hub id's weights may be large, and are not fetched to be looked at.
    path = resolve_model(source.model)
    has_weights = path.is_file() or any(path.glob("*.safetensors"))
    is_from_hub = source.model is not None and not Path(source.model).expanduser().exists()
    if not has_weights and is_from_hub:
        return Check(name=name, status=UNSEEN, found="they have not been fetched from the hub yet")
    try:
        check_weights(path, source.config)
    except (ValueError, OSError) as error:
        return Check(
            name=name,
            status=FAULT,
            found=" ".join(str(error).split()),
            todo="fetch the weights anew, or correct config.json",
        )
    found = "all tensors are there, of the shapes that config.json asks for"
    if source.config.implementation != "specdec":
        found = "the files can be read; transformers says the rest when it loads them"
    return Check(name=name, status=OK, found=found)


def _rows(source: Source, tokenizer: Tokenizer, role: str) -> Check:
    """Rows of embedding and head against ids of the tokenizer."""
    rows, ids = source.config.vocab_size, tokenizer.vocab_size
    name = f"{role} vocabulary"
    if ids > rows:
        lost = next(i for i in range(rows, ids) if tokenizer.strings[i] is not None)
        return Check(
            name=name,
            status=FAULT,
            found=f"the tokenizer goes up to id {ids - 1} and the model has {rows} rows: id {lost} "
            f"({tokenizer.strings[lost]!r}) cannot be read",
            todo="take the tokenizer that the weights were saved with",
        )
    padding = f", {rows - ids} rows of padding, which are never emitted" if rows > ids else ""
    return Check(name=name, status=OK, found=f"{ids} ids, {rows} rows{padding}")


def _ends(source: Source, tokenizer: Tokenizer, role: str) -> Check:
    name, ends = f"{role} EOS", source.config.eos_token_ids
    if not ends:
        return Check(
            name=name,
            status=WARNING,
            found="config.json and generation_config.json name no end of sequence",
            todo="set eos_token_id, or every text runs to its limit",
        )
    unknown = [end for end in ends if not 0 <= end < tokenizer.vocab_size]
    if unknown:
        return Check(
            name=name,
            status=FAULT,
            found=f"EOS id {unknown[0]} is not in the vocabulary of {tokenizer.vocab_size}",
            todo="correct eos_token_id",
        )
    turn = turn_end(tokenizer)
    if turn is not None and turn not in ends:
        return Check(
            name=name,
            status=WARNING,
            found=f"the chat template ends a turn with {tokenizer.strings[turn]!r} (id {turn}), "
            f"which is not among the EOS ids {_shown(tokenizer, ends)}",
            todo=f"add {turn} to eos_token_id in generation_config.json",
        )
    if tokenizer.eos_id is not None and tokenizer.eos_id not in ends:
        return Check(
            name=name,
            status=WARNING,
            found=f"the tokenizer's eos_token is {tokenizer.strings[tokenizer.eos_id]!r} (id "
            f"{tokenizer.eos_id}), the model ends at {_shown(tokenizer, ends)}",
            todo="make eos_token_id and eos_token agree",
        )
    return Check(name=name, status=OK, found=_shown(tokenizer, ends))


def turn_end(tokenizer: Tokenizer) -> int | None:
    """The special token that the chat template writes after an answer; None where it has none."""
    if not tokenizer.is_chat:
        return None
    try:
        text = tokenizer.apply_chat_template(TURNS, add_generation_prompt=False)
    except ValueError:
        return None
    answer = TURNS[-1]["content"]
    after = text[text.rfind(answer) + len(answer) :]
    special = [token.content for token in tokenizer.backend.get_added_tokens_decoder().values()]
    first = min((s for s in special if s in after), key=after.find, default=None)
    return None if first is None else tokenizer.backend.token_to_id(first)


def _template(tokenizer: Tokenizer) -> Check:
    name = "chat template"
    if not tokenizer.is_chat:
        found = "none: prompts go in as they are, which is right for a base model"
        return Check(name=name, status=OK, found=found)
    try:
        tokenizer.apply_chat_template(TURNS[:1])
    except ValueError as error:
        return Check(
            name=name,
            status=FAULT,
            found=" ".join(str(error).split()),
            todo="correct chat_template in tokenizer_config.json",
        )
    return Check(name=name, status=OK, found="there, and it takes a user's turn")


def _context(source: Source, role: str) -> Check:
    rope, context = source.config.rope, source.config.max_position_embeddings
    name = f"{role} context"
    found = f"{context} positions; rope {rope.rope_type}, theta {rope.theta:g}"
    if rope.rope_type != "default":
        found += f", factor {rope.factor:g}"
    if rope.original_max_position and context > rope.original_max_position * rope.factor:
        return Check(
            name=name,
            status=WARNING,
            found=f"{found}: more than {rope.original_max_position} x {rope.factor:g}",
            todo=f"stay below {int(rope.original_max_position * rope.factor)} tokens",
        )
    return Check(name=name, status=OK, found=found)


def _shown(tokenizer: Tokenizer, ids: tuple[int, ...]) -> str:
    return ", ".join(f"{tokenizer.strings[i]!r} (id {i})" for i in ids)
