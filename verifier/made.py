"""Models of random weights that every rank can make its part of, without a file."""

import zlib
from dataclasses import dataclass

import torch

from specdec.verifier.attention.base import AttentionBackend
from specdec.verifier.loading import silence_layers
from specdec.verifier.models.config import ModelConfig
from specdec.verifier.models.llama import CausalLM
from specdec.verifier.models.registry import model_class
from specdec.verifier.parallel.sharding import WHOLE, TensorParallel, cut_of


@dataclass(frozen=True, kw_only=True, slots=True)
class MadeModel:
    """What to make: normal weights, norms of ones, biases of zeros.

    A tensor depends on its name and ``seed`` alone, so that models of the same shape and different
    depth have the same first layers, and the parts of several ranks are those of the whole.
    Layers from ``silent_from`` on add nothing, at full cost: the first ones alone are then a draft
    that agrees everywhere.
    """

    config: ModelConfig
    seed: int = 0
    std: float = 0.02
    silent_from: int | None = None

    def make(
        self,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        attention_backend: AttentionBackend,
        tp: TensorParallel = WHOLE,
    ) -> CausalLM:
        """Make it, or a rank's part, on the device, beside it one whole tensor at a time."""
        model = model_class(self.config)(
            self.config, dtype=dtype, device=device, attention_backend=attention_backend, tp=tp
        )
        whole = model_class(self.config)(
            self.config, dtype=dtype, device="meta", attention_backend=attention_backend
        )
        shapes = {name: slot.shape for name, slot in whole.weight_slots().items()}
        generator = torch.Generator(device=model.device)
        for name, slot in model.weight_slots().items():
            if slot.dim() != 2:
                slot.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            generator.manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))
            tensor = torch.empty(shapes[name], dtype=dtype, device=model.device)
            tensor.normal_(std=self.std, generator=generator)
            cut = cut_of(name, self.config, tp)
            slot.copy_(tensor if cut is None else cut.of(tensor))
        if self.silent_from is not None:
            silence_layers(model, self.silent_from)
        return model.eval()
