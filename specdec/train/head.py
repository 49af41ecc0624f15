"""An EAGLE-3-style draft head as it is trained: one decoder layer over the target's states.

Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time
Test", 2025. Parameters carry the names of the public checkpoints.

Shape letters: B rows, T positions, H query heads, G key/value heads, D head size, C hidden size.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.verifier.models.config import ModelConfig
from specdec.verifier.models.rope import RopeConfig, cos_sin_table

# What begins random beside weights of the target begins with this share of its usual size.
SMALL = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadConfig:
    """Shape of a draft head. Its hidden size is the target's, whose embedding it reads."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    vocab_size: int
    draft_vocab_size: int
    layers: tuple[int, ...]
    own_head: bool
    parallel: bool

    @classmethod
    def of(
        cls,
        target: ModelConfig,
        *,
        draft_vocab_size: int,
        layers: tuple[int, ...],
        own_head: bool,
        parallel: bool,
    ) -> "HeadConfig":
        """A head whose layer has the shape of the target's layers."""
        return cls(
            hidden_size=target.hidden_size,
            intermediate_size=target.intermediate_size,
            num_heads=target.num_heads,
            num_kv_heads=target.num_kv_heads,
            head_size=target.head_size,
            rms_norm_eps=target.rms_norm_eps,
            rope=target.rope,
            max_position_embeddings=target.max_position_embeddings,
            vocab_size=target.vocab_size,
            draft_vocab_size=draft_vocab_size,
            layers=layers,
            own_head=own_head,
            parallel=parallel,
        )


@dataclass(frozen=True, slots=True)
class KeysValues:
    """What one drafted position left for the ones after it."""

    key: Tensor  # [B, G, T, D], rotated
    value: Tensor  # [B, G, T, D]


class SelfAttention(nn.Module):
    """Attention of an unrolled step: over the real entries up to a position, and the chain's own.

    Step j at position i stands for the (j+1)-th draft after token i + 1. It sees what step 0 made
    of the real positions 0..i, and of the later steps only its own chain: the entries of steps
    1..j at the same i. So one pass over T positions trains T chains at once.
    """

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.head_size = config.head_size
        self.groups = config.num_kv_heads
        q_size = config.num_heads * config.head_size
        kv_size = config.num_kv_heads * config.head_size
        fed = 2 * config.hidden_size
        self.q_proj = nn.Linear(fed, q_size, bias=False)
        self.k_proj = nn.Linear(fed, kv_size, bias=False)
        self.v_proj = nn.Linear(fed, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=False)

    def forward(
        self,
        x: Tensor,  # [B, T, 2 C]
        cos_sin: Tensor,  # [B, 1, T, rotary_dim] of this step's positions
        mask: Tensor,  # [B, 1, T, T] bool, for the entries of step 0
        past: list[KeysValues],  # of the steps before; this one's are appended
    ) -> Tensor:
        query = rotate(self._heads(self.q_proj(x)), cos_sin)  # [B, H, T, D]
        key = rotate(self._heads(self.k_proj(x)), cos_sin)  # [B, G, T, D]
        past.append(KeysValues(key, self._heads(self.v_proj(x))))
        # Query heads of a group side by side: [B, G, H / G, T, D].
        query = query.unflatten(1, (self.groups, -1))
        scale = self.head_size**-0.5
        first = past[0]
        scores = [(query @ first.key[:, :, None].mT).masked_fill(~mask[:, None], -torch.inf)]
        scores += [(query * own.key[:, :, None]).sum(-1, keepdim=True) for own in past[1:]]
        weights = (torch.cat(scores, dim=-1).float() * scale).softmax(-1).to(first.value.dtype)
        # Taken apart at once: in the backward pass each slice would make a whole gradient.
        of_real, *of_own = weights.split([first.key.shape[2], *[1] * len(past[1:])], dim=-1)
        out = of_real @ first.value[:, :, None]
        for weight, own in zip(of_own, past[1:], strict=True):
            out = out + weight * own.value[:, :, None]
        merged: Tensor = self.o_proj(out.flatten(1, 2).transpose(1, 2).flatten(2))
        return merged

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_size)).transpose(1, 2)


