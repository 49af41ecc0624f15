"""The target's text on disk, in numbered files that are whole or absent.

Shape letters: N tokens of a file, D its documents.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

DONE = "done.json"


@dataclass(slots=True)
class Document:
    """A conversation's tokens and which of them are the target's answers.

    Attributes:
        number: which document of the run it is; its content follows from that and the seed.
        spans: first and past-the-end positions of each answer.
        greedy: no token of an answer was sampled.
        tokens: user messages, template and answers.
    """

    number: int
    greedy: bool
    tokens: list[int] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)

    @property
    def answer(self) -> list[int]:
        """The tokens of the last answer."""
        start, end = self.spans[-1]
        return self.tokens[start:end]


class Corpus:
    """Files of documents in a folder, in the order in which they were written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def num_shards(self) -> int:
        count = 0
        while self._path(count).exists():
            count += 1
        return count

    @property
    def is_done(self) -> bool:
        return (self.folder / DONE).exists()

    def finish(self, summary: dict[str, float]) -> None:
        """Note that no more text will be written, and what writing it took."""
        _replace(self.folder / DONE, json.dumps(summary).encode())

    @property
    def summary(self) -> dict[str, float]:
        content: dict[str, float] = json.loads((self.folder / DONE).read_text(encoding="utf-8"))
        return content

    def append(self, documents: Sequence[Document]) -> None:
        """Write the next file: all of it or, where the process ends meanwhile, nothing."""
        spans = [(i, *span) for i, each in enumerate(documents) for span in each.spans]
        arrays: dict[str, np.ndarray] = {
            "tokens": np.array([t for each in documents for t in each.tokens], dtype=np.int32),
            "ends": np.cumsum([len(each.tokens) for each in documents], dtype=np.int64),
            "spans": np.array(spans, dtype=np.int64).reshape(-1, 3),
            "greedy": np.array([each.greedy for each in documents], dtype=np.bool_),
            "number": np.array([each.number for each in documents], dtype=np.int64),
        }
        path = self._path(self.num_shards)
        scratch = path.with_suffix(".tmp")
        save_file(arrays, scratch)
        os.replace(scratch, path)

    def read(self, shard: int) -> list[Document]:
        arrays = load_file(self._path(shard))
        ends = arrays["ends"].tolist()
        tokens = arrays["tokens"]
        starts = [0, *ends[:-1]]
        documents = [
            Document(number, greedy, tokens[start:end].tolist())
            for number, greedy, start, end in zip(
                arrays["number"].tolist(), arrays["greedy"].tolist(), starts, ends, strict=True
            )
        ]
        for owner, start, end in arrays["spans"].tolist():
            documents[owner].spans.append((start, end))
        return documents

    def documents(self) -> list[Document]:
        return [document for i in range(self.num_shards) for document in self.read(i)]

    def num_tokens(self) -> int:
        return sum(len(load_file(self._path(i))["tokens"]) for i in range(self.num_shards))

    def _path(self, shard: int) -> Path:
        return self.folder / f"shard-{shard:05d}.safetensors"


def _replace(path: Path, content: bytes) -> None:
    scratch = path.with_suffix(".tmp")
    scratch.write_bytes(content)
    os.replace(scratch, path)
