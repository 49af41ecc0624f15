"""specdec beside other engines: the same weights, prompts and k, one run, texts compared.

pair     an 8B-shaped target whose layers from the third on cost their time and add nothing, and as
         draft its first two layers: full cost, perfect acceptance, no simulation. specdec at 1, 8,
         32 and 64 requests with k=4 and k=0; transformers' assisted generation at one, on the very
         same memory; flashspec and economize through a runner where ``--small-peers`` names its
         folder (with ``run_small_peer.py`` and the unpacked packages in it).
smollm2  the bundled model on real prompts, one at a time: n-grams against transformers' prompt
         lookup, its own first layers as a draft model against ``assistant_model``, and its trained
         head, alone and behind lookup.

    python bench/peers.py --out bench/results/peers.json
    python bench/peers.py --only pair --small-peers FOLDER
    python bench/peers.py --tiny --device cpu
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from made import made_pair
from rich.console import Console

import specdec
from specdec.api import chat_prompts
from specdec.bench.environment import describe
from specdec.bench.floor import copy_bandwidth, step_bytes
from specdec.bench.peers import Task, exported, run_peer
from specdec.bench.prompts import load_prompts, spread
from specdec.tables import plain_table
from specdec.verifier.loading import save_first_layers, save_model

SECTIONS = ("pair", "smollm2")
SMALL_PEERS = ("flashspec", "economize")
PROMPT_TOKENS = 2048  # of one pass
K = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    shape: str = "8B"
    counts: tuple[int, ...] = (1, 8, 32, 64)
    prompt: int = 900
    new: int = 128
    num_prompts: int = 4  # of SmolLM2
    smollm2_new: int = 96
    draft_layers: int = 8


REAL = Sizes()
TINY = Sizes(
    shape="tiny", counts=(1, 2), prompt=40, new=24, num_prompts=1, smollm2_new=6, draft_layers=2
)


def ours(
    engine: specdec.Engine, prompts: Sequence[list[int]], k: int, new: int
) -> tuple[dict[str, Any], list[list[int]]]:
    """Tokens per second while all prompts are being continued, and their texts."""
    params = specdec.SamplingParams(max_new_tokens=new, ignore_eos=True, k=k)
    requests = [engine.add_request(prompt, params)[0] for prompt in prompts]
    while any(not request.output_ids for request in requests):
        engine.step()
    for _ in range(2):
        engine.step()
    _synchronize(engine.device)
    tokens = sum(len(request.output_ids) for request in requests)
    first, started = requests[0].stats.steps, time.perf_counter()
    while all(request.finish_reason is None for request in requests):
        engine.step()
    _synchronize(engine.device)
    seconds = time.perf_counter() - started
    tokens = sum(len(request.output_ids) for request in requests) - tokens
    steps = requests[0].stats.steps - first
    while any(request.finish_reason is None for request in requests):
        engine.step()
    drafted = sum(request.stats.drafted for request in requests)
    accepted = sum(request.stats.accepted for request in requests)
    row = {
        "num_reqs": len(requests),
        "k": k,
        "tokens_per_second_per_user": tokens / len(requests) / seconds,
        "ms_per_step": 1e3 * seconds / max(steps, 1),
        "acceptance_rate": accepted / drafted if drafted else 0.0,
    }
    return row, [request.output_ids for request in requests]


def pair(report: dict[str, Any], sizes: Sizes, device: torch.device, runner: Path | None) -> None:
    target, draft = made_pair(sizes.shape, device)
    generator = torch.Generator().manual_seed(0)
    vocab = target.config.vocab_size
    prompts = torch.randint(3, vocab - 1, (1, sizes.prompt), generator=generator).tolist()
    prompts += torch.randint(
        3, vocab - 1, (max(sizes.counts) - 1, sizes.prompt), generator=generator
    ).tolist()
    rows, alone = report["pair"]["specdec"], []
    with specdec.Engine(
        target,  # type: ignore[arg-type]
        draft,  # type: ignore[arg-type]
        K,
        device=str(device),
        max_num_seqs=max(sizes.counts),
        max_num_batched_tokens=PROMPT_TOKENS,
        max_model_len=min(2048, target.config.max_position_embeddings),
        uniform_request_counts=sizes.counts,
        # Prompts are not what is timed: they run without graphs.
        cudagraph_mode="FULL_DECODE_ONLY",
        capture="lazy",
        enable_prefix_caching=False,
    ) as engine:
        step = engine._runner.step
        for count in sizes.counts:
            # Those that begin first go on while the others' prompts are read.
            passes = -(-count * sizes.prompt // PROMPT_TOKENS)
            new = sizes.new + 2 * (1 + K) * (passes - 1)
            ours(engine, prompts[:count], K, 4 * (1 + K))
            texts = {}
            for k in (0, K):
                row, texts[k] = ours(engine, prompts[:count], k, new)
                read = step_bytes(step.model, step.drafter, count, k, sizes.prompt + new / 2)
                floor = sum(read.values()) / report["bandwidth_bytes_per_second"]
                per_step = 1 + k * row["acceptance_rate"]
                row["floor_tokens_per_second_per_user"] = per_step / floor
                row["texts_equal_to_k0"] = sum(map(list.__eq__, texts[k], texts[0]))
                say(f"pair: specdec, {row}")
                rows.append(row)
            alone = alone or [texts[0][0][: sizes.new]]
    gc.collect()
    task = Task(
        target=target,
        draft=draft,
        dtype=target.dtype,
        device=device,
        max_new_tokens=sizes.new,
        ignore_eos=True,
        max_model_len=2048,
    )
    report["pair"]["peers"] += run_peer("transformers", task, prompts[:1], alone, (0, K), say)
    if runner is not None:
        with tempfile.TemporaryDirectory() as folder:
            paths = [str(save_model(m, Path(folder) / n)) for m, n in ((target, "t"), (draft, "d"))]
            # Their processes need the memory.
            del target, draft, task, engine, step
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            for mode in SMALL_PEERS:
                report["pair"]["peers"].append(_small_peer(runner, mode, paths, sizes))


def _small_peer(folder: Path, mode: str, paths: list[str], sizes: Sizes) -> dict[str, Any]:
    """Its own process; what it prints last is one JSON line. ``equal``: to its own plain text."""
    numbers = [str(number) for number in (K, sizes.new, sizes.prompt)]
    script = folder / "run_small_peer.py"
    ran = subprocess.run(
        [sys.executable, str(script), mode, *paths, *numbers],
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in ran.stdout.splitlines() if line.startswith("{")]
    if ran.returncode != 0 or not lines:
        say(f"pair: {mode} failed:\n{ran.stderr[-2000:]}")
        return {"peer": mode, "k": K, "error": ran.stderr[-2000:]}
    made = json.loads(lines[-1])
    say(f"pair: {mode}, {made}")
    return {
        "peer": mode,
        "method": "draft model",
        "k": K,
        "tokens_per_second": made["tok_s"],
        "texts_equal_to_its_own_plain": bool(made["equal"]),
    }


def smollm2(report: dict[str, Any], sizes: Sizes, device: torch.device) -> None:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    texts: list[list[int]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole = exported(None, folder / "whole", dtype)
        first = save_first_layers(None, folder / "first", sizes.draft_layers, dtype=dtype)
        from specdec.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(None)
        assert tokenizer is not None
        tokenizer.save(first)
        layers = f"its first {sizes.draft_layers} layers"
        labels = {"ngram": "ngram", "auto": "head", "suffix+auto": "suffix + head", first: layers}
        for draft, label in labels.items():
            with specdec.Engine(
                None,
                draft,
                K,
                device=str(device),
                dtype=str(dtype).removeprefix("torch."),
                max_num_seqs=1,
                max_model_len=2048,
                capture="lazy",
                enable_prefix_caching=False,
                # Both k answer the same prompts: "suffix" would find the other's texts.
                suffix_history=0,
            ) as engine:
                prompts = [
                    chat_prompts(engine, prompt.text)
                    for prompt in spread(load_prompts(), sizes.num_prompts)
                ]
                ours(engine, prompts[:1], K, 4 * (1 + K))
                for k in (0, K):
                    made = [ours(engine, [ids], k, sizes.smollm2_new) for ids in prompts]
                    own = [each[0] for _, each in made]
                    texts = texts or own
                    speeds = [row["tokens_per_second_per_user"] for row, _ in made]
                    rates = [row["acceptance_rate"] for row, _ in made]
                    row = {
                        "draft": label if k else "none",
                        "k": k,
                        "num_reqs": 1,
                        # Of texts of one length: the harmonic mean is their common speed.
                        "tokens_per_second_per_user": len(speeds) / sum(1 / s for s in speeds),
                        "acceptance_rate": sum(rates) / len(rates),
                        "texts": len(own),
                        "texts_equal_to_k0": sum(map(list.__eq__, own, texts)),
                    }
                    say(f"smollm2: specdec, {row}")
                    report["smollm2"]["specdec"].append(row)
            if "auto" in str(draft):
                continue
            task = Task(
                target=whole,
                draft=draft,
                dtype=dtype,
                device=device,
                max_new_tokens=sizes.smollm2_new,
                ignore_eos=True,
                max_model_len=2048,
            )
            ks = (0, K) if draft == "ngram" else (K,)
            report["smollm2"]["peers"] += run_peer("transformers", task, prompts, texts, ks, say)


def show(report: dict[str, Any]) -> None:
    console = Console(width=110)
    for name in SECTIONS:
        section = report[name]
        if not section["specdec"]:
            continue
        numbers = ["requests", "k", "tokens/s per user", "floor", "accepted", "texts as k=0"]
        table = plain_table(name, ["engine"], numbers)
        for row in section["specdec"]:
            floor = row.get("floor_tokens_per_second_per_user")
            texts = row.get("texts", row["num_reqs"])
            equal = f"{row['texts_equal_to_k0']}/{texts}"
            table.add_row(
                f"specdec {row.get('draft', '')}",
                str(row["num_reqs"]),
                str(row["k"]),
                f"{row['tokens_per_second_per_user']:.1f}",
                f"{floor:.0f}" if floor is not None else "-",
                f"{row['acceptance_rate']:.0%}",
                equal if row["texts_equal_to_k0"] == texts else f"[bold red]{equal}[/bold red]",
            )
        for row in section["peers"]:
            if "error" in row:
                table.add_row(row["peer"], "1", str(row["k"]), "failed", "-", "-", "-")
                continue
            speed = row.get("decode_tokens_per_second", row["tokens_per_second"])
            equal = str(row.get("texts_equal_to_its_own_plain", ""))
            if "texts_equal_to_k0" in row:
                equal = f"{row['texts_equal_to_k0']}/{row['texts']}"
            label = f"{row['peer']} {row['method']}"
            table.add_row(label, "1", str(row["k"]), f"{speed:.1f}", "-", "-", equal)
        console.print(table)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default=",".join(SECTIONS), help="of pair, smollm2")
    parser.add_argument("--small-peers", type=Path, help="folder of run_small_peer.py and packages")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the script")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    sections = options.only.split(",")
    if unknown := set(sections) - set(SECTIONS):
        parser.error(f"--only: {sorted(unknown)} are not among {SECTIONS}")
    if options.small_peers and not (options.small_peers / "run_small_peer.py").is_file():
        parser.error(f"--small-peers: no run_small_peer.py in {options.small_peers}")
    sizes = TINY if options.tiny else REAL
    device = torch.device(options.device)
    begun = time.perf_counter()
    report: dict[str, Any] = {
        "benchmark": "peers",
        "schema_version": 1,
        **describe(device),
        "bandwidth_bytes_per_second": copy_bandwidth(device),
        "pair": {"specdec": [], "peers": []},
        "smollm2": {"specdec": [], "peers": []},
    }
    for section in sections:
        if section == "pair":
            pair(report, sizes, device, options.small_peers)
        else:
            smollm2(report, sizes, device)
        report["seconds"] = time.perf_counter() - begun
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        say(f"-- {section} done after {report['seconds']:.0f} s")
    show(report)


if __name__ == "__main__":
    main()
