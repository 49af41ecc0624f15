"""Which replica a request goes to. Pure Python: no sockets, no engine.

Where an adapter holds a slot, and where the longest beginning of the prompt lies in the prefix
cache, as far as that can be told from what was sent where. Both only save work, so they are
followed within a bound on load alone. The index is an LRU over hashed blocks of prompt text, after
SGLang's cache-aware router (Zheng et al., arXiv 2312.07104) with a table where it has a tree.
"""

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)

# A KV block of 16 tokens is some 64 characters of English.
BLOCK_CHARACTERS = 64
BLOCK_IDS = 16
# A replica refuses more.
MAX_CHOICES = 128
# Of a prompt: what differs only after this many is one prefix.
MAX_BLOCKS = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingKey:
    """What routing sees of a request.

    Attributes:
        model: the adapter's or model's name; None is the base model.
        blocks: one hash for each block of the prompt's beginning, over all before it too.
        num_texts: texts that it asks for; its load.
    """

    model: str | None = None
    blocks: tuple[int, ...] = ()
    num_texts: int = 1


def routing_key(body: Mapping[str, Any], base: str) -> RoutingKey:
    """The key of a completion's or a chat's body, which nobody has checked.

    ``base`` is what the base model is called. Of several prompts the first one counts. What cannot
    be understood gets no prefix: the replica says what is wrong with it.
    """
    model = body.get("model")
    model = model if isinstance(model, str) and model != base else None
    prompt, num_prompts = body.get("prompt"), 1
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt, num_prompts = prompt[0], len(prompt)
    if isinstance(body.get("messages"), list):
        prompt = _chat_text(body["messages"])
    n = body.get("n")
    num_choices = min(n, MAX_CHOICES) if isinstance(n, int) and n > 0 else 1
    blocks: tuple[int, ...] = ()
    if isinstance(prompt, str):
        blocks = _hashes(model, prompt, BLOCK_CHARACTERS)
    elif isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
        blocks = _hashes(model, tuple(prompt[: BLOCK_IDS * MAX_BLOCKS]), BLOCK_IDS)
    return RoutingKey(model=model, blocks=blocks, num_texts=num_prompts * num_choices)


class Router(Generic[Name]):
    """Chooses among replicas, called anything hashable. Not for several threads at once."""

    def __init__(
        self,
        *,
        max_adapters: int = 8,
        max_imbalance: int = 8,
        max_share: float = 0.25,
        capacity: int = 1 << 16,
    ) -> None:
        """
        Args:
            max_adapters: that a replica has slots for.
            max_imbalance: affinity is not followed to a replica that has as many more texts than
                the one that has fewest,
            max_share: or, where that is more, this share of what that one has.
            capacity: blocks that are remembered, all prompts together.
        """
        self._max_adapters = max_adapters
        self._max_imbalance = max_imbalance
        self._max_share = max_share
        self._capacity = capacity
        self._holders: OrderedDict[int, set[Name]] = OrderedDict()
        self._adapters: dict[Name, OrderedDict[str, None]] = {}
        self._clock = count(1)
        self._chosen_at: dict[Name, int] = {}

    def choose(self, key: RoutingKey, loads: Mapping[Name, int]) -> Name:
        """One of ``loads``, which holds the texts in each replica; it is noted.

        ``loads`` must not be empty.
        """
        least = min(loads.values())
        slack = max(self._max_imbalance, int(self._max_share * least))
        matched = self._matched(key.blocks)

        def worth(name: Name) -> tuple[bool, int, int, int]:
            has_adapter = key.model in self._adapters.get(name, ())
            # Among equals the one that has waited longest: idle replicas take turns.
            return has_adapter, matched.get(name, 0), -loads[name], -self._chosen_at.get(name, 0)

        allowed = [name for name, load in loads.items() if load == least or load < least + slack]
        chosen = max(allowed, key=worth)
        self._note(key, chosen)
        return chosen

    def forget(self, name: Name) -> None:
        """A replica has gone, or starts anew with empty caches."""
        self._adapters.pop(name, None)
        self._chosen_at.pop(name, None)
        for block, holders in list(self._holders.items()):
            holders.discard(name)
            if not holders:
                del self._holders[block]

    def __len__(self) -> int:
        """The blocks that are remembered."""
        return len(self._holders)

    def _matched(self, blocks: Sequence[int]) -> dict[Name, int]:
        """For each replica, how many blocks of the beginning it was sent before."""
        matched: dict[Name, int] = {}
        for length, block in enumerate(blocks):
            holders = self._holders.get(block, set())
            # A hash covers all blocks before it, so whoever holds one of them holds those, unless
            # they were forgotten first.
            still = [name for name in holders if matched.get(name, 0) == length]
            if not still:
                break
            matched |= dict.fromkeys(still, length + 1)
        return matched

    def _note(self, key: RoutingKey, name: Name) -> None:
        self._chosen_at[name] = next(self._clock)
        if key.model is not None:
            slots = self._adapters.setdefault(name, OrderedDict())
            slots[key.model] = None
            slots.move_to_end(key.model)
            if len(slots) > self._max_adapters:
                slots.popitem(last=False)
        # The last block first, so that a prompt's beginning is forgotten after its end.
        for block in reversed(key.blocks):
            self._holders.setdefault(block, set()).add(name)
            self._holders.move_to_end(block)
        while len(self._holders) > self._capacity:
            self._holders.popitem(last=False)


def _chat_text(messages: Sequence[Any]) -> str | None:
    """Near enough to what a chat template makes: the same for the same beginning of a chat."""
    parts = []
    for message in messages:
        if not isinstance(message, dict):
            return None
        parts.append(f"\n{message.get('role')}\n{message.get('content')}")
    return "".join(parts)


def _hashes(model: str | None, prompt: str | tuple[int, ...], size: int) -> tuple[int, ...]:
    """Of every whole block. Two prompts with one hash would cost a cache hit, and no more."""
    found = []
    last = hash(model)
    for start in islice(range(0, len(prompt) - size + 1, size), MAX_BLOCKS):
        last = hash((last, prompt[start : start + size]))
        found.append(last)
    return tuple(found)
