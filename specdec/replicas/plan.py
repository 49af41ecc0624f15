"""What every replica is started with, and which GPU is whose."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from specdec.server.settings import ServerSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class ServePlan:
    """An engine and what serves it.

    Attributes:
        model, draft, k: as in ``Engine``.
        fields: its further fields; JSON's types.
        settings: of the replica's own server.
    """

    model: str | None
    draft: str | None
    k: int | str
    fields: dict[str, Any]
    settings: ServerSettings

    def to_json(self) -> str:
        """In one line."""
        values = asdict(self)
        root = self.settings.lora_root
        values["settings"]["lora_root"] = None if root is None else str(root)
        return json.dumps(values)

    @classmethod
    def from_json(cls, text: str) -> Self:
        values = json.loads(text)
        settings = values["settings"]
        if settings["lora_root"] is not None:
            settings["lora_root"] = Path(settings["lora_root"])
        return cls(**values | {"settings": ServerSettings(**settings)})


def gpus_of_replicas(
    num_replicas: int, device: str, environ: Mapping[str, str], gpus_each: int = 1
) -> list[str] | None:
    """The value of CUDA_VISIBLE_DEVICES of each replica; None where they run on the CPU.

    ``gpus_each``: that hold a replica's model together (``tensor_parallel_size``).

    Raises ValueError where there are too few GPUs, or where ``device`` names one of them.
    """
    if device.startswith("cuda:"):
        raise ValueError(f"device: {device!r} is one GPU; each of --replicas takes its own: cuda")
    if device not in ("auto", "cuda"):
        return None
    # Counting GPUs starts none of them.
    import torch

    num_gpus = torch.cuda.device_count()
    if not num_gpus and device == "auto":
        return None
    if num_gpus < num_replicas * gpus_each:
        each = f" of {gpus_each} GPUs each" if gpus_each > 1 else ""
        raise ValueError(f"--replicas {num_replicas}{each}: this machine shows {num_gpus} GPUs")
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(number) for number in range(num_gpus)]
    firsts = range(0, num_replicas * gpus_each, gpus_each)
    return [",".join(name.strip() for name in names[i : i + gpus_each]) for i in firsts]


def environments(
    num_replicas: int, gpus: list[str] | None, environ: Mapping[str, str], num_cores: int
) -> list[dict[str, str]]:
    """The environment of each replica: its GPU, or its share of the cores."""
    if gpus is not None:
        return [{**environ, "CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus]
    share = str(max(1, num_cores // num_replicas))
    return [{"OMP_NUM_THREADS": share, **environ} for _ in range(num_replicas)]
