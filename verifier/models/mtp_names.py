"""Where checkpoints keep modules for multi-token prediction, which the model itself has no use for.

Sources: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, and the checkpoints of DeepSeek-V3 (and
GLM-4.5), Qwen3-Next and MiMo.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_PROJECTION = "eh_proj.weight"


@dataclass(frozen=True, kw_only=True, slots=True)
class MtpLayout:
    """Names of a module's tensors, after ``prefix``."""

    prefix: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    final_norm: str
    layer: str  # prefix of the decoder layer
    hidden_first: bool = False  # in the input of the projection
    copies: tuple[str, ...] = ()  # tensors that repeat the target's embedding and head


def mtp_layouts(num_layers: int) -> tuple[MtpLayout, ...]:
    """The first module of a target of ``num_layers``, in each of the public layouts."""
    return (
        MtpLayout(
            prefix="model.mtp_layers.0.",
            embedding_norm="token_layernorm",
            hidden_norm="hidden_layernorm",
            projection="input_proj",
            final_norm="final_layernorm",
            layer="",
            hidden_first=True,
        ),
        MtpLayout(
            prefix="mtp.",
            embedding_norm="pre_fc_norm_embedding",
            hidden_norm="pre_fc_norm_hidden",
            projection="fc",
            final_norm="norm",
            layer="layers.0.",
        ),
        MtpLayout(
            prefix=f"model.layers.{num_layers}.",
            embedding_norm="enorm",
            hidden_norm="hnorm",
            projection="eh_proj",
            final_norm="shared_head.norm",
            layer="",
            copies=("embed_tokens.weight", "shared_head.head.weight"),
        ),
    )


def mtp_tensors(names: Collection[str], num_layers: int) -> set[str]:
    """Those of ``names`` that belong to such modules of a target of ``num_layers``."""
    found = {name for name in names if name.startswith(("model.mtp_layers.", "mtp."))}
    for name in names:
        layer = _LAYER.match(name)
        # Layers past the last that are no such module are a mistake in the files.
        if layer and int(layer[1]) >= num_layers and layer[0] + _PROJECTION in names:
            found.add(name)
    return found
