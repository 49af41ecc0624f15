"""Training a small draft model on the target's text, whole or through LoRA adapters.

Source of the loss: Hinton et al., "Distilling the Knowledge in a Neural Network", 2015, on text
that the target wrote, as in Zhou et al., "DistillSpec", 2023. The model is transformers' and the
adapters are peft's.
"""

import copy
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specdec.train.loop import Losses
from specdec.train.loss import soft_cross_entropy
from specdec.train.rows import Batch
from specdec.train.target import FrozenTarget
from specdec.verifier.hub import resolve_model
from specdec.verifier.loading import TOKENIZER_FILES

ADAPTER = "adapter"
PROJECTIONS = (
    *("q_proj", "k_proj", "v_proj", "o_proj"),
    *("gate_proj", "up_proj", "down_proj"),
)
NEEDS = "--draft needs `pip install transformers peft`"


def check_draft(draft: str) -> Path:
    """The folder of a draft model. Raises ValueError for what cannot be trained, by name."""
    try:
        import peft  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise ValueError(f"{NEEDS} ({error})") from error
    path = resolve_model(draft, weights=True)
    if path.is_file():
        raise ValueError(f"--draft {draft}: a .gguf file cannot be trained; give a model folder")
    return path


class DraftModelTraining:
    """A causal LM of the target's tokenizer that learns the target's distribution."""

    def __init__(
        self, folder: Path, target: FrozenTarget, *, lora_rank: int | None, seed: int
    ) -> None:
        from transformers import AutoModelForCausalLM

        device = target.model.device
        self.target = target
        self.folder = folder
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        )
        self._dtype = model.config.dtype if device.type == "cuda" else torch.float32
        if lora_rank is not None:
            model = _with_adapters(model, lora_rank, seed)
        self._model: Any = model.to(device).train()
        self._causal_lm = model if lora_rank is None else model.get_base_model()
        self._has_adapters = lora_rank is not None
        self._vocab = min(target.vocab_size, self._head.shape[0])

    @property
    def _head(self) -> Tensor:
        head: Tensor = self._causal_lm.get_output_embeddings().weight
        return head

    def prepare(self, batch: Batch) -> None:
        pass

    def parameters(self) -> list[nn.Parameter]:
        return [p for p in self._model.parameters() if p.requires_grad]

    def losses(self, batch: Batch) -> Losses:
        states = self.target(batch)
        # Ids that one of the two models does not have are proposed by neither.
        target_logits = states.logits(self.target.model.lm_head[: self._vocab])
        same = batch.document[:, :-1] == batch.document[:, 1:]
        counted = same & batch.answer[:, 1:]
        hidden = self._hidden(batch)
        loss, agreed = soft_cross_entropy(hidden, self._head[: self._vocab], target_logits, counted)
        return Losses(loss, loss.detach()[None], agreed[None])

    @torch.no_grad()
    def proposals(self, batch: Batch, k: int) -> Tensor:
        head = self._head[: self._vocab]
        hidden = self._hidden(batch).to(head.dtype)
        likeliest = torch.stack([(row @ head.mT).argmax(-1) for row in hidden])  # [B, T]
        # The j-th draft after token i + 1 is what the model says after token i + 1 + j.
        padded = nn.functional.pad(likeliest, (0, k), value=-1)
        return padded[:, 1:].unfold(1, k, 1)

    def state(self) -> dict[str, Tensor]:
        return {n: p.detach() for n, p in self._model.named_parameters() if p.requires_grad}

    def load_state(self, state: dict[str, Tensor]) -> None:
        own = dict(self._model.named_parameters())
        for name, tensor in state.items():
            own[name].data.copy_(tensor)

    def export(self, folder: Path) -> None:
        """A model folder; with LoRA the adapters merged, and on their own in ``adapter/``."""
        if self._has_adapters:
            self._model.save_pretrained(str(folder / ADAPTER))
            merged = copy.deepcopy(self._model).merge_and_unload()
        else:
            merged = copy.deepcopy(self._model)
        merged.to(self._dtype).save_pretrained(str(folder))
        for file in {file for pattern in TOKENIZER_FILES for file in self.folder.glob(pattern)}:
            shutil.copyfile(file, folder / file.name)

    def reload(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        )
        self._model = self._causal_lm = model.to(self.target.model.device).eval()

    def _hidden(self, batch: Batch) -> Tensor:
        device = batch.tokens.device.type
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            out = self._causal_lm.model(
                input_ids=batch.tokens,
                attention_mask=batch.mask(),
                position_ids=batch.positions,
                use_cache=False,
            )
        hidden: Tensor = out.last_hidden_state
        return hidden


def _with_adapters(model: Any, rank: int, seed: int) -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(PROJECTIONS))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return get_peft_model(model, config)
