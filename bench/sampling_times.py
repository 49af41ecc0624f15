"""Time the kernels of sampled rows on one GPU, beside the sort that they replace.

    python bench/sampling_times.py --out sampling.json

Sections: draw (cut every row and choose a token), draft (a drafter's token and its distribution),
step (parameters, rules, acceptance and commit behind a verify pass; no request asks for
log-probabilities, which the baseline computes all the same). All times are medians of graph
replays. The floor is one read of the logits at the bandwidth of a device-to-device copy; logits of
few rows lie in the L2 cache, as they do behind the output layer.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timing import copy_bandwidth, graph_us
from torch import Tensor

from specdec.kernels import sampler_triton
from specdec.kernels.sampler import SamplingRows
from specdec.kernels.sampling import ACCEPT, COUPLED, DRAFT, RECOVER, gumbel_noise, uniform_noise
from specdec.verifier import acceptance, passes, processors, sampling
from specdec.verifier.acceptance import Acceptance
from specdec.verifier.batch import PassResult
from specdec.verifier.state import DecodeState, RowState

VOCABS = (49_152, 128_256)
ROWS = (1, 5, 40, 320)
# (name, temperature, top_k, top_p, spread of the logits)
SETTINGS = [
    ("temperature", 0.8, 0, 1.0, 3.0),
    ("top_k 50, top_p 0.95", 0.8, 50, 0.95, 3.0),
    ("top_p 0.95", 0.8, 0, 0.95, 4.0),
    ("top_p 0.9, flat", 1.0, 0, 0.9, 1.0),
]


def sorted_log_probs(logits: Tensor, rows: SamplingRows) -> Tensor:
    """The baseline: a stable sort of every row."""
    temperature = rows.temperature.where(~rows.greedy, 1.0)[:, None, None]
    logp = (logits / temperature).log_softmax(-1)
    ranked, order = logp.sort(dim=-1, descending=True, stable=True)
    vocab_size = logits.shape[-1]
    top_k = rows.top_k.where(rows.top_k > 0, vocab_size)[:, None, None]
    keep = torch.arange(vocab_size, device=logits.device) < top_k
    ranked = ranked.masked_fill(~keep, -torch.inf).log_softmax(-1)
    probs = ranked.exp()
    before = probs.cumsum(-1) - probs
    keep = keep & (before < rows.top_p[:, None, None])
    keep = keep & (probs >= rows.min_p[:, None, None] * probs[..., :1])
    keep[..., 0] = True
    ranked = ranked.masked_fill(~keep, -torch.inf).log_softmax(-1)
    return torch.empty_like(ranked).scatter_(-1, order, ranked)


def sorted_draw(logits: Tensor, rows: SamplingRows) -> Tensor:
    logp = sorted_log_probs(logits, rows)
    noise = gumbel_noise(rows.seed, rows.indices(logits.shape[1]), logits.shape[2], COUPLED)
    return torch.where(rows.greedy[:, None], logits.argmax(-1), (logp + noise).argmax(-1))


def sorted_draft(logits: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
    logp = sorted_log_probs(logits[:, None], rows)
    index, vocab_size = rows.output_index[:, None], logits.shape[1]
    shared = gumbel_noise(rows.seed, index, vocab_size, COUPLED)
    own = gumbel_noise(rows.seed, index, vocab_size, DRAFT)
    noise = torch.where(rows.coupled[:, None, None], shared, own)
    sampled = (logp + noise).argmax(-1)[:, 0]
    return torch.where(rows.greedy, logits.argmax(-1), sampled), logp[:, 0].exp()


def sorted_accept(
    logits: Tensor, drafts: Tensor, drafted: Tensor, rows: SamplingRows
) -> Acceptance:
    """The baseline's acceptance of one-hot drafts."""
    finite = logits.amax(-1).isfinite()
    finite = finite & logits.amax(-1).isfinite()
    logp = sorted_log_probs(logits, rows)
    finite = finite & (logp.amax(-1).isfinite() | rows.greedy[:, None])
    query_len, vocab_size = logits.shape[1:]
    noise = gumbel_noise(rows.seed, rows.indices(query_len), vocab_size, COUPLED)
    targets = torch.where(rows.greedy[:, None], logits.argmax(-1), (logp + noise).argmax(-1))
    by_rejection = ~rows.greedy & ~rows.coupled
    target = logp[:, :-1].gather(2, drafts[..., None])[..., 0].exp()
    passing = uniform_noise(rows.seed, rows.indices(query_len - 1), ACCEPT) < target
    agrees = torch.where(by_rejection[:, None], passing, drafts == targets[:, :-1])
    steps = torch.arange(query_len, device=logits.device)
    agrees = agrees & finite[:, :-1] & (steps[:-1] < drafted[:, None])
    accepted = agrees.long().cumprod(1).sum(1)
    own = targets.gather(1, accepted[:, None])[:, 0]
    probs = logp.gather(1, accepted[:, None, None].expand(-1, 1, vocab_size))[:, 0].exp()
    at = accepted.clamp_max(query_len - 2)[:, None]
    proposal = torch.zeros_like(probs).scatter_(1, drafts.gather(1, at), 1.0)
    residual = (probs - proposal.where((accepted < drafted)[:, None], 0.0)).clamp_min(0.0)
    probs = residual.where(residual.sum(-1, keepdim=True) > 0, probs)
    index = (rows.output_index + accepted)[:, None]
    recover = gumbel_noise(rows.seed, index, vocab_size, RECOVER)[:, 0]
    own = torch.where(by_rejection, (probs.log() + recover).argmax(-1), own)
    last = accepted[:, None]
    tokens = torch.nn.functional.pad(drafts, (0, 1)).where(steps < last, own[:, None])
    return Acceptance(
        tokens=tokens.where(steps <= last, -1),
        num_accepted=accepted,
        failed=~finite.gather(1, last)[:, 0],
    )


