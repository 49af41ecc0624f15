"""The oracle's short cut against speculation spelled out token by token."""

import pytest
from harness import PROMPTS
from oracle import Oracle, speculate


def spelled_out(target: Oracle, draft: Oracle, prompt, k, max_new_tokens, eos):
    """Draft, verify and accept one token at a time."""
    text = [target.next_token(prompt)]
    drafted, accepted = [], []
    while text[-1] not in eos and len(text) < max_new_tokens:
        proposal: list[int] = []
        while len(proposal) < min(k, max_new_tokens - len(text) - 1):
            proposal.append(draft.next_token([*prompt, *text, *proposal]))
        drafted.append(len(proposal))
        accepted.append(0)
        for token in [*proposal, None]:
            wanted = target.next_token([*prompt, *text])
            text.append(wanted)
            if token == wanted:
                accepted[-1] += 1
            if token != wanted or wanted in eos:
                break
    return text, drafted, accepted


@pytest.mark.parametrize("name", ["same", "negated", "blend.1", "blend.3", "layer_skip:1"])
@pytest.mark.parametrize("k", [1, 4])
def test_short_cut_equals_token_by_token_speculation(oracles, name, k):
    for prompt in PROMPTS[:3]:
        for eos in ((), (oracles["target"].greedy(prompt, 9)[0][-1],)):
            found = speculate(
                oracles["target"], oracles[name], prompt, k=k, max_new_tokens=14, eos=eos
            )
            steps = (found.token_ids, found.drafted, found.accepted)
            assert steps == spelled_out(oracles["target"], oracles[name], prompt, k, 14, eos)


def test_shared_prompts_hold_no_close_call(oracles):
    """So that every comparison of the other modules compares whole texts and counts."""
    for draft in oracles.values():
        for prompt in PROMPTS:
            found = speculate(oracles["target"], draft, prompt, k=4, max_new_tokens=24)
            assert found.num_certain == 24


def test_drafts_cover_no_full_and_partial_acceptance(oracles):
    accepted = {
        name: speculate(oracles["target"], draft, PROMPTS[3], k=4, max_new_tokens=24).accepted
        for name, draft in oracles.items()
    }
    assert set(accepted["negated"]) == {0}
    assert set(accepted["same"][:-1]) == {4}
    assert len(set(accepted["blend.1"])) >= 3
    assert sum(accepted["blend.3"]) < sum(accepted["blend.1"])
