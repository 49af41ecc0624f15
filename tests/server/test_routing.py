"""Which replica a request goes to: adapters, prefixes, and the bound on load, without servers."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.replicas.routing import (
    BLOCK_CHARACTERS,
    BLOCK_IDS,
    MAX_BLOCKS,
    Router,
    RoutingKey,
    routing_key,
)

LONG = "".join(chr(97 + i % 23) for i in range(5 * BLOCK_CHARACTERS))
IDLE = {0: 0, 1: 0, 2: 0}


def key(prompt: object = "", model: str | None = None, **body: object) -> RoutingKey:
    return routing_key({"prompt": prompt, "model": model, **body}, "base")


def chat(*texts: str) -> RoutingKey:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return routing_key({"messages": messages}, "base")


def test_a_key_is_the_same_for_the_same_beginning() -> None:
    assert len(key(LONG).blocks) == 5
    assert key(LONG + "x" * BLOCK_CHARACTERS).blocks[:5] == key(LONG).blocks
    assert key("x" + LONG[1:]).blocks[0] != key(LONG).blocks[0]
    # A block's hash covers those before it.
    assert key("x" + LONG[1:]).blocks[4] != key(LONG).blocks[4]
    assert key(LONG, "a").blocks[0] != key(LONG).blocks[0]
    assert key(LONG, "base") == key(LONG)
    assert chat(LONG, "one", LONG).blocks[:5] == chat(LONG).blocks[:5] != ()
    assert len(key("y" * BLOCK_CHARACTERS * (MAX_BLOCKS + 9)).blocks) == MAX_BLOCKS
    ids = list(range(3 * BLOCK_IDS + 1))
    assert len(key(ids).blocks) == 3
    assert key([ids, [1]]).blocks == key(ids).blocks


@pytest.mark.parametrize(
    ("body", "num_texts"),
    [
        ({"prompt": "one"}, 1),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": ["one", "two"], "n": 3}, 6),
        ({"prompt": [[1], [2]]}, 2),
        ({"prompt": "one", "n": 10**30}, 128),
        ({"prompt": "one", "n": "many"}, 1),
    ],
)
def test_a_key_counts_texts(body: dict, num_texts: int) -> None:
    assert routing_key(body, "base").num_texts == num_texts


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": None},
        {"prompt": 5, "model": 7, "n": None},
        {"prompt": [1, "two"]},
        {"prompt": [[1], "two"]},
        {"prompt": [None]},
        {"prompt": [[None, {}]]},
        {"messages": "no list"},
        {"messages": [5]},
        {"messages": []},
    ],
    ids=str,
)
def test_what_cannot_be_understood_has_no_prefix(body: dict) -> None:
    assert routing_key(body, "base").blocks == ()


def test_idle_replicas_take_turns() -> None:
    router: Router[int] = Router()
    for _ in range(3):
        assert [router.choose(key(f"{i}"), IDLE) for i in range(3)] == [0, 1, 2]
    # Whatever they were chosen for before.
    for _ in range(5):
        router.choose(key(), {0: 0})
    assert [router.choose(key(f"{i}"), IDLE) for i in range(3)] == [1, 2, 0]


def test_the_least_loaded_takes_what_nobody_knows() -> None:
    assert Router().choose(key(LONG), {"x": 3, "y": 1, "z": 2}) == "y"


def test_an_adapter_stays_where_it_is() -> None:
    router: Router[int] = Router()
    home = {name: router.choose(key("p", name), IDLE) for name in "abc"}
    assert sorted(home.values()) == [0, 1, 2]
    for name in "cabbac":
        loads = {i: 2 * (i == home[name]) for i in range(3)}
        assert router.choose(key("q", name), loads) == home[name]


def test_an_adapter_s_slot_is_lost_to_later_ones() -> None:
    router: Router[int] = Router(max_adapters=2)
    router.choose(key("", "a"), {0: 0})
    for name in "bc":
        router.choose(key("", name), {0: 0})
    # Replica 0 has been sent three adapters and holds two; 1 has never been chosen.
    assert router.choose(key("", "b"), {0: 0, 1: 0}) == 0
    assert router.choose(key("", "a"), {0: 0, 1: 0}) == 1


def test_the_longest_prefix_wins() -> None:
    router: Router[int] = Router()
    short, other = LONG[: 2 * BLOCK_CHARACTERS], "z" * 3 * BLOCK_CHARACTERS
    assert router.choose(key(short + other), {0: 0}) == 0
    assert router.choose(key(LONG), {1: 0}) == 1
    for _ in range(3):
        assert router.choose(key(LONG + "more" * BLOCK_CHARACTERS), {0: 0, 1: 0}) == 1
        assert router.choose(key(short + other), {0: 0, 1: 0}) == 0
    # A resident adapter counts more than a prefix.
    assert router.choose(key("", "a"), {0: 0}) == 0
    assert router.choose(key(LONG, "a"), {0: 5, 1: 0}) == 0


def test_a_chat_goes_on_where_it_began() -> None:
    router: Router[int] = Router()
    for number in range(12):
        turns = [f"chat {number} " * 20]
        home = router.choose(chat(*turns), IDLE)
        for turn in ("a short answer", "and?", "so it goes"):
            turns.append(turn)
            loads = {i: 3 * (i == home) for i in range(3)}
            assert router.choose(chat(*turns), loads) == home


def test_affinity_overloads_nobody() -> None:
    """All requests have one prefix and one adapter, and none of them ends."""
    router: Router[int] = Router(max_imbalance=8)
    loads = dict(IDLE)
    for _ in range(24):
        loads[router.choose(key(LONG, "a"), loads)] += 1
        assert max(loads.values()) - min(loads.values()) <= 8
    for _ in range(600):
        loads[router.choose(key(LONG, "a"), loads)] += 1
        assert max(loads.values()) - min(loads.values()) <= max(8, 0.25 * min(loads.values()))


def test_a_replica_that_restarts_is_forgotten() -> None:
    router: Router[int] = Router()
    router.choose(key(LONG, "a"), {1: 0})
    router.choose(key(LONG), {1: 0})
    assert router.choose(key(LONG, "a"), {0: 0, 1: 1}) == 1
    router.forget(1)
    assert len(router) == 0
    assert router.choose(key(LONG, "a"), {0: 0, 1: 1}) == 0


def test_memory_is_bounded_and_old_prompts_are_forgotten_first() -> None:
    router: Router[int] = Router(capacity=12)
    prompts = [chr(65 + i) * 5 * BLOCK_CHARACTERS for i in range(4)]
    for prompt in prompts:
        router.choose(key(prompt), {7: 0})
    assert len(router) == 12
    assert router.choose(key(prompts[3]), {7: 3, 8: 0}) == 7
    assert router.choose(key(prompts[0]), {7: 3, 8: 0}) == 8


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_any_traffic_stays_within_the_bound(seed: int) -> None:
    """Requests begin and end at random; whoever is chosen was less than the bound above."""
    random_ = random.Random(seed)
    router: Router[int] = Router(max_imbalance=4, capacity=64, max_adapters=2)
    loads = {i: 0 for i in range(random_.randint(1, 5))}
    running: list[tuple[int, int]] = []
    for _ in range(200):
        if running and random_.random() < 0.4:
            name, num_texts = running.pop(random_.randrange(len(running)))
            loads[name] -= num_texts
        elif random_.random() < 0.02:
            router.forget(random_.choice(list(loads)))
        else:
            prompt = random_.choice("pqr") * BLOCK_CHARACTERS * random_.randint(0, 9)
            asked = key(prompt, random_.choice([None, "a", "b", "c"]), n=random_.randint(1, 3))
            name, least = router.choose(asked, loads), min(loads.values())
            assert loads[name] == least or loads[name] - least < max(4, 0.25 * least)
            assert len(router) <= 64
            loads[name] += asked.num_texts
            running.append((name, asked.num_texts))
