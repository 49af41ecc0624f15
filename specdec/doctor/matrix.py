"""The cells of the exactness matrix, in an order that soon has something of everything."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

ARRIVALS = ("together", "staggered")
KS = (0, 1, 2, 4)
# Tokens of a step in cells with small chunks: prompts come in pieces, rows take turns.
SMALL_STEP = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One way to run all prompts."""

    draft: str  # "given" or "ngram"
    k: int
    arrival: str  # one of ARRIVALS
    step_tokens: int | None  # tokens of a step; None: the engine's own limit
    seeded: bool  # coupled acceptance at a temperature, else greedy

    def __str__(self) -> str:
        how = "coupled" if self.seeded else "greedy"
        chunk = "whole prompts" if self.step_tokens is None else f"steps of {self.step_tokens}"
        return f"{self.draft}, k={self.k}, {self.arrival}, {chunk}, {how}"


def cells(draft: str, ks: Sequence[int], *, seeded: bool, small_step: int) -> list[Cell]:
    """Every cell of one drafter; ``seeded`` False leaves the coupled ones out."""
    ways = [False, True] if seeded else [False]
    found = [
        Cell(draft=draft, k=k, arrival=arrival, step_tokens=step, seeded=way)
        for k, arrival, step, way in product(ks, ARRIVALS, (None, small_step), ways)
    ]
    # Neighbours in the product differ in one thing; a stride coprime to their number mixes them.
    stride = next(s for s in (11, 7, 5, 3, 1) if len(found) % s or s == 1)
    return [found[(len(found) - 1 + i * stride) % len(found)] for i in range(len(found))]