def sorted_step(logits: Tensor, drafts: Tensor, drafted: Tensor, state: DecodeState) -> Tensor:
    """The baseline of a whole step behind the logits."""
    # One index kernel a field, as the CPU has it.
    slots = torch.arange(logits.shape[0], device="cuda")
    rows = RowState(state, slots, sampled=True)
    column = state.column
    prompt_lens = column("prompt_len")[slots]
    sampling_rows = SamplingRows(
        temperature=column("temperature")[slots],
        top_k=column("top_k")[slots],
        top_p=column("top_p")[slots],
        min_p=column("min_p")[slots],
        seed=column("seed")[slots],
        coupled=column("coupled")[slots] > 0,
        output_index=rows.seq_lens - prompt_lens,
    )
    rules = rows.rules
    assert rules is not None
    ruled = logits + rules.rules.bias[rules.slots][:, None]
    ruled = processors._penalise(ruled, drafts, rules)
    ruled = processors._ban_bad_words(ruled, drafts, rules)
    ruled = processors._ban_early_stops(ruled, rules)
    accepted = sorted_accept(ruled, drafts, drafted, sampling_rows)
    logp = logits.log_softmax(-1)
    logp.topk(20, dim=-1)
    logp.gather(2, accepted.tokens.clamp_min(0)[..., None])
    failed = accepted.failed & rows.active
    num_new = (accepted.num_accepted + 1 - failed.long()).where(rows.active, 0)
    num_new, stopped = rows.up_to_stop(accepted.tokens, num_new)
    rows.commit(accepted.tokens, num_new, stopped | failed)
    return PassResult.pack(
        accepted.tokens, num_new, drafted, accepted.num_accepted, failed, None
    ).packed


def make_rows(
    num_reqs: int, temperature: float, top_k: int, top_p: float, coupled: bool
) -> SamplingRows:
    count = torch.arange(num_reqs, device="cuda")
    return SamplingRows(
        temperature=torch.full((num_reqs,), temperature, device="cuda"),
        top_k=torch.full_like(count, top_k),
        top_p=torch.full((num_reqs,), top_p, device="cuda"),
        min_p=torch.zeros(num_reqs, device="cuda"),
        seed=count,
        coupled=torch.full((num_reqs,), coupled, device="cuda"),
        output_index=count * 3,
    )


