"""Small targets, heads and documents that the tests of training share."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tiny import make_tiny, read_json, read_tensors, write_checkpoint

from specdec.train.corpus import Document
from specdec.train.head import HeadConfig
from specdec.train.head_training import HeadTraining
from specdec.train.target import FrozenTarget
from specdec.train.vocab import DraftVocab
from specdec.verifier.attention.sdpa import SdpaBackend
from specdec.verifier.loading import load_model

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHAPE = {"hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 48}


def target_of(folder: str | Path, layers: tuple[int, ...] = (0, 1, 2)) -> FrozenTarget:
    model = load_model(folder, attention_backend=SdpaBackend("cpu"))
    return FrozenTarget(model, layers, model.config.vocab_size)


def bigram_model(folder: Path, **options: Any) -> Path:
    """A target whose next token depends on the last one alone: its layers add nothing.

    A head can learn it to perfection, since it reads that token's embedding.
    """
    make_tiny(folder, **({"layers": 3, "vocab": 64} | SHAPE | options))
    tensors = read_tensors(folder)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    return write_checkpoint(folder, read_json(folder / "config.json"), tensors)


def vocab_of(ids: Sequence[int], vocab_size: int) -> DraftVocab:
    known = torch.zeros(vocab_size, dtype=torch.bool)
    known[list(ids)] = True
    return DraftVocab(torch.tensor(ids), known, 1.0)


def head_of(
    target: FrozenTarget,
    ids: Sequence[int],
    *,
    own_head: bool = False,
    parallel: bool = False,
    num_steps: int = 4,
) -> HeadTraining:
    """A head whose every weight is random: nothing in it starts as zero or one."""
    config = HeadConfig.of(
        target.model.config,
        draft_vocab_size=len(ids),
        layers=target.layers,
        own_head=own_head,
        parallel=parallel,
    )
    vocab = vocab_of(ids, target.model.config.vocab_size)
    made = HeadTraining(config, target, vocab, num_steps=num_steps, decay=0.8, seed=3)
    generator = torch.Generator().manual_seed(5)
    for parameter in made.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + 0.2 * noise if parameter.dim() == 1 else 0.25 * noise
    made.head.feature_scale.copy_(0.5 + torch.rand(len(made.head.feature_scale)))
    return made


def documents(lengths: Sequence[int], vocab: int, prompt: int = 3, seed: int = 0) -> list[Document]:
    """Random documents whose first ``prompt`` tokens are no answer."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number, length in enumerate(lengths):
        tokens = torch.randint(vocab, (length,), generator=generator).tolist()
        found.append(Document(number, True, tokens, [(prompt, length)]))
    return found
