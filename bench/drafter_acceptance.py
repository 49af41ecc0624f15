"""Tokens per step of several drafters by category of prompt, greedy. Their speed is not shown.

    python bench/drafter_acceptance.py --prompts FILE --drafts ngram,suffix --ks 4,8

FILE: JSON lines, {"id", "category", "turns"}. Prompts run one after the other, so that "suffix"
looks into the outputs of those before.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

import specdec
from specdec.api import chat_prompts
from specdec.bench.environment import describe
from specdec.bench.prompts import load_prompts, spread


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=None)
    parser.add_argument("--prompts", default=None)
    parser.add_argument("--num-prompts", type=int, default=12)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--drafts", default="ngram,suffix")
    parser.add_argument("--ks", default="4,8")
    parser.add_argument("--max-model-len", type=int, default=2048)
    return parser.parse_args()


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    prompts = spread(load_prompts(args.prompts), args.num_prompts)
    params = specdec.SamplingParams(max_new_tokens=args.new_tokens)
    for k in map(int, args.ks.split(",")):
        for draft in args.drafts.split(","):
            committed: dict[str, int] = defaultdict(int)
            steps: dict[str, int] = defaultdict(int)
            with specdec.Engine(
                args.model,
                draft,
                k,
                max_num_seqs=1,
                device="cpu",
                max_model_len=args.max_model_len,
                cudagraph_mode="NONE",
            ) as engine:
                for prompt, ids in zip(
                    prompts, chat_prompts(engine, [p.text for p in prompts]), strict=True
                ):
                    stats = engine.generate(ids, params).stats
                    for name in (prompt.category, "all"):
                        committed[name] += stats.committed_by_steps
                        steps[name] += stats.steps
                totals = engine.stats()
            yield {
                "draft": draft,
                "k": k,
                "drafted": totals.drafted,
                "accepted": totals.accepted,
                "steps": steps["all"],
                "tokens_per_step": {n: round(committed[n] / steps[n], 3) for n in committed},
            }


def main() -> None:
    args = parse()
    rows = []
    for row in measure(args):
        rows.append(row)
        by_category = " ".join(f"{n} {v:.2f}" for n, v in row["tokens_per_step"].items())
        rate = row["accepted"] / max(row["drafted"], 1)
        print(f"{row['draft']} k={row['k']}: {by_category}; accepted {rate:.0%}", file=sys.stderr)
    settings = {"num_prompts": args.num_prompts, "new_tokens": args.new_tokens}
    print(
        json.dumps(
            {"environment": describe(torch.device("cpu")), "settings": settings, "rows": rows}
        )
    )


if __name__ == "__main__":
    main()
