"""C41: windows shorter than the text, with drafts that reach over their edge, lose no key."""

import pytest
from harness import assert_no_leak, cpu_engine, greedy
from oracle import Oracle, expect, speculate
from tiny import blended, make_tiny

SOURCE = [101, 14, 77, 35, 90, 52, 18, 6, 115, 40, 71, 29, 83, 11, 96, 58, 127, 44, 20, 67, 31]
PROMPTS = [SOURCE[:n] for n in (4, 7, 8, 9, 20)]
WINDOW = 8


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    root = tmp_path_factory.mktemp("windowed")
    options = {"family": "mistral", "seed": 5}
    target = make_tiny(root / "target", sliding_window=WINDOW, **options)
    folders = {
        "same": target,
        "blend": blended(target, root / "blend", 0.1),
        # The same weights see less, or everything.
        "narrow": make_tiny(root / "narrow", sliding_window=3, **options),
        "unbounded": make_tiny(root / "unbounded", **options),
    }
    return {name: str(folder) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def oracles(windowed):
    return {name: Oracle(folder) for name, folder in windowed.items()}


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "NONE"])
@pytest.mark.parametrize("k", [1, 4, 8])
@pytest.mark.parametrize("draft", ["same", "blend", "narrow", "unbounded"])
def test_text_and_counts(windowed, oracles, draft, k, mode):
    with cpu_engine(
        windowed["same"], windowed[draft], k, cudagraph_mode=mode, uniform_request_counts=[5]
    ) as engine:
        outs = engine.generate(PROMPTS, greedy(24))
        assert_no_leak(engine)
    for prompt, out in zip(PROMPTS, outs, strict=True):
        expected = speculate(oracles["same"], oracles[draft], prompt, k=k, max_new_tokens=24)
        expect(out, expected)


def test_the_windows_matter(oracles):
    """The models differ by their windows alone, and so do their texts."""
    texts = [oracles[name].greedy(PROMPTS[-1], 24)[0] for name in ("same", "narrow", "unbounded")]
    assert len({tuple(text) for text in texts}) == 3


def test_a_prefix_is_shared_across_a_window(windowed, oracles):
    """A cached prefix holds keys that the window of the rest no longer needs, and those it does."""
    with cpu_engine(windowed["same"], windowed["blend"], 4) as engine:
        first = engine.generate(PROMPTS[-1], greedy(12))
        again = [*PROMPTS[-1], *first.token_ids, 5]
        expected = speculate(oracles["same"], oracles["blend"], again, k=4, max_new_tokens=12)
        expect(engine.generate(again, greedy(12)), expected)
