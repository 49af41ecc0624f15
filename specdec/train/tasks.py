"""What the users of the written conversations ask for: frames, and what fills them."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from specdec.tokenizer import Tokenizer
from specdec.train.corpus import Document
from specdec.train.frames import (
    FOLLOW_UPS,
    OVER_PASSAGES,
    OVER_TEXT,
    SUMS,
    TASKS,
    TOPICS,
    TRANSLATIONS,
    WRITINGS,
    fill,
    long_words,
    topics_in,
    whole_sentences,
)
from specdec.train.prompts import Prompt
from specdec.train.settings import TrainSettings

# Shorter answers are not handed on as texts.
MIN_TEXT_TOKENS = 40
# Tokens of a row that are left to template and frame around texts.
FRAME_TOKENS = 128
# Kinds of tasks by weight: about a subject, and about texts.
OF_SUBJECTS = {TASKS: 5, WRITINGS: 3, SUMS: 2}
OF_TEXTS = {OVER_TEXT: 4, OVER_PASSAGES: 4, TRANSLATIONS: 2}
# Share of the further turns that the target writes, and of the subjects that are ours.
OWN_FOLLOW_UPS = 0.3
OUR_TOPICS = 0.3
MAX_FOLLOW_UPS = 2
MAX_PASSAGES = 4


@dataclass(frozen=True, slots=True)
class Shelf:
    """What the target has written before: texts, each with its length, and subjects."""

    texts: tuple[tuple[str, int], ...] = ()  # text, tokens
    topics: tuple[str, ...] = ()

    @classmethod
    def of(cls, documents: Sequence[Document], tokenizer: Tokenizer | None) -> "Shelf":
        if tokenizer is None:
            return cls()
        texts, topics = [], set()
        for document in documents:
            for start, end in document.spans:
                if end - start >= MIN_TEXT_TOKENS:
                    text = whole_sentences(tokenizer.decode(document.tokens[start:end]))
                    if text:
                        texts.append((text, end - start))
                        topics.update(topics_in(text))
        return cls(tuple(texts), tuple(sorted(topics)))


class Tasks:
    """Draws the users' messages of one conversation."""

    def __init__(self, settings: TrainSettings, rng: random.Random, shelf: Shelf) -> None:
        self.settings = settings
        self.rng = rng
        self.shelf = shelf
        # Tokens of text that leave room for the frame and an answer.
        self.room = settings.seq_len - settings.max_answer_tokens - FRAME_TOKENS

    def turns(self, *, follow: bool) -> tuple[list[Prompt | None], bool]:
        """The messages, None for those that the target writes, and whether the answer is to be a
        text for later prompts. ``follow``: there may be several.
        """
        drawn = self.rng.random()
        texts: list[str] = []
        is_writing = False
        first: Prompt | None = None
        if drawn < self.settings.rework_share and self.shelf.texts:
            kind = self._kind(OF_TEXTS)
            texts = self._texts(MAX_PASSAGES if kind is OVER_PASSAGES else 1)
            first = self._fill(kind, texts)
        elif drawn < self.settings.rework_share + self.settings.task_share:
            kind = self._kind(OF_SUBJECTS)
            is_writing = kind is WRITINGS
            first = self._fill(kind, texts)
        turns = [first]
        if follow and not is_writing and self.rng.random() < self.settings.follow_up_share:
            for _ in range(self.rng.randint(1, MAX_FOLLOW_UPS)):
                is_own = self.rng.random() < OWN_FOLLOW_UPS
                turns.append(None if is_own else self._fill(FOLLOW_UPS, texts))
        return turns, is_writing

    def _kind(self, kinds: dict[tuple[str, ...], int]) -> tuple[str, ...]:
        return self.rng.choices(list(kinds), list(kinds.values()))[0]

    def _texts(self, most: int) -> list[str]:
        """One text, or two to ``most`` of them where so many fit."""
        wanted = self.rng.randint(2, most) if most > 1 else 1
        room, chosen = self.room, []
        for text, length in self.rng.sample(self.shelf.texts, min(wanted, len(self.shelf.texts))):
            share = min(1.0, room / length)
            if share < 1.0:
                text = whole_sentences(text[: max(1, int(share * len(text)))])
            room -= int(share * length)
            chosen.append(text)
            if room < MIN_TEXT_TOKENS:
                break
        return chosen

    def _fill(self, frames: tuple[str, ...], texts: list[str]) -> Prompt:
        topics: Sequence[str] = TOPICS
        if texts:
            text = self.rng.choice(texts)
            topics = topics_in(text) or long_words(text) or TOPICS
        elif self.shelf.topics and self.rng.random() >= OUR_TOPICS:
            topics = self.shelf.topics
        return Prompt((fill(self.rng.choice(frames), self.rng, texts, topics),))
