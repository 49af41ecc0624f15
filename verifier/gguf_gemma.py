"""What GGUF files of Gemma 2 and 3 have of their own."""

from collections.abc import Mapping
from typing import Any

from specdec.verifier.models.rope import RopeConfig
from specdec.verifier.models.windows import FULL, SLIDING, parse_windows

ARCHITECTURES = {"gemma2": "Gemma2ForCausalLM", "gemma3": "Gemma3ForCausalLM"}
LAYER_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# Layers of the 27B models, whose queries are scaled by the width of a head's share of the hidden
# state instead of the head's own. The files do not say so, and llama.cpp goes by the layers too.
_SCALED_BY_HIDDEN = {"gemma2": 46, "gemma3": 62}


def fields(meta: Mapping[str, Any], arch: str, *, context: int) -> dict[str, Any]:
    """Fields of ``ModelConfig``. Raises ValueError naming a bad one."""

    def field(name: str, default: Any = None) -> Any:
        return meta.get(f"{arch}.{name}", default)

    num_layers, heads = int(field("block_count")), int(field("attention.head_count"))
    head_size = int(field("attention.key_length", 256))
    scalar: float = head_size
    if num_layers == _SCALED_BY_HIDDEN[arch]:
        scalar = int(field("embedding_length")) / heads
    written: dict[str, Any] = {"sliding_window": field("attention.sliding_window", 4096)}
    pattern = field("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        written["layer_types"] = [SLIDING if slides else FULL for slides in pattern]
    elif pattern is not None:
        written["sliding_window_pattern"] = pattern
    model_type = {"gemma2": "gemma2", "gemma3": "gemma3_text"}[arch]
    window, layers = parse_windows(written, model_type, num_layers=num_layers, max_position=context)
    caps = (50.0, 30.0) if arch == "gemma2" else (None, None)
    local_rope = None
    if arch == "gemma3":
        theta = float(field("rope.freq_base_swa", 10000.0))
        local_rope = RopeConfig(theta=theta, rotary_dim=head_size)
    return {
        "attention_scale": scalar**-0.5,
        "attention_soft_cap": field("attn_logit_softcapping", caps[0]),
        "logit_soft_cap": field("final_logit_softcapping", caps[1]),
        "sliding_window": window,
        "sliding_layers": layers,
        "local_rope": local_rope,
    }
