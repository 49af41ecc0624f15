"""A trained head in the engine: it accepts what the training report says, draft by draft."""

import io
from pathlib import Path
from typing import Any

import pytest
from made import bigram_model
from rich.console import Console

import specdec
from specdec.train.corpus import Corpus
from specdec.train.run import train
from specdec.train.settings import TrainSettings
from specdec.train.writer import is_held_out

pytest.importorskip("specdec.drafters.eagle")


@pytest.mark.parametrize(
    "options",
    [{}, {"parallel": True}, {"head": "own", "draft_vocab": 40}],
    ids=["chain", "parallel", "own head"],
)
def test_the_engine_counts_what_the_report_says(tmp_path: Path, options: dict[str, Any]) -> None:
    """One wrong position, feature or norm in either of the two would change a count."""
    shape = {"layers": 4, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 96}
    model, out = bigram_model(tmp_path / "m", bos=1, **shape), tmp_path / "head"
    settings = TrainSettings(
        model=str(model),
        out=str(out),
        device="cpu",
        tokens=1000,
        seq_len=128,
        batch_tokens=256,
        max_user_tokens=16,
        max_answer_tokens=64,
        num_seqs=32,
        unroll=4,
        steps=50,
        lr=5e-3,
        **({"draft_vocab": 64} | options),
    )
    report = train(settings, Console(file=io.StringIO()), plot=False)
    held_out = [each for each in Corpus(out / "data").documents() if is_held_out(each.number)]
    for counted in report["acceptance"]["held_out"][:2]:
        with specdec.Engine(
            str(model), f"eagle:{out}", counted["k"], device="cpu", max_num_seqs=2
        ) as engine:
            results = engine.generate(
                [each.tokens[: each.spans[0][0]] for each in held_out],
                [specdec.SamplingParams(max_new_tokens=len(each.answer)) for each in held_out],
            )
        assert isinstance(results, list)
        assert [r.token_ids for r in results] == [each.answer for each in held_out]
        assert counted["steps"] == sum(r.stats.steps for r in results)
        assert sum(counted["drafted_by_position"]) == sum(r.stats.drafted for r in results)
        assert sum(counted["accepted_by_position"]) == sum(r.stats.accepted for r in results)
        assert 0 < sum(counted["accepted_by_position"]) < sum(counted["drafted_by_position"])
