"""How large the pool of KV blocks is."""

import torch

from specdec.config import EngineConfig
from specdec.drafters.base import Drafter
from specdec.verifier.models.base import LanguageModel
from specdec.verifier.models.support import model_state_bytes

# KV memory that an engine takes on the CPU where num_kv_blocks is not given.
CPU_KV_BYTES = 2 * 2**30
# GPU memory left for activations and graphs when the KV cache takes the rest.
GPU_RESERVED_BYTES = 3 * 2**30


def kv_blocks(
    config: EngineConfig,
    target: LanguageModel,
    drafter: Drafter | None,
    max_model_len: int,
    max_num_seqs: int,
    block_size: int,
    max_k: int,
) -> int:
    """Blocks of the pool: what was asked for, else what memory holds and the engine can use."""
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    states = model_state_bytes(target, max_num_seqs, 1 + max_k)
    bytes_per_block = target.kv_bytes_per_block(block_size)
    if drafter is not None:
        bytes_per_block += drafter.bytes_per_block(block_size)
        states += drafter.state_bytes(max_num_seqs, max_k)
    # A model of recurrent layers alone has no keys and values.
    bytes_per_block = max(bytes_per_block, 1)
    device = config.torch_device
    blocks_per_text = -(-max_model_len // block_size)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        budget = free - (1 - config.gpu_memory_utilization) * total - GPU_RESERVED_BYTES
        budget -= states
        if budget < bytes_per_block:
            of_states = ""
            if states:
                size = f"{states / 2**30:.1f} GiB"
                of_states = f", recurrent states of max_num_seqs={max_num_seqs} take {size}"
            raise ValueError(
                f"no memory for a KV cache: {free / 2**30:.1f} GiB free on {device}, "
                f"gpu_memory_utilization={config.gpu_memory_utilization}{of_states}"
            )
    else:
        budget = max(CPU_KV_BYTES, blocks_per_text * bytes_per_block)
    return min(int(budget // bytes_per_block), blocks_per_text * max_num_seqs)
