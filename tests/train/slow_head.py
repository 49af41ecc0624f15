"""A draft head by slow means: read from its files, one chain at a time, all entries recomputed.

Written from the layout of the public EAGLE-3 checkpoints, without the code under test.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from tiny import read_json
from torch import Tensor


class SlowHead:
    """``embed`` [V, C] and ``lm_head`` [V, C] are the target's."""

    def __init__(self, folder: Path, embed: Tensor, lm_head: Tensor) -> None:
        self.config = read_json(folder / "config.json")
        self.w = {n: t.float() if t.is_floating_point() else t for n, t in _tensors(folder).items()}
        self.embed = embed
        draft_vocab = torch.arange(self.config["draft_vocab_size"])
        self.ids = draft_vocab + self.w["d2t"]
        self.lm_head = self.w.get("lm_head.weight", lm_head[self.ids])

    def chain(
        self, features: Tensor, tokens: Sequence[int], at: int, text: Sequence[int]
    ) -> Tensor:
        """Outputs of ``len(text) + 1`` drafted positions after position ``at``, [n, C].

        features [T, 3 C]; entry i pairs the token after i with the state at i. The chain goes on
        with the tokens of ``text``.
        """
        entries = [
            (self.embed[tokens[i + 1]], self.w["fc.weight"] @ features[i]) for i in range(at + 1)
        ]
        outputs = [self._last(entries)]
        for token in text:
            if self.config.get("specdec_parallel_drafting"):
                entries.append((self.w["mask_embedding"], self.w["mask_feature"]))
            else:
                entries.append((self.embed[token], outputs[-1]))
            outputs.append(self._last(entries))
        return torch.stack(outputs)

    def draft(self, features: Tensor, tokens: Sequence[int], at: int, k: int) -> list[int]:
        """k greedy drafts after token ``at`` + 1, each fed back to draft the next."""
        drafted: list[int] = []
        for _ in range(k):
            output = self.chain(features, tokens, at, drafted)[-1]
            logits = self.lm_head @ _norm(output, self.w["norm.weight"], self.eps)
            drafted.append(int(self.ids[logits.argmax()]))
        return drafted

    @property
    def eps(self) -> float:
        return self.config["rms_norm_eps"]

    def _last(self, entries: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """The layer's output at the last entry, whose position is its index."""
        w, at = self.w, "midlayer."
        heads, groups = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        size = self.config["head_dim"]
        keys, values, query = [], [], torch.empty(0)
        for position, (embedding, feature) in enumerate(entries):
            x = torch.cat(
                (
                    _norm(embedding, w[at + "input_layernorm.weight"], self.eps),
                    _norm(feature, w[at + "hidden_norm.weight"], self.eps),
                )
            )
            query = self._rope((w[at + "self_attn.q_proj.weight"] @ x).view(heads, size), position)
            key = (w[at + "self_attn.k_proj.weight"] @ x).view(groups, size)
            keys.append(self._rope(key, position))
            values.append((w[at + "self_attn.v_proj.weight"] @ x).view(groups, size))
        out = []
        for head in range(heads):
            group = head * groups // heads
            scores = torch.stack([query[head] @ key[group] for key in keys]) / size**0.5
            weights = scores.softmax(0)
            out.append(sum(p * value[group] for p, value in zip(weights, values, strict=True)))
        hidden = entries[-1][1] + w[at + "self_attn.o_proj.weight"] @ torch.cat(out)
        x = _norm(hidden, w[at + "post_attention_layernorm.weight"], self.eps)
        gate = w[at + "mlp.gate_proj.weight"] @ x
        inner = gate * gate.sigmoid() * (w[at + "mlp.up_proj.weight"] @ x)
        return hidden + w[at + "mlp.down_proj.weight"] @ inner

    def _rope(self, x: Tensor, position: int) -> Tensor:
        half = x.shape[-1] // 2
        theta = self.config["rope_theta"]
        angles = position / theta ** (torch.arange(half) / half)
        cos, sin = angles.cos(), angles.sin()
        first, second = x[:, :half], x[:, half:]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean() + eps).sqrt() * weight


def _tensors(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")
