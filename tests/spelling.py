"""A model that spells a chosen byte string, by naming its greedy tokens after the pieces."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from oracle import Oracle
from tiny import make_tiny, write_tokenizer

VOCAB = 256
PROMPT = [5, 17, 99, 3]


class Speller:
    """One random model and a greedy text of it whose first ``length`` ids all differ."""

    def __init__(self, folder: Path, length: int = 24) -> None:
        self.folder = make_tiny(folder / "model", seed=8, vocab=VOCAB)
        oracle = Oracle(self.folder)
        for first in range(VOCAB):
            self.prompt = [first, *PROMPT]
            self.ids, _ = oracle.greedy(self.prompt, length)
            if len(set(self.ids)) == length:
                return
        raise AssertionError("no prompt gives a text of different tokens")

    def spell(self, out: Path, pieces: Sequence[bytes]) -> str:
        """A copy whose i-th greedy token decodes to ``pieces[i]``; pieces must differ."""
        assert len(pieces) <= len(self.ids) and len(set(pieces)) == len(pieces)
        shutil.copytree(self.folder, out)
        write_tokenizer(out, "bytes", VOCAB)
        tokenizer = json.loads((out / "tokenizer.json").read_text())
        names = {i: f"<{i}>" for i in range(VOCAB)}
        byte_of = {token: i for token, i in tokenizer["model"]["vocab"].items() if i < 256}
        character = {i: token for token, i in byte_of.items()}
        for token, piece in zip(self.ids, pieces, strict=False):
            names[token] = "".join(character[byte] for byte in piece)
        tokenizer["model"]["vocab"] = {name: i for i, name in names.items()}
        (out / "tokenizer.json").write_text(json.dumps(tokenizer))
        return str(out)


def cut(text: str, sizes: Sequence[int]) -> list[bytes]:
    """The bytes of ``text`` in pieces of the given sizes, in turn."""
    data, pieces, at = text.encode(), [], 0
    while at < len(data):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(data[at : at + size])
        at += size
    return pieces
