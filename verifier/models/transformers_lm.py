"""Any causal language model of transformers, on our paged attention and our graphs.

transformers runs the layers; keys, values and attention come through its AttentionInterface to the
engine's cache and backend. Shape letters: T tokens, H query heads, G key/value heads, D head size.
"""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specdec.kernels.argmax import argmax
from specdec.kernels.kv_cache import write_kv
from specdec.kernels.linear import linear
from specdec.kernels.moe import apply_experts
from specdec.verifier.attention.base import AttentionBackend, AttentionMetadata
from specdec.verifier.kv_cache import KVCache
from specdec.verifier.models.config import ModelConfig
from specdec.verifier.models.fields import UnsupportedModelError
from specdec.verifier.models.transformers_probe import ATTENTION


@dataclass(frozen=True, slots=True)
class _PagedAttention:
    """What the interface calls for each layer of a pass."""

    config: ModelConfig
    backend: AttentionBackend
    kv_cache: KVCache
    metadata: AttentionMetadata

    def __call__(
        self,
        module: Any,
        query: Tensor,  # [1, H, T, D], rotated
        key: Tensor,  # [1, G, T, D], rotated
        value: Tensor,
        mask: None,
        *,
        scaling: float | None = None,
        softcap: float | None = None,
        **_: Any,
    ) -> Tensor:
        """[1, T, H, D]"""
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        keys, values = (
            cache[module.layer_idx] for cache in (self.kv_cache.keys, self.kv_cache.values)
        )
        write_kv(key, value, keys, values, self.metadata.slot_mapping)
        scale = query.shape[2] ** -0.5 if scaling is None else scaling
        out = self.backend.forward(
            query.contiguous(),
            keys,
            values,
            self.metadata,
            scale,
            self.config.window_of(module.layer_idx),
            softcap or None,
        )
        return out[None]


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    specdec_attend: Any = None,
    **options: Any,
) -> tuple[Tensor, None]:
    if specdec_attend is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} does not pass keyword arguments on to its attention"
        )
    return specdec_attend(module, query, key, value, attention_mask, **options), None


def _experts(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Grouped experts: [T, hidden], [T, k] and [T, k] -> [T, hidden]."""
    odd = ("has_bias", "is_transposed", "has_post_expert_norm")
    plain = module.has_gate and module.is_concatenated
    # Not every version of transformers knows all of them.
    plain = plain and not any(getattr(module, name, False) for name in odd)
    if not plain or not type(module.act_fn).__name__.startswith("SiLU"):
        raise UnsupportedModelError(f"{type(module).__name__} are experts of an unknown kind")
    weights = module.gate_up_proj, module.down_proj
    return apply_experts(hidden_states, *weights, top_k_index.int(), top_k_weights)


def register() -> None:
    """Make our attention and experts known to transformers. No mask is made for the first."""
    from transformers import AttentionInterface
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    AttentionInterface.register(ATTENTION, _attention)
    ALL_EXPERTS_FUNCTIONS.register(ATTENTION, _experts)


class _Given(nn.Module):
    """Stands for a model's layers where their result is known."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

        out = BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=inputs_embeds)
        # What models with experts hand on, and nobody asks for.
        out.router_logits = None  # type: ignore[attr-defined]
        return out


class _Float32Linear(nn.Module):
    """A head whose sums are not rounded to the model's dtype."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = head.weight, head.bias

    def forward(self, x: Tensor) -> Tensor:
        if x.is_meta:
            return x.new_empty((*x.shape[:-1], self.weight.shape[0]))
        logits = linear(x.flatten(0, -2), self.weight, self.bias, out_dtype=torch.float32)
        return logits.unflatten(0, x.shape[:-1])


def head_of(hf: Any) -> Any:
    """From hidden states to logits, with all that the model does to them: its own forward pass,
    around layers that give what they are given (``inputs_embeds``)."""
    head = _shallow(hf)
    names = [name for name, each in hf._modules.items() if each is hf.get_output_embeddings()]
    if hf.base_model_prefix not in hf._modules or len(names) != 1:
        raise UnsupportedModelError(f"{type(hf).__name__} keeps its head in an unknown place")
    head._modules[hf.base_model_prefix] = _Given()
    head._modules[names[0]] = _Float32Linear(hf._modules[names[0]])
    return head


def _shallow(module: Any) -> Any:
    """The same module, whose parts can be replaced."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    return twin


