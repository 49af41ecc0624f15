"""What cannot run over several ranks, refused by name before any of them is started."""

from pathlib import Path

import torch
import torch.distributed as dist

from specdec.config import EngineConfig
from specdec.drafters.eagle_checkpoint import EagleCheckpoint
from specdec.sources import Source
from specdec.verifier.made import MadeModel
from specdec.verifier.models.llama import CausalLM
from specdec.verifier.parallel.sharding import check_shardable

FIELD = "tensor_parallel_size"


def check_parallel(
    config: EngineConfig, target: Source, draft: object, draft_source: Source | None
) -> None:
    """Raise ValueError naming the field and what stands in the way of several ranks.

    ``draft_source``: the draft model's or head's files, where ``draft`` is one.
    """
    size = config.tensor_parallel_size
    if size == 1:
        return
    _check_devices(config, size)
    _check_model("model", target)
    check_shardable(FIELD, target.config, size)
    if draft is not None and not isinstance(draft, str | Path | CausalLM | MadeModel):
        raise ValueError(f"{FIELD}={size}: a drafter of your own runs in one process alone")
    if draft_source is None:
        return
    if draft_source.head is not None:
        if not isinstance(draft_source.head, EagleCheckpoint):
            raise ValueError(f"{FIELD}={size}: draft={draft!r} is not served, eagle:PATH is")
        return
    _check_model("draft", draft_source)
    if config.draft_tensor_parallel_size != 1:
        check_shardable("draft_tensor_parallel_size", draft_source.config, size)


def _check_model(field: str, source: Source) -> None:
    if isinstance(source.model, CausalLM):
        raise ValueError(f"{field}: a model that is loaded is not cut; give {FIELD} its path")


def _check_devices(config: EngineConfig, size: int) -> None:
    device = config.torch_device
    if device.type == "cpu":
        if not dist.is_available() or not dist.is_gloo_available():
            raise ValueError(f"{FIELD}={size}: this build of torch has no gloo")
        return
    if device.index not in (None, 0):
        raise ValueError(f"{FIELD}={size} takes the GPUs from cuda:0 on; device is {device}")
    visible = torch.cuda.device_count()
    if size > visible:
        raise ValueError(f"{FIELD}={size} is more than the {visible} GPUs that can be seen")
    if not dist.is_available() or not dist.is_nccl_available():
        raise ValueError(f"{FIELD}={size}: this build of torch has no NCCL")
    if torch.cuda.current_device() != 0:
        raise ValueError(f"{FIELD}={size}: this process must be on GPU 0, the first of them")
