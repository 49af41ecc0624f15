"""Small Medusa heads for tests, half good: fitted to some texts of their target and then disturbed.

And what they propose, by slow means.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from oracle import CLOSE_CALL, Expected, Oracle
from safetensors.torch import save_file
from tiny import _write_json, read_json
from torch import Tensor


@torch.inference_mode()
def last_hidden(target: Oracle, ids: Sequence[int]) -> Tensor:
    """[len(ids), hidden]: after the final norm, everything recomputed."""
    return target.model.model(torch.tensor([ids]), use_cache=False).last_hidden_state[0]


def residual(x: Tensor, weights: dict[str, Tensor], head: int, num_layers: int) -> Tensor:
    for layer in range(num_layers):
        at = f"{head}.{layer}.linear"
        x = x + torch.nn.functional.silu(x @ weights[at + ".weight"].T + weights[at + ".bias"])
    return x


def make_medusa(
    target: Oracle,
    model: str | Path,
    folder: str | Path,
    prompts: Sequence[Sequence[int]],
    *,
    num_heads: int = 3,
    num_layers: int = 1,
    noise: float = 0.0,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write heads whose output layers are least-squares fits on the texts after ``prompts``."""
    theirs = read_json(Path(model) / "config.json")
    size, vocab = theirs["hidden_size"], theirs["vocab_size"]
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            at = f"{head}.{layer}.linear"
            weights[at + ".weight"] = 0.1 * torch.randn(size, size, generator=generator)
            weights[at + ".bias"] = 0.1 * torch.randn(size, generator=generator)
    texts = [[*prompt, *target.greedy(prompt, 40)[0]] for prompt in prompts]
    for head in range(num_heads):
        inputs, wanted = [], []
        for text in texts:
            reach = len(text) - 2 - head
            x = last_hidden(target, text)[:reach]
            inputs.append(residual(x, weights, head, num_layers))
            wanted.append(torch.tensor(text[2 + head :]))
        one_hot = torch.nn.functional.one_hot(torch.cat(wanted), vocab).float()
        fit = torch.linalg.lstsq(torch.cat(inputs), one_hot).solution.T
        disturbed = fit + noise * fit.std() * torch.randn(fit.shape, generator=generator)
        weights[f"{head}.{num_layers}.weight"] = disturbed
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "medusa_num_heads": num_heads,
        "medusa_num_layers": num_layers,
        "base_model_name_or_path": "somewhere/else",
    }
    _write_json(folder / "config.json", config)
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in weights.items()}
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    return folder


class MedusaOracle:
    def __init__(self, target: Oracle, folder: str | Path) -> None:
        from safetensors.torch import load_file

        self.target = target
        config = read_json(Path(folder) / "config.json")
        self.num_heads, self.num_layers = config["medusa_num_heads"], config["medusa_num_layers"]
        self.weights = load_file(Path(folder) / "medusa_lm_head.safetensors")

    def choices(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """[heads, len(ids)] of head j at each token: the token j + 2 places on, and its margin."""
        hidden = last_hidden(self.target, ids)
        tokens, margins = [], []
        for head in range(self.num_heads):
            x = residual(hidden, self.weights, head, self.num_layers)
            best = (x @ self.weights[f"{head}.{self.num_layers}.weight"].T).topk(2)
            tokens.append(best.indices[:, 0])
            margins.append(best.values[:, 0] - best.values[:, 1])
        return torch.stack(tokens), torch.stack(margins)


def speculate(
    medusa: MedusaOracle, prompt: Sequence[int], *, k: int, max_new_tokens: int
) -> Expected:
    """The greedy text, and what each step drafts and accepts."""
    text, reason = medusa.target.greedy(prompt, max_new_tokens)
    whole = [*prompt, *text]
    tokens, head_margins = medusa.choices(whole)
    _, margins = medusa.target.choices(whole)
    margins = margins[len(prompt) - 1 : -1]
    drafted, accepted, committed = [], [], 1
    while committed < len(text):
        count = min(k, medusa.num_heads, max_new_tokens - committed - 1)
        at = len(prompt) + committed - 2
        guesses = tokens[:count, at].tolist()
        margins[committed] = min([margins[committed], *head_margins[:count, at].tolist()])
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
