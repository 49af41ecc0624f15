"""Adapter slots: low-rank weights of several adapters, at fixed addresses beside a model's own.

Shape letters: S slots, P fused projections of a layer, r ``max_rank``, K input features, N output
features.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.kernels.lora import lora_embedding_
from specdec.verifier.models.lora import AdapterRows, LoraStack
from specdec.verifier.parallel.sharding import Cut, cut_of
from specdec.verifier.peft_format import EMBEDDING, HEAD, AdapterError, AdapterWeights

# Regions of a slot start at multiples of this many elements, for aligned loads.
_ALIGNMENT = 128
# Rows and requests of batches: one for each height of tile and on both sides of the borders between
# kernels; few rows have kernels for one slot and for several.
_WARM_UP_BATCHES = (
    *((16, 1), (16, 16), (32, 1), (32, 32), (64, 1), (64, 64)),
    *((65, 65), (600, 600)),
)


@dataclass(frozen=True, slots=True)
class _Region:
    """Where one layer's weights lie in a slot."""

    owner: Any  # what reads the stack, and under which attribute
    attribute: str
    names: tuple[str, ...]  # the adapter's names of the projections
    parts: tuple[int, ...]
    a_shape: tuple[int, int]
    b_shape: tuple[int, int]
    a_start: int
    b_start: int

    def views(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """A and B in ``flat`` [..., slot_size]."""
        a, b = (
            flat.narrow(-1, start, rows * columns).unflatten(-1, (rows, columns))
            for start, (rows, columns) in (
                (self.a_start, self.a_shape),
                (self.b_start, self.b_shape),
            )
        )
        return a, b


class LoraSlots:
    """Memory for ``max_loras`` adapters of ``model``, of a rank up to ``max_rank``.

    A slot is one run of memory: loading an adapter is one copy in place, so no graph notices.
    """

    def __init__(
        self, model: Any, *, max_loras: int, max_rank: int, vocabulary: bool = False
    ) -> None:
        """``vocabulary``: room for adapters of the embedding and the head too."""
        self.model = model
        self.max_loras = max_loras
        self.max_rank = max_rank
        self.vocabulary = vocabulary
        self._regions, self.slot_size = _layout(model, max_rank, vocabulary)
        shape = (max_loras, self.slot_size)
        self.data = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self._is_attached = False

    def attach(self) -> None:
        """Let the model read its adapters from here."""
        if any(getattr(region.owner, region.attribute) is not None for region in self._regions):
            raise ValueError("model: it serves the adapters of another engine already")
        for region in self._regions:
            stack = LoraStack(*region.views(self.data), region.parts)
            setattr(region.owner, region.attribute, stack)
        self._is_attached = True

    @property
    def bytes_per_slot(self) -> int:
        return self.slot_size * self.data.itemsize

    def pack(self, weights: AdapterWeights) -> Tensor:
        """An adapter as a slot holds it, on the host: [slot_size], pinned for a GPU.

        Raises AdapterError where it does not fit the slots, was made for another base model, or
        has values beyond the model's dtype.
        """
        self.check(weights)
        packed = torch.zeros(self.slot_size, dtype=self.data.dtype)
        for region in self._regions:
            a, b = region.views(packed)
            row = 0
            for number, (name, width) in enumerate(zip(region.names, region.parts, strict=True)):
                if name in weights.sites:
                    # Whole ones are checked, so that all ranks refuse the same adapters.
                    own_a, own_b = self._own_part(name, *self._rounded(weights, name))
                    rank = own_b.shape[1]
                    # A rank's part of a vocabulary may be padded.
                    b[row : row + own_b.shape[0], :rank] = own_b
                    if name == EMBEDDING:
                        a[: own_a.shape[1], :rank] = own_a.t()
                    else:
                        first = number * self.max_rank
                        a[first : first + rank] = own_a
                row += width
        return packed.pin_memory() if self.data.is_cuda else packed

    def check(self, weights: AdapterWeights) -> None:
        """Raise AdapterError where ``pack`` would."""
        if weights.rank > self.max_rank:
            raise AdapterError(
                f"adapter {weights.path!r}: rank {weights.rank} is above max_lora_rank "
                f"{self.max_rank}"
            )
        if weights.adapts_vocabulary and not self.vocabulary:
            adapted = [name for name in (EMBEDDING, HEAD) if name in weights.sites]
            raise AdapterError(
                f"adapter {weights.path!r} adapts {' and '.join(adapted)}, for which this engine "
                "has no room; start it with lora_vocabulary=True"
            )
        slots = self.model.weight_slots()
        for name, tensor in weights.base_weights.items():
            own = slots.get(f"{name}.weight", slots["model.embed_tokens.weight"])
            cut = self._cut(name)
            tensor = tensor if cut is None else cut.of(tensor)
            if own.shape != tensor.shape or not torch.equal(tensor.to(own.dtype), own.cpu()):
                raise AdapterError(
                    f"adapter {weights.path!r} brings a {name} that is not this model's own"
                )

    def _cut(self, name: str) -> Cut | None:
        return cut_of(f"{name}.weight", self.model.config, self.model.tp)

    def _own_part(self, name: str, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's part of the factors of a projection: cut as its weight is.

        a [r, in], of an embedding [r, vocab]; b [out, r].
        """
        cut = self._cut(name)
        if cut is None:
            return a, b
        if name == EMBEDDING:
            return a.narrow(1, cut.start, cut.length), b
        return (cut.of(a), b) if cut.dim == 1 else (a, cut.of(b))

    def _rounded(self, weights: AdapterWeights, name: str) -> tuple[Tensor, Tensor]:
        """A module's A and B in the slots' dtype, finite: kernels multiply others' rows with 0."""
        a, b = (tensor.to(self.data.dtype) for tensor in weights.sites[name])
        for part, tensor in (("lora_A", a), ("lora_B times its scale", b)):
            if not torch.isfinite(tensor).all():
                raise AdapterError(
                    f"adapter {weights.path!r}: {name}: {part} holds values that are not finite in "
                    f"the model's {str(self.data.dtype).removeprefix('torch.')}"
                )
        return a, b

    def load(self, slot: int, packed: Tensor | None) -> None:
        """Copy an adapter into a slot, or clear it; ordered after all work launched before."""
        if packed is None:
            self.data[slot].zero_()
        else:
            self.data[slot].copy_(packed, non_blocking=True)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run each adapted layer on every number of rows that takes kernels of its own."""
        model, layers = self.model, self.model.first_layers()
        layer = layers[0]
        mlps = {type(layer.mlp): layer.mlp for layer in layers}
        for num_rows, num_reqs in _WARM_UP_BATCHES:
            nobody = torch.full((num_rows,), -1, dtype=torch.int64, device=model.device)
            rows = AdapterRows(nobody, num_reqs)
            hidden = self.data.new_zeros(num_rows, model.config.hidden_size)
            for _, linear in layer.attention.linears(""):
                linear(self.data.new_zeros(num_rows, linear.weight.shape[1]), rows)
            for mlp in mlps.values():
                mlp(hidden, rows)
            if self.vocabulary and model.embed_adapters is not None:
                model.compute_logits(hidden, nobody)
                lora_embedding_(
                    hidden,
                    nobody.clamp_min(0),
                    model.embed_adapters.a,
                    model.embed_adapters.b,
                    nobody,
                )

    def detach(self) -> None:
        """Let go of the model, where it reads from here."""
        if self._is_attached:
            self._is_attached = False
            for region in self._regions:
                setattr(region.owner, region.attribute, None)


def _layout(model: Any, rank: int, vocabulary: bool) -> tuple[list[_Region], int]:
    """Where each layer's weights lie, and the elements of a slot."""
    regions, size = [], 0

    def place(elements: int) -> int:
        nonlocal size
        start = size
        size += -(-elements // _ALIGNMENT) * _ALIGNMENT
        return start

    for owner, attribute, prefix, parts, num_in in _owners(model, vocabulary):
        names = tuple(f"{prefix}{name}" for name in parts)
        widths = tuple(parts.values())
        shrink = (num_in, rank) if attribute == "embed_adapters" else (len(parts) * rank, num_in)
        expand = (sum(widths), rank)
        starts = place(shrink[0] * shrink[1]), place(expand[0] * expand[1])
        regions.append(_Region(owner, attribute, names, widths, shrink, expand, *starts))
    return regions, size


def _owners(model: Any, vocabulary: bool) -> Iterator[tuple[Any, str, str, dict[str, int], int]]:
    """Every adapted layer: its owner and attribute, name prefix, projections, input features."""
    for prefix, linear in model.linears():
        yield linear, "adapters", f"{prefix}.", linear.parts, linear.weight.shape[1]
    if vocabulary and not model.config.tie_word_embeddings:
        vocab, hidden = model.embed_tokens.shape
        yield model, "embed_adapters", "", {EMBEDDING: hidden}, vocab
        yield model, "head_adapters", "", {HEAD: vocab}, hidden
