"""C55: the joined stream is the decode of all ids, and no half character is shown."""

import random
from pathlib import Path

import pytest
import tokenizers
from tiny import write_tokenizer
from tokenizers import AddedToken, decoders, models

from specdec.detokenize import Detokenizer
from specdec.tokenizer import Tokenizer, load_tokenizer

TEXT = "né 😀 漢字 👩‍👧 end"
REPLACEMENT = "\ufffd"


def byte_level(folder: Path) -> Tokenizer:
    """Ids 0..255 are bytes; then a special token and an ordinary added one."""
    write_tokenizer(folder, "bytes", 256)
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    tokenizer.backend.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer.backend.add_tokens([AddedToken("漢 x", normalized=False)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As SentencePiece models are converted: "▁" for spaces, <0xNN> for rare characters."""
    strings = [f"<0x{byte:02X}>" for byte in range(256)]
    strings += ["▁", "▁n", "é", "▁end", "n", "▁漢", "x", "<s>"]
    vocab = {string: i for i, string in enumerate(strings)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    return Tokenizer(backend)


def words() -> Tokenizer:
    vocab = {f"w{i}": i for i in range(50)}
    return Tokenizer(tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="w0")))


@pytest.fixture(params=["byte-level", "byte-fallback", "words"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    if request.param == "byte-level":
        return byte_level(tmp_path)
    return byte_fallback() if request.param == "byte-fallback" else words()


def chunks_of(ids: list[int], size: int) -> list[list[int]]:
    return [ids[start : start + size] for start in range(0, len(ids), size)]


@pytest.mark.parametrize("size", range(1, 10))
def test_characters_over_chunk_borders(tmp_path: Path, size: int) -> None:
    """One token per byte, so chunks end in the middle of characters."""
    detokenizer = Detokenizer(byte_level(tmp_path))
    pieces = [detokenizer.push(chunk) for chunk in chunks_of(list(TEXT.encode()), size)]
    assert REPLACEMENT not in "".join(pieces)
    assert "".join(pieces) == TEXT
    assert detokenizer.flush() == ""


def test_end_in_the_middle_of_an_emoji(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path)
    ids = list("né 😀".encode())[:-1]
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(ids) == "né "
    assert detokenizer.flush() == REPLACEMENT
    assert detokenizer.text == tokenizer.decode(ids) == "né " + REPLACEMENT


def test_special_tokens_are_not_shown(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path)
    ids = [*b"a", 256, 257, *b"b"]
    assert Detokenizer(tokenizer).push(ids) == "a漢 xb"
    assert Detokenizer(tokenizer, skip_special_tokens=False).push(ids) == "a<end>漢 xb"


def test_byte_fallback_keeps_its_spaces() -> None:
    tokenizer = byte_fallback()
    emoji = list("😀".encode())
    ids = [257, 258, 256, *emoji, 257, 263, 261, 259]
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push([token_id]) for token_id in ids]
    assert pieces == ["n", "é", " ", "", "", "", "😀", " n", "", " 漢", " end"]
    assert detokenizer.text == tokenizer.decode(ids)


def test_invalid_byte_tokens_leave_their_neighbours_alone() -> None:
    """The library would replace the whole run, the emoji that was shown too."""
    tokenizer = byte_fallback()
    run = list("😀\n".encode())
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(run) == "😀\n"
    assert detokenizer.push([0x80, 0x80, *b"G"]) == REPLACEMENT * 2 + "G"
    assert detokenizer.push([*"漢".encode()[:2], 263]) == ""
    assert detokenizer.push([259]) == REPLACEMENT + " end"
    assert tokenizer.decode([*run, 0x80]) == REPLACEMENT * 6


@pytest.mark.parametrize("first", [0x20, 0x41, 0xC3, 256, 257, 258, 263])
def test_the_first_token_of_a_text_may_lose_its_space(first: int) -> None:
    tokenizer = byte_fallback()
    for rest in ([257, 259], [0xA9, 257], [*"漢".encode(), 261]):
        detokenizer = Detokenizer(tokenizer)
        ids = [first, *rest]
        text = detokenizer.push(ids) + detokenizer.flush()
        assert text == tokenizer.decode(ids) or REPLACEMENT in text


def random_ids(tokenizer: Tokenizer, rng: random.Random, length: int) -> list[int]:
    """Special tokens anywhere; bytes that are no UTF-8, unless they are byte-fallback tokens."""
    ids: list[int] = []
    while len(ids) < length:
        token_id = rng.randrange(tokenizer.vocab_size)
        if tokenizer.vocab_size < 256 or rng.random() < 0.5:
            ids.append(token_id)
        else:
            ids += rng.choice("aé漢😀").encode()
    if isinstance(tokenizer.backend.model, models.BPE) and tokenizer.backend.model.byte_fallback:
        valid = {*range(128), *range(256, tokenizer.vocab_size)}
        ids = [i for i in ids if i in valid] + list("é漢\n😀é".encode())
    return ids


def test_stream_equals_decode(tokenizer: Tokenizer) -> None:
    rng = random.Random(0)
    for _ in range(300):
        ids = random_ids(tokenizer, rng, rng.randrange(1, 30))
        detokenizer = Detokenizer(tokenizer)
        pieces = [detokenizer.push(chunk) for chunk in chunks_of(ids, rng.randrange(1, 6))]
        pieces.append(detokenizer.flush())
        assert "".join(pieces) == detokenizer.text == tokenizer.decode(ids), ids


def test_text_lengths_tell_the_shortest_prefix(tokenizer: Tokenizer) -> None:
    """After each token: the certain part of the decode of the ids so far."""
    rng = random.Random(1)
    ids = random_ids(tokenizer, rng, 40)
    if tokenizer.strings[0] == "<0x00>":
        # Half a character would turn the decode of its whole run into U+FFFD.
        ids = [token_id for token_id in ids if not 128 <= token_id < 256]
    detokenizer = Detokenizer(tokenizer)
    detokenizer.push(ids[:7])
    detokenizer.push(ids[7:])
    assert len(detokenizer.text_lengths) == len(ids)
    for n, length in enumerate(detokenizer.text_lengths, start=1):
        text = tokenizer.decode(ids[:n])
        certain = detokenizer.text[:length]
        assert text.startswith(certain)
        assert set(text[length:]) <= {REPLACEMENT}
    detokenizer.flush()
    assert detokenizer.text_lengths[-1] == len(detokenizer.text)


def test_without_a_tokenizer_all_text_is_empty() -> None:
    detokenizer = Detokenizer(None)
    assert detokenizer.push([1, 2, 3]) == ""
    assert detokenizer.flush() == ""
    assert detokenizer.text_lengths == [0, 0, 0]
