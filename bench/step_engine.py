"""An engine of random weights for ``bench/step.py``: its passes alone, and running."""

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import specdec
from specdec.bench.floor import step_bytes
from specdec.bench.parts import PartTimer
from specdec.drafters.draft_model import DraftModelDrafter
from specdec.verifier.models.llama import CausalLM

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
    """One engine with simulated acceptance: its passes alone, and running."""

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
        self.step = self.engine._runner.step
        self.on_gpu = self.engine.device.type == "cuda"
        self.step.kv_cache.data.normal_()
        drafter = self.step.drafter
        if isinstance(drafter, DraftModelDrafter):
            assert drafter.kv_cache is not None
            drafter.kv_cache.data.normal_()
        self.timer = PartTimer(self.engine, sizes.replays)

    def floors(self, num_reqs: int, k: int, context: int, speed: float) -> dict[str, float]:
        """Milliseconds that reading weights and KV takes, of draft, verify and both."""
        read = step_bytes(self.step.model, self.step.drafter, num_reqs, k, context)
        floors = {name: 1e3 * count / speed for name, count in read.items()}
        return floors | {"step": sum(floors.values())}

    def running(self, num_reqs: int, k: int, prompt: int, steps: int) -> list[Any]:
        """Requests that have all begun and run for a while, with room for ``steps`` more."""
        generator = torch.Generator().manual_seed(num_reqs)
        prompts = torch.randint(3, self.step.vocab_size, (num_reqs, prompt), generator=generator)
        # Those that begin first go on while the others' prompts are read.
        most = (1 + k) * (steps + 20 + 2 * -(-num_reqs * prompt // PROMPT_TOKENS))
        room = self.sizes.max_model_len - prompt
        params = specdec.SamplingParams(max_new_tokens=min(most, room), ignore_eos=True, k=k)
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
        del self.timer, self.step, self.engine
        gc.collect()
        if self.on_gpu:
            gc.collect()
            torch.cuda.empty_cache()
