"""The report's acceptance against a slow count of chains of their own, and against the engine."""

from pathlib import Path

import pytest
import torch
from made import SHAPE, bigram_model, head_of, target_of
from made import documents as random_documents
from slow_head import SlowHead
from tiny import blended, make_tiny
from torch import Tensor

import specdec
from specdec.train.acceptance import Acceptance, leading_matches, measure
from specdec.train.corpus import Document
from specdec.train.export import reload_head, save_head
from specdec.train.finetune import DraftModelTraining
from specdec.train.head_training import HeadTraining
from specdec.train.rows import PackedRows
from specdec.train.target import FrozenTarget

EOS = 7


def greedy_documents(
    model: Path, lengths: list[int], *, draft: Path | None = None, k: int = 0, vocab: int = 64
) -> tuple[list[Document], list[specdec.Generation]]:
    """The target's greedy texts as documents, and what an engine says of them."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(vocab, (5,), generator=generator).tolist() for _ in lengths]
    params = [specdec.SamplingParams(max_new_tokens=length) for length in lengths]
    with specdec.Engine(
        model, draft and str(draft), k, device="cpu", max_num_seqs=4, max_model_len=96
    ) as engine:
        results = engine.generate(prompts, params)
        assert isinstance(results, list)
    made = [
        Document(i, True, [*prompt, *r.token_ids], [(5, 5 + len(r.token_ids))])
        for i, (prompt, r) in enumerate(zip(prompts, results, strict=True))
    ]
    return made, results


def test_a_heads_report_is_a_slow_count_of_chains_that_feed_on_themselves(tmp_path: Path) -> None:
    """The report's chains go on with the text; here they go on with what they drafted."""
    model = bigram_model(tmp_path / "m", vocab=16, eos=EOS)
    target = target_of(model)
    made = head_of(target, list(range(16)), num_steps=2)
    teach(made, steps=60)
    save_head(made.head, made.vocab, tmp_path / "head", torch.float32)
    reload_head(made.head, tmp_path / "head")
    slow = SlowHead(tmp_path / "head", target.model.embed_tokens, target.model.lm_head)
    documents, _ = greedy_documents(model, [14, 9, 20, 11], vocab=16)
    rows = PackedRows(documents, 48, "cpu")
    for k in (1, 3):
        found = measure(made, rows, k, {EOS}, rows_per_batch=2)
        expected = slow_count(slow, target, documents, k)
        assert found == expected
    assert 0 < found.accepted[0] < found.drafted[0]


def slow_count(
    slow: SlowHead, target: FrozenTarget, documents: list[Document], k: int
) -> Acceptance:
    result = Acceptance(k, documents=len(documents))
    for document in documents:
        features = _features(target, document)
        ((start, end),) = document.spans
        length = start + 1
        while length < end:
            ended = document.tokens[end - 1] == EOS
            count = k if ended else min(k, end - length - 1)
            drafts = slow.draft(features, document.tokens, length - 2, k)[:count]
            accepted = 0
            while accepted < min(count, end - length):
                if drafts[accepted] != document.tokens[length + accepted]:
                    break
                accepted += 1
            new = min(accepted + 1, end - length)
            result.add_step(count, accepted, new)
            length += new
    return result


@pytest.mark.parametrize("k", [1, 4])
def test_a_draft_models_report_is_what_the_engine_counts(tmp_path: Path, k: int) -> None:
    """The same texts through an engine with this draft: equal steps, drafts and acceptances."""
    model = make_tiny(tmp_path / "m", vocab=64, eos=EOS, **SHAPE)
    draft = blended(model, tmp_path / "draft", 0.2)
    documents, results = greedy_documents(model, [30, 17, 9, 24, 30, 30], draft=draft, k=k)
    made = DraftModelTraining(draft, target_of(model, ()), lora_rank=None, seed=0)
    found = measure(made, PackedRows(documents, 64, "cpu"), k, {EOS}, rows_per_batch=2)
    stats = [result.stats for result in results]
    assert any(r.finish_reason == "stop" for r in results)
    assert found.steps == sum(s.steps for s in stats)
    assert found.tokens == sum(s.committed_by_steps for s in stats)
    # The engine's budget goes on past an end of sequence as the report's does, up to its length.
    assert sum(found.accepted) == sum(s.accepted for s in stats)
    cut = [s for s, r in zip(stats, results, strict=True) if r.finish_reason == "length"]
    only_cut = [d for d, r in zip(documents, results, strict=True) if r.finish_reason == "length"]
    again = measure(made, PackedRows(only_cut, 64, "cpu"), k, {EOS}, rows_per_batch=2)
    assert sum(again.drafted) == sum(s.drafted for s in cut)


def test_leading_matches_by_hand() -> None:
    tokens = torch.tensor([[5, 6, 7, 8, 9]])
    proposals = torch.tensor([[[7, 8], [8, 1], [2, 9], [0, 0], [-1, -1]]])
    assert leading_matches(proposals, tokens).tolist() == [[2, 1, 0, 0, 0]]


def test_evaluation_stops_where_time_does(tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "m", vocab=64, **SHAPE)
    documents, _ = greedy_documents(model, [20] * 4)
    made = DraftModelTraining(model, target_of(model, ()), lora_rank=None, seed=0)
    rows = PackedRows(documents, 32, "cpu")
    assert len(rows) == 4
    cut = measure(made, rows, 2, set(), rows_per_batch=1, out_of_time=lambda: True)
    assert cut.documents == 1
    assert cut.by_position == [1.0, 1.0]


def _features(target: FrozenTarget, document: Document) -> Tensor:
    batch = PackedRows([document], 64, "cpu").batch([0])
    return target(batch).features[0]


def teach(made: HeadTraining, steps: int) -> None:
    """A few steps on random text, so that some drafts are right and some are not."""
    rows = PackedRows(random_documents([64] * 8, 16), 64, "cpu")
    optimizer = torch.optim.Adam(made.parameters(), lr=1e-2)
    for step in range(steps):
        losses = made.losses(rows.batch([step % 8]))
        optimizer.zero_grad()
        losses.total.backward()
        optimizer.step()
