"""What suffix lookup must propose, by slow means, and random cases to compare kernels on."""

from collections.abc import Sequence

import torch

from specdec.drafters.history import TextHistory
from specdec.kernels.suffix import OWN_VOTES, VOTERS, SuffixHistory, SuffixRule


def run_length(text: Sequence[int], before: Sequence[int], max_match: int) -> int:
    """How many tokens at the ends of both are the same."""
    run = 0
    while run < min(max_match, len(text), len(before)) and text[-1 - run] == before[-1 - run]:
        run += 1
    return run


def suffix_draft(
    text: Sequence[int], history: Sequence[Sequence[int]], k: int, rule: SuffixRule = SuffixRule()
) -> list[int]:
    """The draft after ``text``; ``history`` has the oldest text first."""
    text = list(text)
    own = [(run_length(text, text[:at], rule.max_match), at) for at in range(1, len(text))]
    places = []
    for number, other in enumerate(history):
        for at in range(1, len(other)):
            key = other[max(0, at - rule.max_match) : at][::-1]
            places.append((key, -number, at))
    places.sort()
    back = text[::-1][: rule.max_match]
    # A text that has ended stands before every token.
    first = sum(key + [-1] * (rule.max_match - len(key)) < back for key, _, _ in places)
    near = places[max(0, first - VOTERS // 2) : max(0, first + VOTERS // 2)]
    found = [(run_length(text, history[-n][:at], rule.max_match), n, at) for _, n, at in near]
    match = max([0, *(run for run, _ in own), *(run for run, _, _ in found)])
    if match < rule.min_match:
        return []
    # What follows each occurrence, and its votes.
    voters = [
        ([text[at + step % (len(text) - at)] for step in range(k)], OWN_VOTES)
        for run, at in reversed(own)
        if run == match
    ][:VOTERS]
    voters += [(list(history[-n][at : at + k]), 1) for run, n, at in found if run == match]
    total = sum(votes for _, votes in voters)
    draft: list[int] = []
    while len(draft) < min(k, rule.drafts_per_match * match):
        step = len(draft)
        counts: dict[int, int] = {}
        for tokens, votes in voters:
            if len(tokens) > step:
                counts[tokens[step]] = counts.get(tokens[step], 0) + votes
        best = max(counts, key=lambda token: counts[token], default=None)
        if best is None or 100 * counts[best] < rule.min_share * total:
            break
        draft.append(best)
        voters = [each for each in voters if each[0][step : step + 1] == [best]]
    return draft


def padded(draft: Sequence[int], k: int) -> list[int]:
    return [*draft, *([-1] * (k - len(draft)))]


class Cases:
    """Texts of few distinct tokens in rows of two groups, and histories for both."""

    def __init__(
        self,
        seed: int,
        rule: SuffixRule,
        *,
        num_rows: int = 12,
        length: int = 75,
        history: int = 140,
        texts: int = 14,
    ) -> None:
        """``history``: cells of the ring that holds the newest of ``texts`` texts."""
        generator = torch.Generator().manual_seed(seed)

        def randint(low: int, high: int, *shape: int) -> torch.Tensor:
            return torch.randint(low, high, shape, generator=generator)

        self.rule = rule
        ids = 2 + seed % 5
        self.tokens = randint(0, ids, num_rows, length + 1).int()
        # What stands past a text's end must not be read.
        self.lengths = randint(1, length, num_rows, 2)[:, 0]
        self.lengths[:5] = torch.tensor([0, 1, 2, 3, length])
        held = TextHistory(history, rule.max_match)
        self.groups = [("a", "b", None)[row % 3] for row in range(num_rows)]
        for number in range(texts):
            held.add(randint(0, ids, 2 + number * 2 % 60).tolist(), "ab"[number % 2])
        kept = held.kept()
        self.history = {name: [ids for group, ids in kept if group == name] for name in "ab"}
        order, bounds = held.flatten()
        self.arrays = SuffixHistory(
            pool=torch.from_numpy(held.pool),
            order=torch.from_numpy(order),
            bounds=torch.tensor([bounds.get(g, (0, 0)) for g in self.groups], dtype=torch.int32),
        )
        self.slots = torch.randperm(num_rows, generator=generator)

    def arguments(self, k: int, device: str = "cpu") -> tuple:
        """Arguments of ``propose_suffix``."""
        tensors = [self.tokens[:, :-1], self.lengths, self.slots]
        arrays = SuffixHistory(*(each.to(device) for each in self.arrays))
        return (*(each.to(device) for each in tensors), arrays, k, self.rule)

    def expected(self, k: int) -> list[list[int]]:
        rows = []
        for slot in self.slots.tolist():
            text = self.tokens[slot, : self.lengths[slot]].tolist()
            history = self.history.get(self.groups[slot] or "", [])
            rows.append(padded(suffix_draft(text, history, k, self.rule), k))
        return rows


RULES = [
    SuffixRule(),
    SuffixRule(max_match=3, drafts_per_match=1),
    SuffixRule(max_match=5, min_match=2, min_share=40),
    SuffixRule(max_match=1, min_share=20),
]