class MLP(nn.Module):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class MidLayer(nn.Module):
    """The decoder layer. Its residual stream starts as the feature, before that is normed."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(hidden, eps)
        self.hidden_norm = nn.RMSNorm(hidden, eps)
        self.self_attn = SelfAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps)
        self.mlp = MLP(config)

    def forward(
        self,
        embedding: Tensor,
        feature: Tensor,
        cos_sin: Tensor,
        mask: Tensor,
        past: list[KeysValues],
    ) -> Tensor:
        x = torch.cat((self.input_layernorm(embedding), self.hidden_norm(feature)), dim=-1)
        hidden = feature + self.self_attn(x, cos_sin, mask, past)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class DraftHead(nn.Module):
    """The head. ``lm_head.weight`` is a parameter only where the head owns it."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.config = config
        self.fc = nn.Linear(len(config.layers) * hidden, hidden, bias=False)
        self.midlayer = MidLayer(config)
        self.norm = nn.RMSNorm(hidden, config.rms_norm_eps)
        if config.own_head:
            self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        if config.parallel:
            self.mask_embedding = nn.Parameter(torch.randn(hidden))
            self.mask_feature = nn.Parameter(torch.randn(hidden))
        # Sizes of the target's states differ a hundredfold between features; they are divided out
        # for the optimiser's sake, and folded into fc where the head is saved.
        self.feature_scale: Tensor
        self.register_buffer("feature_scale", torch.ones(self.fc.in_features))
        cos_sin = cos_sin_table(config.rope, config.max_position_embeddings, "cpu")
        self.cos_sin: Tensor
        self.register_buffer("cos_sin", cos_sin, persistent=False)
        self._init_weights()

    def _init_weights(self) -> None:
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
                # The layer starts as its residual stream alone, unless it starts as a target's.
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    nn.init.zeros_(weight)

    def start_as(self, layer: Mapping[str, Tensor]) -> None:
        """Begin as a decoder layer of the target, by the names of its tensors: what has the same
        shape here. The part that reads embeddings begins small and random.
        """
        own = dict(self.midlayer.named_parameters())
        own["input_layernorm.weight"] = own.pop("hidden_norm.weight")
        with torch.no_grad():
            for name, tensor in layer.items():
                weight = own.get(name)
                if weight is None:
                    continue
                if weight.shape == tensor.shape:
                    weight.copy_(tensor)
                elif name.startswith("self_attn.") and weight.shape[0] == tensor.shape[0]:
                    weight.mul_(SMALL)
                    weight[:, weight.shape[1] - tensor.shape[1] :] = tensor

    def pass_last_feature(self) -> None:
        """Let ``fuse`` begin as the highest of the target's layers, and little of the others."""
        hidden = self.config.hidden_size
        scale = self.feature_scale[-hidden:]
        with torch.no_grad():
            self.fc.weight.mul_(SMALL)
            self.fc.weight[:, -hidden:] += torch.diag(scale / scale.mean())

    def set_feature_scale(self, features: Tensor, keep: Tensor) -> None:
        """Take the mean size of each feature [B, T, 3 C] over the positions of ``keep`` [B, T]."""
        weights = keep[..., None].float()
        sizes = (features.float().abs() * weights).sum((0, 1)) / weights.sum()
        self.feature_scale.copy_(sizes.clamp_min(1e-3))

    def fuse(self, features: Tensor) -> Tensor:
        """The target's states [B, T, 3 C] as the feature [B, T, C] of step 0, float32."""
        fused: Tensor = self.fc(features.float() / self.feature_scale)
        return fused.float()

    def step(
        self,
        embedding: Tensor,  # [B, T, C]: of the token after each position, step by step
        feature: Tensor,  # [B, T, C]: from ``fuse``, or what the step before returned
        positions: Tensor,  # [B, T] int64, of step 0
        mask: Tensor,  # [B, 1, T, T] bool
        past: list[KeysValues],
    ) -> Tensor:
        """One more drafted position for every row and position: the layer's output [B, T, C].

        It is the feature of the next step; ``norm`` of it is what the head reads.
        """
        at = (positions + len(past)).clamp_max(self.cos_sin.shape[0] - 1)
        hidden: Tensor = self.midlayer(embedding, feature, self.cos_sin[at][:, None], mask, past)
        return hidden


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotary embedding, half-rotation layout. x [B, H, T, D], cos_sin [B, 1, T, rotary_dim]."""
    cos, sin = cos_sin.chunk(2, dim=-1)
    half = cos.shape[-1]
    first, second, rest = x.float().split((half, half, x.shape[-1] - 2 * half), dim=-1)
    out = torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
    return out.to(x.dtype)
