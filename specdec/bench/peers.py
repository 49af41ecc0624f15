"""Other engines on the same weights, prompts and k: one request at a time, greedy.

Each is taken as its documentation says, with the number of drafts fixed to k. Nothing is installed
here: a peer that is missing is refused with the line that installs it.
"""

import importlib.util
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import torch

from specdec.verifier.hub import resolve_model
from specdec.verifier.loading import read_config, save_first_layers
from specdec.verifier.models.config import config_to_json
from specdec.verifier.models.llama import CausalLM

INSTALL = {
    "transformers": "pip install 'transformers>=5'",
    "vllm": "pip install vllm",
    "flashspec": "pip install flashspec",
    "economize": "pip install economize",
}
NGRAM = "ngram"


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What a peer is to run."""

    target: Path | CausalLM  # a folder, or a model whose weights a peer in this process shares
    draft: Path | CausalLM | str | None  # the same, "ngram" or None
    dtype: torch.dtype
    device: torch.device
    max_new_tokens: int
    ignore_eos: bool
    max_model_len: int


class Peer(Protocol):
    """Another engine, with its models loaded."""

    def __init__(self, task: Task) -> None: ...

    def methods(self) -> list[tuple[str, bool]]:
        """Ways to run the task: a name, and whether it drafts."""

    def prepare(self, method: str, k: int) -> Callable[[list[int], int], list[int]]:
        """What writes (prompt ids, most new tokens) -> new ids with this k."""


class TransformersPeer:
    """Assisted generation: ``assistant_model``, or prompt lookup for n-grams."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.model = _transformers_model(task.target, task)
        self.assistant = None
        if isinstance(task.draft, Path | CausalLM):
            self.assistant = _transformers_model(task.draft, task)

    def methods(self) -> list[tuple[str, bool]]:
        drafting = {True: "assistant_model", False: "prompt lookup"}
        if self.task.draft is None:
            return [("plain", False)]
        return [("plain", False), (drafting[self.assistant is not None], True)]

    def prepare(self, method: str, k: int) -> Callable[[list[int], int], list[int]]:
        options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}
        if method == "prompt lookup":
            options |= {"prompt_lookup_num_tokens": k, "max_matching_ngram_size": 3}
        elif method == "assistant_model":
            assert self.assistant is not None
            config = self.assistant.generation_config
            config.num_assistant_tokens = k
            config.num_assistant_tokens_schedule = "constant"
            config.assistant_confidence_threshold = 0.0
            options["assistant_model"] = self.assistant

        def generate(ids: list[int], most: int) -> list[int]:
            prompt = torch.tensor([ids], device=self.task.device)
            made = self.model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=most, **options
            )
            return made[0, len(ids) :].tolist()

        return generate


def _transformers_model(source: Path | CausalLM, task: Task) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    model: Any
    if isinstance(source, Path):
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=task.dtype, attn_implementation="sdpa"
        )
        model = model.to(task.device)
    else:
        content = config_to_json(source.config)
        config = AutoConfig.for_model(content.pop("model_type"), **content)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, dtype=task.dtype, attn_implementation="sdpa"
            )
        model.load_state_dict(dict(source.weight_slots()), strict=False, assign=True)
        model.tie_weights()
        # What is computed and not saved was not computed on the meta device.
        model.model.rotary_emb = type(model.model.rotary_emb)(config).to(task.device)
    if task.ignore_eos:
        model.generation_config.eos_token_id = None
    return model.eval()


