"""Which graphs fit into a budget."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.verifier.planner import KeyGroup, keys_that_fit, thinned

MIB = 2**20


def group(name: str, count: int, first: int, second: int) -> KeyGroup[str]:
    return KeyGroup([f"{name}{i}" for i in range(count)], [first, second][:count])


def test_everything_without_a_limit_or_where_it_fits():
    groups = [group("a", 10, 100, 5), group("b", 3, 50, 7)]
    everything = [list(g.keys[2:]) for g in groups]
    assert keys_that_fit(groups, None) == everything
    assert keys_that_fit(groups, 100 + 5 + 50 + 7 + 8 * 5 + 1 * 7) == everything


def test_all_groups_give_up_the_same_share():
    groups = [group("a", 22, 100, 10), group("b", 12, 100, 20)]
    kept = keys_that_fit(groups, 230 + 200)
    assert [len(keys) for keys in kept] == [10, 5]
    assert kept[1] == ["b3", "b5", "b7", "b9", "b11"], "evenly spread, largest first"


def test_the_widest_graphs_alone_are_too_much():
    groups = [group("a", 5, 300 * MIB, MIB), group("b", 1, 200 * MIB, 0)]
    with pytest.raises(ValueError, match=rf"graph_memory_limit is {400 * MIB} .* take {501 * MIB}"):
        keys_that_fit(groups, 400 * MIB)


@given(
    shapes=st.lists(
        st.tuples(st.integers(1, 40), st.integers(0, 10**6), st.integers(0, 10**6)), min_size=1
    ),
    extra=st.integers(0, 10**7),
)
def test_the_estimate_never_passes_the_limit(shapes, extra):
    groups = [group(str(i), *shape) for i, shape in enumerate(shapes)]
    used = sum(sum(g.probed) for g in groups)
    kept = keys_that_fit(groups, used + extra)
    total = used
    for each, keys in zip(groups, kept, strict=True):
        assert set(keys) <= set(each.rest)
        total += len(keys) * each.bytes_per_key
    assert total <= used + extra


@given(count=st.integers(0, 30), size=st.integers(1, 30))
def test_thinned_keeps_order_and_repeats_nothing(count, size):
    keys = list(range(size))
    kept = thinned(keys, count)
    assert len(kept) == min(count, size)
    assert kept == sorted(set(kept))
