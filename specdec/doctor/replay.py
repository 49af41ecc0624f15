"""The accept rule over a finished text: what each step should have drafted and accepted."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

# (committed output tokens, drafts asked for) -> proposed ids, ended by the first that is none
Guess = Callable[[int, int], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Step:
    """One decode step of a text. ``committed``: output tokens before it, from 1 on."""

    committed: int
    drafted: int
    accepted: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedText:
    """A greedy text and how the engine came to it."""

    prompt_ids: list[int]
    token_ids: list[int]
    budget: int  # tokens that it might have had
    steps: list[Step]  # as the engine counted them
    adapter: str | None = None

    @property
    def ids(self) -> list[int]:
        return self.prompt_ids + self.token_ids


@dataclass(slots=True)
class Tally:
    """Steps added up."""

    steps: int = 0
    committed: int = 0  # by steps
    drafted: int = 0
    accepted: int = 0
    drafted_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)

    @property
    def mean(self) -> float:
        """Tokens per step; 0.0 without a step."""
        return self.committed / self.steps if self.steps else 0.0

    @property
    def by_position(self) -> list[float]:
        pairs = zip(self.accepted_by_position, self.drafted_by_position, strict=True)
        return [hits / count for hits, count in pairs]

    def add(self, steps: Sequence[Step], num_tokens: int) -> None:
        """The steps of one text of ``num_tokens``; its first token comes from no step."""
        self.steps += len(steps)
        self.committed += num_tokens - 1 if steps else 0
        for step in steps:
            self.drafted += step.drafted
            self.accepted += step.accepted
            missing = step.drafted - len(self.drafted_by_position)
            self.drafted_by_position.extend([0] * missing)
            self.accepted_by_position.extend([0] * missing)
            for position in range(step.drafted):
                self.drafted_by_position[position] += 1
                self.accepted_by_position[position] += position < step.accepted


def steps_from_counts(drafted: Sequence[int], accepted: Sequence[int]) -> list[Step]:
    """An engine's counts per step, with where each step began."""
    steps, committed = [], 1
    for num_drafted, num_accepted in zip(drafted, accepted, strict=True):
        steps.append(Step(committed, num_drafted, num_accepted))
        committed += num_accepted + 1
    return steps


def replay(text: FinishedText, guess: Guess, k: int) -> Iterator[Step]:
    """The steps that a text takes where each drafts as ``guess`` says."""
    committed = 1
    while committed < len(text.token_ids):
        step = step_at(text, guess, k, committed)
        yield step
        committed += step.accepted + 1


def step_at(text: FinishedText, guess: Guess, k: int, committed: int) -> Step:
    """The step that begins after ``committed`` output tokens.

    A draft is accepted where it is the text's own token and all before it were; a greedy text is
    the target's choice at every place, so this is the accept rule itself.
    """
    width = min(k, text.budget - committed - 1)
    proposed = list(guess(committed, width))[:width] if width > 0 else []
    drafted = (*(token < 0 for token in proposed), True).index(True)
    ahead = zip(proposed[:drafted], text.token_ids[committed:], strict=False)
    accepted = (*(draft == token for draft, token in ahead), False).index(False)
    return Step(committed, drafted, accepted)
