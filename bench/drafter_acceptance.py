"""Tokens per step of several drafters by category of prompt, greedy, and whether text is the same.

    python bench/drafter_acceptance.py --prompts FILE --drafts ngram,suffix --ks 4,8
    python bench/drafter_acceptance.py --prompts FILE --num-prompts 480 --drafts eagle:HEAD \\
        --ks 4 --device cuda --num-seqs 64 --out bench/results/drafter_acceptance.json

FILE: JSON lines, {"id", "category", "turns"}. Of one request at a time, "suffix" looks into the
outputs of those before. Time per token is that of the whole batch, prompts included.
"""

import argparse
import json
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch

import specdec
from specdec.api import chat_prompts
from specdec.bench.environment import describe
from specdec.bench.prompts import Prompt, load_prompts, spread


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=None)
    parser.add_argument("--prompts", default=None)
    parser.add_argument("--num-prompts", type=int, default=12)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--drafts", default="ngram,suffix")
    parser.add_argument("--ks", default="4,8")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--num-seqs", type=int, default=1)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def run(
    args: argparse.Namespace, prompts: list[Prompt], draft: str | None, k: int
) -> tuple[dict[str, Any], list[list[int]]]:
    """One drafter's row, and the texts."""
    params = specdec.SamplingParams(max_new_tokens=args.new_tokens)
    committed: dict[str, int] = defaultdict(int)
    steps: dict[str, int] = defaultdict(int)
    drafted: Counter[int] = Counter()
    accepted: Counter[int] = Counter()
    with specdec.Engine(
        args.model,
        draft,
        k,
        max_num_seqs=args.num_seqs,
        device=args.device,
        max_model_len=args.max_model_len,
        cudagraph_mode="NONE" if args.device == "cpu" else "FULL_AND_PIECEWISE",
    ) as engine:
        room = args.max_model_len - args.new_tokens
        ids = [each[-room:] for each in chat_prompts(engine, [p.text for p in prompts])]
        started = time.perf_counter()
        if args.num_seqs == 1:
            outs = [engine.generate(each, params) for each in ids]
        else:
            outs = engine.generate(ids, params)
        seconds = time.perf_counter() - started
    for prompt, out in zip(prompts, outs, strict=True):
        stats = out.stats
        for name in (prompt.category, "all"):
            committed[name] += stats.committed_by_steps
            steps[name] += stats.steps
        for d, a in zip(stats.drafted_per_step, stats.accepted_per_step, strict=True):
            drafted.update(range(d))
            accepted.update(range(a))
    row = {
        "draft": draft,
        "k": k,
        "drafted": drafted.total(),
        "accepted": accepted.total(),
        "accepted_by_position": [round(accepted[i] / drafted[i], 4) for i in sorted(drafted)],
        "steps": steps["all"],
        "tokens_per_step": {n: round(committed[n] / steps[n], 3) for n in committed if steps[n]},
        "tokens_per_second": sum(len(out.token_ids) for out in outs) / seconds,
    }
    return row, [out.token_ids for out in outs]


def main() -> None:
    args = parse()
    prompts = spread(load_prompts(args.prompts), args.num_prompts)
    plain, texts = run(args, prompts, None, 0)
    rows = [plain]
    for k in map(int, args.ks.split(",")):
        for draft in args.drafts.split(","):
            row, own = run(args, prompts, draft, k)
            row["texts_equal"] = sum(a == b for a, b in zip(own, texts, strict=True))
            rows.append(row)
            by_category = " ".join(f"{n} {v:.2f}" for n, v in row["tokens_per_step"].items())
            rate = row["accepted"] / max(row["drafted"], 1)
            same = f"{row['texts_equal']} of {len(texts)} texts equal"
            print(f"{draft} k={k}: {by_category}; accepted {rate:.0%}; {same}", file=sys.stderr)
    report = {
        "schema": 1,
        "environment": describe(torch.device(args.device)),
        "settings": {
            "prompts": Path(args.prompts).name if args.prompts else "the project's own",
            "num_prompts": len(prompts),
            "new_tokens": args.new_tokens,
            "num_seqs": args.num_seqs,
        },
        "rows": rows,
    }
    text = json.dumps(report, indent=1)
    if args.out is not None:
        args.out.write_text(text + "\n", encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
