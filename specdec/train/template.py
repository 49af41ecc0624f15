"""A chat template taken apart, so that the model can write the user's messages as well."""

from collections.abc import Callable
from dataclasses import dataclass

from specdec.tokenizer import Tokenizer

# Words that no template holds and that stay as they are through one.
_USER, _ANSWER, _NEXT = "qzxuserqzx", "qzxanswerqzx", "qzxnextqzx"


@dataclass(frozen=True, slots=True)
class ChatPieces:
    """Token ids between the messages of a conversation.

    Attributes:
        opening: all before the first user message.
        reply: from the end of a user message to the start of the answer.
        again: from the end of an answer to the start of the next user message; None where the
            template allows no second turn.
        user_end: the token that ends a user message that the model writes; None for a model
            without a template, whose "user message" is just the beginning of a text.
    """

    opening: tuple[int, ...]
    reply: tuple[int, ...]
    again: tuple[int, ...] | None
    user_end: int | None


def chat_pieces(tokenizer: Tokenizer | None, bos_token_id: int | None) -> ChatPieces:
    """The pieces of the tokenizer's chat template; plain text from BOS where there is none.

    Raises ValueError where a message does not come through the template as it is.
    """
    if tokenizer is None or not tokenizer.is_chat:
        if bos_token_id is None and tokenizer is not None:
            bos_token_id = tokenizer.bos_id
        return ChatPieces(() if bos_token_id is None else (bos_token_id,), (), None, None)

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    one = tokenizer.apply_chat_template([{"role": "user", "content": _USER}])
    opening, found, reply = one.partition(_USER)
    if not found or _USER in reply:
        raise ValueError(
            f"{tokenizer.source}: the chat template does not render a user message once and as it "
            "is, so the model cannot be let write it"
        )
    reply_ids = ids(reply)
    if not reply_ids:
        raise ValueError(f"{tokenizer.source}: the chat template puts nothing after a user message")
    return ChatPieces(ids(opening), reply_ids, _second_turn(tokenizer, ids), reply_ids[0])


def _second_turn(
    tokenizer: Tokenizer, ids: Callable[[str], tuple[int, ...]]
) -> tuple[int, ...] | None:
    messages = [
        {"role": "user", "content": _USER},
        {"role": "assistant", "content": _ANSWER},
        {"role": "user", "content": _NEXT},
    ]
    try:
        text = tokenizer.apply_chat_template(messages)
    except ValueError:
        return None
    between = text.partition(_ANSWER)[2].partition(_NEXT)
    return ids(between[0]) if between[1] else None
