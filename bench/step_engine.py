"""An engine whose passes are timed one by one, over rows written into its state by hand."""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from made import kv_bytes, weight_bytes

import specdec
from specdec.drafters.draft_model import DraftModelDrafter
from specdec.verifier.models.llama import CausalLM
from specdec.verifier.passes import accept_and_commit

ACCEPT_CHAIN = 20
# Cycles for which the device is kept busy, so that what is timed is enqueued as a whole.
SLEEP_CYCLES = 400_000
PROMPT_TOKENS = 2048  # of one pass
RATE = 0.8  # of the simulated acceptance


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How large everything is: for a GPU, or small enough to try the script on a CPU."""

    drafts: dict[str, str | None]  # shape -> shape of its draft model, None for n-grams
    ks: tuple[int, ...] = (0, 2, 4, 7)
    counts: tuple[int, ...] = (1, 4, 8, 32, 64)
    speed_shape: str = "8B"
    speed_counts: tuple[int, ...] = (1, 8, 32, 64)
    speed_prompt: int = 1000
    speed_steps: int = 50
    idle_shapes: tuple[str, ...] = ("135M", "8B")
    idle_steps: int = 500
    context: int = 1024
    max_model_len: int = 4096
    blocks_per_row: int = 96
    replays: int = 15


class StepEngine:
    """One engine, with rows that are written into its state by hand."""

    def __init__(
        self, target: CausalLM, draft: CausalLM | None, sizes: Sizes, rate: float = RATE
    ) -> None:
        self.sizes = sizes
        most = max(*sizes.counts, *sizes.speed_counts)
        # Only the graphs that are used are captured; prompts run without one.
        self.engine = specdec.Engine(
            target,  # type: ignore[arg-type]
            "ngram" if draft is None else draft,  # type: ignore[arg-type]
            max(sizes.ks),
            extra_k=[k for k in sizes.ks if 0 < k < max(sizes.ks)],
            device=str(target.device),
            max_num_seqs=most,
            max_num_batched_tokens=PROMPT_TOKENS,
            max_model_len=sizes.max_model_len,
            num_kv_blocks=most * sizes.blocks_per_row,
            uniform_request_counts=sorted({*sizes.counts, *sizes.speed_counts}),
            cudagraph_mode="FULL_DECODE_ONLY",
            capture="lazy",
            enable_prefix_caching=False,
            simulated_acceptance=rate,
        )
        self.runner = self.engine._runner
        self.step = self.runner.step
        self.on_gpu = self.engine.device.type == "cuda"
        self.step.kv_cache.data.normal_()
        drafter = self.step.drafter
        self.draft_model = drafter.model if isinstance(drafter, DraftModelDrafter) else None
        if isinstance(drafter, DraftModelDrafter):
            assert drafter.kv_cache is not None
            drafter.kv_cache.data.normal_()
        self.rows_at(1, sizes.context, 0)

    def rows_at(self, num_reqs: int, context: int, k: int, temperature: float = 0.0) -> None:
        """``num_reqs`` rows with ``context`` committed tokens, blocks of their own and room."""
        state = self.runner.state
        generator = torch.Generator().manual_seed(0)
        width = self.sizes.blocks_per_row if num_reqs > 1 else state.block_table.shape[1]
        for row in range(num_reqs):
            ids = torch.randint(self.step.vocab_size, (context,), generator=generator).tolist()
            state.write_blocks(row, 0, list(range(row * width, (row + 1) * width)))
            fields = {
                "end": self.sizes.max_model_len,
                "k": k,
                "prompt_len": context - 1,
                "draft_len": context - 1,
                "seed": row,
            }
            state.write_row(row, ids, fields, {"temperature": temperature, "top_p": 1.0})
            state.write_rules(
                row, bias={}, penalties=[0.0] * 3, min_tokens=0, stop_ids=[], bad_words=[]
            )
        with torch.inference_mode():
            self.runner._fill_slots(list(range(num_reqs)))
            self.step.draft_ids.fill_(1)
        self._saved = state.ints.clone()

    def ms(self, run: Callable[[], object], calls: int = 1) -> float:
        """Median milliseconds of one call, every time from the same state."""
        state, replays = self.runner.state, self.sizes.replays
        for _ in range(2):
            state.ints.copy_(self._saved)
            run()
        if not self.on_gpu:
            seconds = []
            for _ in range(replays):
                state.ints.copy_(self._saved)
                started = time.perf_counter()
                run()
                seconds.append(time.perf_counter() - started)
            return 1e3 * statistics.median(seconds) / calls
        pairs = []
        for _ in range(replays):
            state.ints.copy_(self._saved)
            torch.cuda._sleep(SLEEP_CYCLES)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(end) for start, end in pairs) / calls

    @torch.inference_mode()
    def pass_ms(self, role: str, num_reqs: int, k: int, *, sampled: bool = False) -> float:
        """One of the engine's own graphs: "step", "target" or "draft_decode"."""
        each = next(each for each in self.runner._graphs.passes if each.role == role)

        def run() -> None:
            _, record = self.runner._graphs.run(each, num_reqs, k, sampled=sampled, has_lora=False)
            assert record.mode == "FULL", record

        return self.ms(run)

    @torch.inference_mode()
    def accept_ms(self, num_reqs: int, k: int) -> float:
        """Acceptance and state advance on given tokens: twenty in a chain, in one graph."""
        device = self.engine.device
        targets = torch.ones(num_reqs, 1 + k, dtype=torch.int64, device=device)
        finite = torch.ones(num_reqs, 1 + k, dtype=torch.bool, device=device)
        drafted = torch.full((num_reqs,), k, dtype=torch.int64, device=device)
        drafts = targets[:, 1:].contiguous()
        drafter = self.step.drafter

        rows = self.step.rows(num_reqs, False)
        # What the passes before it have read anyway.
        known = [each.clone() for each in (rows.seq_lens, rows.remaining, rows.max_drafts)]
        table = rows.block_table

        def once() -> None:
            rows = self.step.rows(num_reqs, False)
            rows.remember(table, *known)
            _, accepted = accept_and_commit(
                rows, targets, finite, drafts, drafted, self.step._rates
            )
            if drafter is not None and k:
                drafter.advance(rows, accepted)

        def chain() -> None:
            for _ in range(ACCEPT_CHAIN):
                once()

        if not self.on_gpu:
            return self.ms(chain, ACCEPT_CHAIN)
        once()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            chain()
        return self.ms(graph.replay, ACCEPT_CHAIN)

    def floors(self, num_reqs: int, k: int, context: int, speed: float) -> dict[str, float]:
        """Milliseconds that reading weights and KV takes, of draft, verify and both."""

        def ms(model: CausalLM) -> float:
            return 1e3 * (weight_bytes(model) + num_reqs * context * kv_bytes(model)) / speed

        draft = k * ms(self.draft_model) if self.draft_model is not None else 0.0
        verify = ms(self.step.model)
        return {"draft": draft, "verify": verify, "step": draft + verify}

    def running(self, num_reqs: int, k: int, prompt: int, steps: int) -> list[Any]:
        """Requests that have all begun and run for a while, with room for ``steps`` more."""
        generator = torch.Generator().manual_seed(num_reqs)
        prompts = torch.randint(3, self.step.vocab_size, (num_reqs, prompt), generator=generator)
        params = specdec.SamplingParams(max_new_tokens=(1 + k) * (steps + 20), ignore_eos=True, k=k)
        requests = [self.engine.add_request(ids, params)[0] for ids in prompts.tolist()]
        while any(not request.output_ids for request in requests):
            self.engine.step()
        for _ in range(8):
            self.engine.step()
        return requests

    def run_steps(self, requests: Sequence[Any], steps: int) -> dict[str, Any]:
        """At least ``steps`` decode steps of the engine, none with a prompt in it."""
        self._synchronize()
        tokens = sum(len(request.output_ids) for request in requests)
        first, context = requests[0].stats.steps, len(requests[0].token_ids)
        started = time.perf_counter()
        while requests[0].stats.steps < first + steps:
            self.engine.step()
        self._synchronize()
        seconds = time.perf_counter() - started
        tokens = sum(len(request.output_ids) for request in requests) - tokens
        taken = requests[0].stats.steps - first
        assert all(request.finish_reason is None for request in requests)
        result = {
            "steps": taken,
            "seconds": seconds,
            "ms_per_step": 1e3 * seconds / taken,
            "tokens_per_step": tokens / taken / len(requests),
            "ms_per_token_and_user": 1e3 * seconds * len(requests) / tokens,
            "first_context": context,
            "last_context": len(requests[0].token_ids),
        }
        for request in requests:
            self.engine.abort(request.id)
        while self.engine._launched:
            self.engine.step()
        return result

    def _synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def close(self) -> None:
        self.engine.close()
        del self.runner, self.step, self.engine, self.draft_model
        gc.collect()
        if self.on_gpu:
            gc.collect()
            torch.cuda.empty_cache()
