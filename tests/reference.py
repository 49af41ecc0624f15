"""transformers' reading of a GGUF file of the Llama architecture, as a reference model."""

from pathlib import Path

import torch
from torch import nn


def transformers_from_gguf(path: Path) -> nn.Module:
    """What ``from_pretrained(gguf_file=...)`` gives in float32, without its need of accelerate."""
    from transformers import AutoConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    # Drawing random weights first would take most of a minute.
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    read = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
    left = model.load_state_dict(read["tensors"], strict=False, assign=True)
    assert set(left.missing_keys) <= {"lm_head.weight"}, left
    assert not left.unexpected_keys, left
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.float().eval()
