"""Small targets with a module for multi-token prediction in their files, and what it proposes.

The module passes the newest token's embedding on to the target's head, with noise from the hidden
state and from its own attention: right now and then, where the target's layers whisper.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from oracle import CLOSE_CALL, Expected, Oracle
from tiny import EMBEDDING, HEAD, read_json, read_tensors, write_checkpoint
from torch import Tensor

# Prefix, and names of: norm of the embedding, of the hidden state, projection, final norm, layer.
LAYOUTS = {
    "mimo": ("model.mtp_layers.0.", "token_layernorm", "hidden_layernorm", "input_proj",
             "final_layernorm", ""),
    "qwen": ("mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "layers.0."),
    "deepseek": ("model.layers.3.", "enorm", "hnorm", "eh_proj", "shared_head.norm", ""),
}  # fmt: skip


def add_module(
    model: str | Path, out: str | Path, layout: str, *, noise: float = 0.2, seed: int = 0
) -> Path:
    """A copy of ``model``, a folder of three layers, with a module in its files."""
    config, tensors = read_json(Path(model) / "config.json"), read_tensors(model)
    prefix, embedding_norm, hidden_norm, projection, final_norm, layer = LAYOUTS[layout]
    size = config["hidden_size"]
    generator = torch.Generator().manual_seed(seed)

    def around(mean: float, like: Tensor) -> Tensor:
        return mean + 0.05 * torch.randn(like.shape, generator=generator)

    module = {}
    first = "model.layers.0."
    for name, tensor in tensors.items():
        if name.startswith(first):
            scale = 0.03 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.25
            new = around(1.0, tensor) if "norm" in name else None
            if new is None:
                new = scale * torch.randn(tensor.shape, generator=generator)
            module[layer + name.removeprefix(first)] = new
    norm = tensors["model.norm.weight"]
    module[f"{embedding_norm}.weight"] = around(1.0, norm)
    module[f"{hidden_norm}.weight"] = around(1.0, norm)
    module[f"{final_norm}.weight"] = norm + around(0.0, norm)
    of_embedding = 3 * torch.eye(size)
    of_hidden = noise * torch.randn(size, size, generator=generator) / size**0.5
    halves = [of_embedding, of_hidden]
    if layout == "mimo":
        halves.reverse()
    module[f"{projection}.weight"] = torch.cat(halves, dim=1)
    if layout == "deepseek":
        module["embed_tokens.weight"] = tensors[EMBEDDING].clone()
        module["shared_head.head.weight"] = tensors.get(HEAD, tensors[EMBEDDING]).clone()
    if layout == "mimo":
        config |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo",
                   "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"}}  # fmt: skip
    return write_checkpoint(out, config, tensors | {prefix + n: t for n, t in module.items()})


class MtpOracle:
    """The proposals of the module in ``folder``, whose model without it is ``target``."""

    def __init__(self, target: Oracle, folder: str | Path, layout: str) -> None:
        self.target = target
        self.layout = layout
        self.config = read_json(Path(folder) / "config.json")
        tensors = read_tensors(folder)
        prefix = LAYOUTS[layout][0]
        self.weights = {
            n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)
        }
        self.embedding = tensors[EMBEDDING]
        self.head = tensors.get(HEAD, tensors[EMBEDDING])

    @torch.inference_mode()
    def features(self, ids: Sequence[int]) -> Tensor:
        """[len(ids), hidden]: after the target's final norm."""
        return self.target.model.model(torch.tensor([ids]), use_cache=False).last_hidden_state[0]

    @torch.inference_mode()
    def propose(self, text: Sequence[int], features: Tensor, k: int) -> tuple[list[int], float]:
        """k tokens after ``text``, and the smallest margin of any of them."""
        inputs, states = self.embedding[torch.tensor(text[1:])], features[: len(text) - 1]
        tokens, margins = [], []
        for _ in range(k):
            hidden = self._forward(inputs, states)[-1]
            best = (hidden @ self.head.T).topk(2)
            tokens.append(int(best.indices[0]))
            margins.append(float(best.values[0] - best.values[1]))
            inputs = torch.cat([inputs, self.embedding[tokens[-1]][None]])
            states = torch.cat([states, hidden[None]])
        return tokens, min(margins)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return self.weights[f"{name}.weight"] * x * scale

    def _linear(self, x: Tensor, name: str) -> Tensor:
        out = x @ self.weights[f"{name}.weight"].T
        bias = self.weights.get(f"{name}.bias")
        return out if bias is None else out + bias

    def _rotate(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        theta = self.config["rope_theta"] ** -(torch.arange(half) / half)
        angles = torch.arange(x.shape[0])[:, None, None] * theta
        a, b = x[..., :half], x[..., half:]
        return torch.cat(
            [a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1
        )

    def _forward(self, inputs: Tensor, states: Tensor) -> Tensor:
        """Hidden states after the module's norm, [positions, hidden]."""
        _, embedding_norm, hidden_norm, projection, final_norm, layer = LAYOUTS[self.layout]
        parts = [self._norm(inputs, embedding_norm), self._norm(states, hidden_norm)]
        if self.layout == "mimo":
            parts.reverse()
        stream = self._linear(torch.cat(parts, dim=-1), projection)
        x = self._norm(stream, layer + "input_layernorm")
        heads, groups = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        q, k, v = (
            self._linear(x, f"{layer}self_attn.{name}_proj").unflatten(-1, (count, -1))
            for name, count in (("q", heads), ("k", groups), ("v", groups))
        )
        if layer + "self_attn.q_norm.weight" in self.weights:
            q, k = (
                self._norm(q, layer + "self_attn.q_norm"),
                self._norm(k, layer + "self_attn.k_norm"),
            )
        q, k = self._rotate(q), self._rotate(k)
        k, v = (each.repeat_interleave(heads // groups, dim=1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
        later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        out = torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
        stream = stream + self._linear(out, layer + "self_attn.o_proj")
        normed = self._norm(stream, layer + "post_attention_layernorm")
        gate = torch.nn.functional.silu(self._linear(normed, layer + "mlp.gate_proj"))
        up = self._linear(normed, layer + "mlp.up_proj")
        return self._norm(stream + self._linear(gate * up, layer + "mlp.down_proj"), final_norm)


def speculate(module: MtpOracle, prompt: Sequence[int], *, k: int, max_new_tokens: int) -> Expected:
    """The greedy text, and what each step drafts and accepts."""
    text, reason = module.target.greedy(prompt, max_new_tokens)
    whole = [*prompt, *text]
    features = module.features(whole)
    margins = module.target.choices(whole)[1][len(prompt) - 1 : -1]
    drafted, accepted, committed = [], [], 1
    while committed < len(text):
        count = min(k, max_new_tokens - committed - 1)
        hits = 0
        if count:
            guesses, margin = module.propose(whole[: len(prompt) + committed], features, count)
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
