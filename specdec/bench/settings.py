"""What the benchmark measures, checked before anything is loaded."""

from dataclasses import asdict, dataclass
from typing import Any

from specdec.bench.report import draft_label

AUTO = "auto"
Width = int | str  # drafts per step: a number, or "auto"


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What to measure. A bad value raises ValueError naming the field.

    Attributes:
        name: what the report calls the model.
        drafts: names or paths as in ``Engine``; each runs on an engine of its own, beside k=0.
        ks: drafts per step, numbers or "auto". 0 is always measured.
        num_reqs: requests side by side.
        contexts: lengths of prompts in tokens, made from the prompt file's texts; None takes the
            prompts as they are.
        prompts: a file of JSON lines; None is the file of the package.
        num_prompts: None takes all of them.
        temperatures: with one above 0 every prompt has a seed of its own (``seed`` + its number),
            so that texts can be compared there too.
        simulate: rates of simulated acceptance, each a further engine per drafter.
        warm_up: use every graph once before anything is timed.
        parts: time draft, verify and accept alone, for every point.
        peers: other engines to run on the same weights, prompts and k.
    """

    model: str | None = None
    name: str | None = None
    drafts: tuple[str | None, ...] = ("ngram",)
    ks: tuple[Width, ...] = (0, 1, 2, 3, 4, 5, 6, 7, 8)
    num_reqs: tuple[int, ...] = (1,)
    contexts: tuple[int | None, ...] = (None,)
    prompts: str | None = None
    num_prompts: int | None = None
    max_new_tokens: int = 64
    temperatures: tuple[float, ...] = (0.0,)
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    ignore_eos: bool = False
    chat_template: bool = True
    simulate: tuple[tuple[float, ...], ...] = ()
    warm_up: bool = True
    parts: bool = True
    peers: tuple[str, ...] = ()
    steps_per_replay: int | str = "auto"
    dtype: str = "auto"
    device: str = "auto"
    cudagraph_mode: str = "FULL_AND_PIECEWISE"
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        numbers = [k for k in self.ks if isinstance(k, int)]
        if not self.ks or min(numbers, default=0) < 0 or set(self.ks) - {*numbers, AUTO}:
            raise ValueError(f"ks must be numbers of at least 0 or 'auto', got {self.ks}")
        for name in ("drafts", "num_reqs", "contexts", "temperatures", "simulate"):
            values = getattr(self, name)
            if (not values and name != "simulate") or len(set(values)) != len(values):
                raise ValueError(f"{name} must be different values, at least one, got {values}")
        labels = [draft_label(draft) for draft in self.drafts]
        for label in labels:
            if labels.count(label) > 1:
                raise ValueError(f"drafts: the report would call two of them {label!r}: rename one")
        if self.max_new_tokens < 2:
            raise ValueError(
                "max_new_tokens must be at least 2: the first token of a text is no decode step's, "
                f"got {self.max_new_tokens}"
            )
        if self.num_prompts is not None and self.num_prompts < 1:
            raise ValueError(f"num_prompts must be at least 1, got {self.num_prompts}")
        if min(self.num_reqs) < 1:
            raise ValueError(f"num_reqs must be numbers of at least 1, got {self.num_reqs}")
        if any(context is not None and context < 1 for context in self.contexts):
            raise ValueError(f"contexts must be lengths of at least 1, got {self.contexts}")
        if min(self.temperatures) < 0:
            raise ValueError(f"temperatures must be at least 0, got {self.temperatures}")
        if None in self.drafts and (len(self.drafts) > 1 or self.widths != (0,)):
            raise ValueError(f"ks: without a drafter only 0 can be measured, got {self.ks}")
        if None not in self.drafts and not self.max_k:
            raise ValueError("ks: a drafter needs a k above 0 to be measured")
        for rates in self.simulate:
            if not rates or not all(0 <= rate <= 1 for rate in rates):
                raise ValueError(f"simulate must hold rates in [0, 1], got {rates}")
        if self.peers and 0.0 not in self.temperatures:
            raise ValueError("peers are compared by their greedy texts: temperatures must hold 0")
        if self.simulate and None in self.drafts:
            raise ValueError("simulate: a drafter is needed, whose cost is part of a step")

    @property
    def widths(self) -> tuple[Width, ...]:
        """Every k in the order of measuring: 0 first, "auto" last."""
        numbers = sorted({0, *(k for k in self.ks if isinstance(k, int))})
        return (*numbers, AUTO) if AUTO in self.ks else tuple(numbers)

    @property
    def max_k(self) -> int:
        """The widest draft; "auto" alone goes to 4."""
        widest = max(k for k in self.widths if isinstance(k, int))
        return widest or (4 if AUTO in self.ks else 0)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
