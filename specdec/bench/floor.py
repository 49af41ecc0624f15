"""The bandwidth floor: what a step cannot beat, since its weights and KV must be read."""

import time

import torch

from specdec.drafters.base import Drafter
from specdec.verifier.models.base import LanguageModel
from specdec.verifier.models.llama import CausalLM


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read plus written, of a large copy on the device."""
    on_gpu = device.type == "cuda"
    source = torch.empty(1 << 31 if on_gpu else 1 << 26, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    best = float("inf")
    for _ in range(5):
        if on_gpu:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            target.copy_(source)
            end.record()
            end.synchronize()
            best = min(best, 1e-3 * start.elapsed_time(end))
        else:
            started = time.perf_counter()
            target.copy_(source)
            best = min(best, time.perf_counter() - started)
    return 2 * source.numel() / best


def weight_bytes(model: LanguageModel, num_layers: int | None = None) -> int:
    """Bytes of the weights that a forward pass reads: all but an untied embedding.

    Of experts only those of one token are sure to be read. A model that transformers implements
    counts as nothing, since its parts are not known here.

    ``num_layers``: a pass over the first layers alone.
    """
    if not isinstance(model, CausalLM):
        return 0
    moe = model.config.moe
    slots = model.weight_slots()
    layers = model.config.num_layers if num_layers is None else num_layers
    skipped = tuple(f"model.layers.{i}." for i in range(layers, model.config.num_layers))
    total = 0
    for name, slot in slots.items():
        if name.startswith(skipped):
            continue
        num_bytes = slot.numel() * slot.element_size()
        if moe is not None and ".experts." in name:
            # All experts of a layer are alike.
            num_bytes = num_bytes * moe.experts_per_token // moe.num_experts
        total += num_bytes
    tied = model.config.tie_word_embeddings
    return total if tied else total - model.embed_tokens.numel() * model.dtype.itemsize


def kv_bytes(model: LanguageModel) -> float:
    """Bytes of the keys and values of one token."""
    return model.kv_bytes_per_block(16) / 16


def state_bytes(model: LanguageModel) -> float:
    """Bytes of one request's recurrent states."""
    config = model.config
    if config.mamba is None:
        return 0.0
    return config.num_recurrent_layers * 4.0 * config.mamba.inner_size * config.mamba.state_size


def draft_bytes(drafter: Drafter | None, tokens: float, num_reqs: float) -> float:
    """Bytes that one pass of a drafter reads beside ``tokens`` of context; 0 where it has no model.

    Heads that are neither a model of their own nor the target's first layers count as nothing, so
    that their floor is too low rather than too high.
    """
    model = getattr(drafter, "model", None)
    if not isinstance(model, CausalLM):
        return 0.0
    layers = getattr(drafter, "num_layers", model.config.num_layers)
    share = layers / model.config.num_layers
    of_rows = tokens * kv_bytes(model) + num_reqs * state_bytes(model)
    return weight_bytes(model, layers) + of_rows * share


def step_bytes(
    target: LanguageModel, drafter: Drafter | None, num_reqs: float, k: float, context: float
) -> dict[str, float]:
    """Bytes that the parts of a step move: ``draft`` (k passes) and ``verify``.

    Weights, keys and values are read; recurrent states are read, and written by the verify pass.
    """
    tokens = num_reqs * context
    return {
        "draft": k * draft_bytes(drafter, tokens, num_reqs) if k else 0.0,
        "verify": weight_bytes(target)
        + tokens * kv_bytes(target)
        + 2 * num_reqs * state_bytes(target),
    }
