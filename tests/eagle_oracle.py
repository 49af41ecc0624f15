"""What an EAGLE-3 head proposes, by slow means: float32, everything recomputed, no cache.

The target's hidden states come from transformers, the head is written out here once more.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from oracle import CLOSE_CALL, Expected, Oracle
from tiny import EMBEDDING, HEAD, read_json, read_tensors
from torch import Tensor


class EagleOracle:
    """The proposals of the head in ``folder`` for the texts of ``target``."""

    def __init__(self, target: Oracle, model: str | Path, folder: str | Path) -> None:
        self.target = target
        self.config = read_json(Path(folder) / "config.json")
        self.layer = self.config.get("transformer_layer_config", self.config)
        self.weights = {
            name.replace("layers.0.", "midlayer."): tensor
            for name, tensor in read_tensors(folder).items()
        }
        theirs = read_tensors(model)
        self.embedding = self.weights.get("embed_tokens.weight", theirs[EMBEDDING]).float()
        size = self.config["draft_vocab_size"]
        self.target_ids = torch.arange(size) + self.weights.get("d2t", torch.zeros(size)).long()
        shared = theirs.get(HEAD, theirs[EMBEDDING])[self.target_ids]
        self.head = self.weights.get("lm_head.weight", shared).float()
        num_layers = read_json(Path(model) / "config.json")["num_hidden_layers"]
        default = [min(max(i, 0), num_layers) for i in (2, num_layers // 2, num_layers - 3)]
        self.feature_layers = self.config.get("eagle_aux_hidden_state_layer_ids", default)

    @torch.inference_mode()
    def features(self, ids: Sequence[int]) -> Tensor:
        """[len(ids), 3 * hidden]: the residual stream after each of the feature layers."""
        streams: list[Tensor] = []

        def keep(_module: object, _args: object, out: Tensor | tuple[Tensor, ...]) -> None:
            streams.append((out if isinstance(out, Tensor) else out[0])[0])

        model = self.target.model.model
        hooks = [each.register_forward_hook(keep) for each in (model.embed_tokens, *model.layers)]
        self.target.logits(ids)
        for hook in hooks:
            hook.remove()
        return torch.cat([streams[i] for i in self.feature_layers], dim=-1)

    @torch.inference_mode()
    def propose(self, text: Sequence[int], features: Tensor, k: int) -> tuple[list[int], float]:
        """k tokens after ``text``, and the smallest margin of any of them.

        ``features`` of a text that begins with this one; those of its last token are not looked at.
        """
        fused = features[: len(text) - 1] @ self._w("fc.weight").T
        inputs = self.embedding[torch.tensor(text[1:])]
        if self.config.get("specdec_parallel_drafting"):
            inputs = torch.cat([inputs, self._w("mask_embedding").expand(k - 1, -1)])
            fused = torch.cat([fused, self._w("mask_feature").expand(k - 1, -1)])
            hidden, _ = self._forward(inputs, fused)
            chosen = [self._choose(row) for row in hidden[-k:]]
        else:
            chosen = []
            for _ in range(k):
                hidden, stream = self._forward(inputs, fused)
                chosen.append(self._choose(hidden[-1]))
                inputs = torch.cat([inputs, self.embedding[chosen[-1][0]][None]])
                fused = torch.cat([fused, stream[-1:]])
        return [token for token, _ in chosen], min(margin for _, margin in chosen)

    def logits(self, text: Sequence[int], features: Tensor) -> Tensor:
        """[draft vocab] of the token after ``text``."""
        fused = features[: len(text) - 1] @ self._w("fc.weight").T
        hidden, _ = self._forward(self.embedding[torch.tensor(text[1:])], fused)
        return hidden[-1] @ self.head.T

    def _w(self, name: str) -> Tensor:
        return self.weights[name].float()

    def _choose(self, hidden: Tensor) -> tuple[int, float]:
        logits = hidden @ self.head.T
        best = logits.topk(2).values
        # Of equal logits the lowest of the target's ids.
        token = int(self.target_ids[logits == best[0]].min())
        return token, float(best[0] - best[1])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        eps = self.layer["rms_norm_eps"]
        return self._w(name) * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        out = x @ self._w(f"midlayer.{name}.weight").T
        return out + self._w(f"midlayer.{name}.bias") if self.layer["attention_bias"] else out

    def _rotate(self, x: Tensor) -> Tensor:
        """x [positions, heads, head size], rotated by halves."""
        half = x.shape[-1] // 2
        theta = self.layer["rope_theta"] ** -(torch.arange(half) / half)
        angles = torch.arange(x.shape[0])[:, None, None] * theta
        a, b = x[..., :half], x[..., half:]
        return torch.cat(
            [a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1
        )

    def _forward(self, inputs: Tensor, fused: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states after and before the final norm, [positions, hidden]."""
        normed = self._norm(fused, "midlayer.hidden_norm.weight")
        x = torch.cat([self._norm(inputs, "midlayer.input_layernorm.weight"), normed], dim=-1)
        stream = normed if self.config["norm_before_residual"] else fused
        heads, groups = self.layer["num_attention_heads"], self.layer["num_key_value_heads"]
        q, k, v = (
            self._linear(x, f"self_attn.{name}_proj").unflatten(-1, (count, -1))
            for name, count in (("q", heads), ("k", groups), ("v", groups))
        )
        q, k = self._rotate(q), self._rotate(k)
        k, v = (each.repeat_interleave(heads // groups, dim=1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
        hidden_keys = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden_keys, -torch.inf).softmax(-1)
        out = torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
        stream = stream + self._linear(out, "self_attn.o_proj")
        normed = self._norm(stream, "midlayer.post_attention_layernorm.weight")
        gate = torch.nn.functional.silu(normed @ self._w("midlayer.mlp.gate_proj.weight").T)
        up = normed @ self._w("midlayer.mlp.up_proj.weight").T
        stream = stream + (gate * up) @ self._w("midlayer.mlp.down_proj.weight").T
        return self._norm(stream, "norm.weight"), stream


def speculate(
    eagle: EagleOracle,
    prompt: Sequence[int],
    *,
    k: int | Sequence[int],
    max_new_tokens: int,
    max_model_len: int = 10**9,
    max_draft_len: int = 10**9,
) -> Expected:
    """The greedy text, and what each step drafts and accepts; ``k`` by step, its last repeated.

    ``max_draft_len``: a step whose drafts would end past it drafts nothing.
    """
    target = eagle.target
    budget = min(max_new_tokens, max_model_len - len(prompt))
    text, reason = target.greedy(prompt, budget)
    whole = [*prompt, *text]
    features = eagle.features(whole)
    _, margins = target.choices(whole)
    margins = margins[len(prompt) - 1 : -1]
    schedule = [k] if isinstance(k, int) else list(k)
    drafted, accepted, committed = [], [], 1
    while committed < len(text):
        own = schedule[min(len(drafted), len(schedule) - 1)]
        count = min(own, budget - committed - 1)
        length = len(prompt) + committed
        if length + count > max_draft_len:
            count = 0
        hits = 0
        if count:
            guesses, margin = eagle.propose(whole[:length], features, count)
            margins[committed] = min(margins[committed], margin)
            ahead = zip(guesses, text[committed:], strict=False)
            hits = (*(guess == token for guess, token in ahead), False).index(False)
        drafted.append(count)
        accepted.append(hits)
        committed += hits + 1
    close = [margin < CLOSE_CALL for margin in margins]
    return Expected(
        token_ids=text,
        finish_reason=reason,
        drafted=drafted,
        accepted=accepted,
        num_certain=(*close, True).index(True),
    )