def both(new: Callable[[], object], old: Callable[[], object], num_rows: int) -> dict[str, float]:
    repeats = 20 if num_rows <= 5 else 5 if num_rows <= 40 else 1
    replays = 7 if num_rows <= 40 else 3
    return {
        "us": graph_us([new] * repeats, replays),
        "sort_us": graph_us([old] * max(1, repeats // 5), replays),
    }


def report(row: dict[str, Any]) -> dict[str, Any]:
    words = [f"{row['section']:<6}{row['vocab']:>8}{row['rows']:>5} rows  {row['setting']:<32}"]
    words += [f"{name} {row[name]:9.1f}" for name in ("us", "sort_us", "floor_us")]
    print("  ".join(words), flush=True)
    return row


def time_draws(bandwidth: float) -> list[dict[str, Any]]:
    results = []
    for vocab in VOCABS:
        for num_rows in ROWS:
            noise = torch.randn(num_rows, 1, vocab, device="cuda")
            floor = {"floor_us": 1e6 * 4 * noise.numel() / bandwidth}
            for name, temperature, top_k, top_p, spread in SETTINGS:
                arguments = (noise * spread, make_rows(num_rows, temperature, top_k, top_p, True))
                labels = {"vocab": vocab, "rows": num_rows, "setting": name}
                new = partial(sampler_triton.draw, *arguments, drafts=False)
                times = both(new, partial(sorted_draw, *arguments), num_rows)
                results.append(report({"section": "draw", **labels, **times, **floor}))
    return results


def time_drafts(bandwidth: float) -> list[dict[str, Any]]:
    results, vocab = [], VOCABS[-1]
    for num_reqs in (1, 8):
        logits = torch.randn(num_reqs, vocab, device="cuda") * 3
        floor = {"floor_us": 1e6 * 4 * logits.numel() / bandwidth}
        for kind in ("coupled", "rejection"):
            rows = make_rows(num_reqs, 0.8, 0, 1.0, kind == "coupled")
            labels = {"vocab": vocab, "rows": num_reqs, "setting": f"temperature, {kind}"}
            new = partial(sampling.draft_tokens, logits, rows)
            times = both(new, partial(sorted_draft, logits, rows), num_reqs)
            results.append(report({"section": "draft", **labels, **times, **floor}))
    return results


def make_state(num_reqs: int, vocab: int, coupled: bool, top_k: int, top_p: float) -> DecodeState:
    state = DecodeState(
        max_num_seqs=num_reqs, max_model_len=8192, block_size=16, vocab_size=vocab, device="cuda"
    )
    for row in range(num_reqs):
        ints = {"end": 8192, "k": 4, "prompt_len": 100, "seed": row}
        ints |= {"coupled": int(coupled), "top_k": top_k}
        floats = {"temperature": 0.8, "top_p": top_p}
        state.write_row(row, list(range(100)), ints, floats)
        state.write_rules(
            row, bias={}, penalties=[0.0] * 3, min_tokens=0, stop_ids=[], bad_words=[]
        )
    return state


def new_step(logits: Tensor, drafts: Tensor, drafted: Tensor, state: DecodeState) -> Tensor:
    """A whole step behind the logits, as ``specdec.step`` has it."""
    rows = RowState(state, torch.arange(logits.shape[0], device="cuda"), sampled=True)
    accepted = acceptance.accept(logits, drafts, drafted, None, rows.sampling, rows.rules)
    logprobs = sampling.token_logprobs(logits, accepted.tokens, 20, rows.wants_logprobs)
    return passes.commit(rows, accepted, drafted, logprobs).packed


def time_steps(bandwidth: float) -> list[dict[str, Any]]:
    results, vocab = [], VOCABS[-1]
    for num_reqs, query_len in ((1, 2), (1, 5), (8, 5)):
        logits = torch.randn(num_reqs, query_len, vocab, device="cuda") * 3
        drafted = torch.full((num_reqs,), query_len - 1, device="cuda")
        inputs = (logits, logits[:, :-1].argmax(-1), drafted)
        floor = {"floor_us": 1e6 * 4 * logits.numel() / bandwidth}
        for kind, top_k, top_p in (
            ("coupled", 0, 1.0),
            ("coupled", 50, 0.95),
            ("rejection", 50, 0.95),
        ):
            state = make_state(num_reqs, vocab, kind == "coupled", top_k, top_p)
            name = f"{kind}, {'top_k 50, top_p 0.95' if top_k else 'temperature'}"
            labels = {"vocab": vocab, "rows": num_reqs * query_len, "setting": name}
            times = both(
                partial(new_step, *inputs, state),
                partial(sorted_step, *inputs, state),
                num_reqs * query_len,
            )
            results.append(report({"section": "step", **labels, **times, **floor}))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    args = parser.parse_args()
    started = time.perf_counter()
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {bandwidth / 1e12:.2f} TB/s")
    results = [*time_steps(bandwidth), *time_drafts(bandwidth), *time_draws(bandwidth)]
    ratio = statistics.median(row["sort_us"] / row["us"] for row in results)
    print(f"median speed-up {ratio:.1f}, {time.perf_counter() - started:.0f} s")
    if args.out:
        args.out.write_text(json.dumps({"bandwidth": bandwidth, "results": results}, indent=1))


if __name__ == "__main__":
    main()