class VllmPeer:
    """vLLM's offline engine, one per k. Follows its documented interface of 0.26."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self._engine: Any = None

    def methods(self) -> list[tuple[str, bool]]:
        drafting = "ngram" if self.task.draft == NGRAM else "draft_model"
        return [("plain", False)] + [(drafting, True)] * (self.task.draft is not None)

    def prepare(self, method: str, k: int) -> Callable[[list[int], int], list[int]]:
        from vllm import LLM, SamplingParams

        task, speculative = self.task, None
        if method == "ngram":
            speculative = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}
        elif method == "draft_model":
            speculative = {"method": "draft_model", "model": str(task.draft)}
        if speculative is not None:
            speculative["num_speculative_tokens"] = k
        self._engine = None  # the engine before gives its memory back first
        self._engine = LLM(
            model=str(task.target),
            dtype=str(task.dtype).removeprefix("torch."),
            max_model_len=task.max_model_len,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            gpu_memory_utilization=0.7,
            speculative_config=speculative,
        )

        def generate(ids: list[int], most: int) -> list[int]:
            params = SamplingParams(
                temperature=0, max_tokens=most, ignore_eos=task.ignore_eos, detokenize=False
            )
            outputs = self._engine.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
            return list(outputs[0].outputs[0].token_ids)

        return generate


class FlashspecPeer(TransformersPeer):
    """flashspec with a draft model."""

    def methods(self) -> list[tuple[str, bool]]:
        return [("draft model", True)]

    def prepare(self, method: str, k: int) -> Callable[[list[int], int], list[int]]:
        from flashspec import BanditConfig, FlashSpecConfig, SamplingConfig, SpeculativeEngine
        from flashspec.engine import HuggingFaceDrafter, TargetModel

        task = self.task
        device = f"cuda:{task.device.index or 0}" if task.device.type == "cuda" else "cpu"
        config = FlashSpecConfig(
            device=device,
            dtype=str(task.dtype).removeprefix("torch."),
            drafter_strategy="bandit",
            bandit=BanditConfig(n_arms=1),
            max_new_tokens=task.max_new_tokens,
            compile_max_cache_len=task.max_model_len,
            sampling=SamplingConfig(temperature=0.0, gamma=k),
        )
        drafter = HuggingFaceDrafter(str(task.draft), task.device, task.dtype, model=self.assistant)
        target = TargetModel(str(task.target), task.device, task.dtype, model=self.model)
        engine = SpeculativeEngine(config, [drafter], target)

        def generate(ids: list[int], most: int) -> list[int]:
            prompt = torch.tensor([ids], device=task.device)
            made = engine.generate(prompt, max_new_tokens=most)
            return made.output_ids[0, : made.n_tokens_generated].tolist()

        return generate


class EconomizePeer(TransformersPeer):
    """economize with a draft model."""

    def methods(self) -> list[tuple[str, bool]]:
        return [("draft model", True)]

    def prepare(self, method: str, k: int) -> Callable[[list[int], int], list[int]]:
        import economize
        from economize.techniques.draft_model import DraftModelConfig

        model = economize.apply(self.model, DraftModelConfig(model=str(self.task.draft)))
        on_gpu = self.task.device.type == "cuda"
        config = economize.DecodeConfig(cycle_length=k + 1, cuda_graphs=on_gpu)

        def generate(ids: list[int], most: int) -> list[int]:
            prompt = torch.tensor([ids], device=self.task.device)
            made = model.decode(prompt, most, decoding=config)
            return made.tokens.flatten()[-most:].tolist()

        return generate


PEERS: dict[str, type[Peer]] = {
    "transformers": TransformersPeer,
    "vllm": VllmPeer,
    "flashspec": FlashspecPeer,
    "economize": EconomizePeer,
}
# Drafters that no other engine here has. A path is none of them.
OWN_DRAFTERS = re.compile(r"(ngram|suffix|mtp|auto)$|(ngram|suffix)\+|(layer_skip|eagle|medusa):")
# Those that draft with a model of their own only.
NEEDS_MODEL = ("flashspec", "economize")


def check_peers(names: Sequence[str], draft: str | None) -> None:
    """Raise ValueError for a peer that is unknown, not installed, or cannot run this drafter."""
    for name in names:
        if name not in PEERS:
            raise ValueError(f"--peer must be one of {', '.join(PEERS)}, got {name!r}")
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"--peer {name} is not installed here: {INSTALL[name]}")
        is_model = draft is not None and not OWN_DRAFTERS.match(draft)
        if not is_model and (draft not in (None, NGRAM) or name in NEEDS_MODEL):
            raise ValueError(f"--peer {name} has no drafter like {draft!r}; give a draft model")


def exported(model: str | None, folder: Path, dtype: torch.dtype) -> Path:
    """A Hugging Face folder of these weights: the model's own, or written from a GGUF file."""
    path = resolve_model(model)
    if path.is_dir():
        return path
    return save_first_layers(model, folder, read_config(path).num_layers, dtype=dtype)


def run_peer(
    name: str,
    task: Task,
    prompts: Sequence[list[int]],
    reference: Sequence[list[int]],
    ks: Sequence[int],
    progress: Callable[[str], None] = lambda line: None,
) -> list[dict[str, Any]]:
    """One entry per method and k. ``reference``: specdec's texts of the prompts without drafts."""
    peer = PEERS[name](task)
    rows = []
    for method, drafts in peer.methods():
        for k in [k for k in ks if bool(k) == drafts]:
            with torch.inference_mode():
                generate = peer.prepare(method, k)
                # The first call compiles or captures.
                generate(prompts[0], task.max_new_tokens)
                texts, seconds, first = [], 0.0, 0.0
                for ids in prompts:
                    first += _timed(generate, ids, 1, task.device)[1]
                    text, taken = _timed(generate, ids, task.max_new_tokens, task.device)
                    texts.append(text)
                    seconds += taken
            tokens = sum(len(text) for text in texts)
            equal = sum(text == wanted for text, wanted in zip(texts, reference, strict=True))
            rows.append(
                {
                    "peer": name,
                    "version": version(name),
                    "method": method,
                    "k": k,
                    "texts": len(texts),
                    "texts_equal_to_k0": equal,
                    "tokens": tokens,
                    "seconds": seconds,
                    "seconds_to_first_token": first,
                    "tokens_per_second": tokens / seconds,
                    # The prompts alone, timed apart, are taken off.
                    "decode_tokens_per_second": (tokens - len(texts)) / max(seconds - first, 1e-9),
                    "versus_specdec": None,
                }
            )
            progress(f"{name}, {method}, k={k}: {tokens / seconds:.1f} tokens/s")
    return rows


def _timed(
    generate: Callable[[list[int], int], list[int]], ids: list[int], most: int, device: torch.device
) -> tuple[list[int], float]:
    _synchronize(device)
    started = time.perf_counter()
    text = generate(ids, most)
    _synchronize(device)
    return text, time.perf_counter() - started


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