class TransformersLM(nn.Module):
    """A ``LanguageModel`` that transformers implements."""

    def __init__(self, hf: Any, config: ModelConfig, attention_backend: AttentionBackend) -> None:
        super().__init__()
        self.config = self.local_config = config
        self.attention_backend = attention_backend
        self.base = hf.base_model
        self.head = head_of(hf)
        self._short: dict[int, Any] = {}  # number of layers -> a base of so many

    @property
    def dtype(self) -> torch.dtype:
        return next(self.base.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.base.parameters()).device

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_cache: KVCache,
        attn: AttentionMetadata,
        *,
        num_layers: int | None = None,
    ) -> Tensor:
        """Hidden states after the final norm, [T, hidden]; writes the tokens' keys and values.

        With ``num_layers`` the model stops after that many layers, with the same final norm.
        """
        base = self.base if num_layers is None else self._first(num_layers)
        attend = _PagedAttention(self.config, self.attention_backend, kv_cache, attn)
        out = base(
            input_ids=input_ids[None],
            position_ids=positions[None],
            use_cache=False,
            specdec_attend=attend,
        )
        return out.last_hidden_state[0]

    def _first(self, num_layers: int) -> Any:
        if num_layers not in self._short:
            base = _shallow(self.base)
            count = self.config.num_layers
            for name, each in self.base._modules.items():
                if isinstance(each, nn.ModuleList) and len(each) == count:
                    base._modules[name] = each[:num_layers]
            # In a dictionary, so that its weights are not counted twice.
            self._short[num_layers] = base
        return self._short[num_layers]

    def compute_logits(self, hidden: Tensor, adapter_slots: Tensor | None = None) -> Tensor:
        """hidden [N, hidden] -> [N, vocab] float32. There are no adapters."""
        return self.head(inputs_embeds=hidden[None], use_cache=False).logits[0]

    def greedy_tokens(
        self,
        hidden: Tensor,
        vocab_size: int | None = None,
        adapter_slots: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See ``LanguageModel``."""
        return argmax(self.compute_logits(hidden), vocab_size)

    def kv_bytes_per_block(self, block_size: int) -> int:
        config = self.config
        positions = 2 * config.num_layers * block_size
        return positions * config.num_kv_heads * config.head_size * self.dtype.itemsize

    def make_kv_cache(
        self, num_blocks: int, block_size: int, *, max_num_seqs: int = 1, run_length: int = 1
    ) -> KVCache:
        """A cache of this model's shape and dtype, beside its weights. No layer is recurrent."""
        return KVCache(
            num_layers=self.config.num_layers,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=self.config.num_kv_heads,
            head_size=self.config.head_size,
            dtype=self.dtype,
            device=self.device,
        )


def load_transformers_model(
    path: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    attention_backend: AttentionBackend,
) -> TransformersLM:
    """Load a folder's safetensors weights. Raises ValueError naming tensors that do not fit."""
    from transformers import AutoModelForCausalLM

    register()
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        path,
        dtype=dtype,
        attn_implementation=ATTENTION,
        experts_implementation=ATTENTION,
        use_safetensors=True,
        trust_remote_code=False,
        output_loading_info=True,
    )
    hf, report = loaded
    for kind in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        names = sorted(map(str, report[kind]))
        if names:
            raise ValueError(f"{path}: {kind.replace('_', ' ')}: {', '.join(names[:5])}")
    hf.requires_grad_(False)
    return TransformersLM(hf.to(device).eval(), config, attention_backend).eval()
