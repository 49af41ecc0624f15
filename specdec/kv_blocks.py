"""How large the pool of KV blocks is."""

import torch

from specdec.config import EngineConfig
from specdec.drafters.base import Drafter
from specdec.verifier.models.base import LanguageModel

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
) -> int:
    """Blocks of the pool: what was asked for, else what memory holds and the engine can use."""
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    bytes_per_block = target.kv_bytes_per_block(block_size)
    if drafter is not None:
        bytes_per_block += drafter.bytes_per_block(block_size)
    device = config.torch_device
    blocks_per_text = -(-max_model_len // block_size)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        budget = free - (1 - config.gpu_memory_utilization) * total - GPU_RESERVED_BYTES
        if budget < bytes_per_block:
            raise ValueError(
                f"no memory for a KV cache: {free / 2**30:.1f} GiB free on {device}, "
                f"gpu_memory_utilization={config.gpu_memory_utilization}"
            )
    else:
        budget = max(CPU_KV_BYTES, blocks_per_text * bytes_per_block)
    return min(int(budget // bytes_per_block), blocks_per_text * max_num_seqs)
