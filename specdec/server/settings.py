"""What a server was started with, beside its engine."""

import math
import re
from dataclasses import dataclass
from pathlib import Path

# What every client can put into a header.
_KEY = re.compile(r"[!-~]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSettings:
    """A bad value raises ValueError naming it.

    Attributes:
        model_name: what the base model is called in /v1/models.
        api_key: asked for on every route but /health; None asks nobody.
        lora_root: adapters may be loaded over HTTP from inside this folder; None: not at all.
        max_waiting: texts that run or wait; more are refused with 429.
        max_body: bytes of a request's body.
        timeout: seconds until a request is ended.
    """

    model_name: str
    api_key: str | None = None
    lora_root: Path | None = None
    max_waiting: int = 1024
    max_body: int = 4 << 20
    timeout: float = 600.0

    def __post_init__(self) -> None:
        if not self.model_name:
            raise ValueError("served_model_name must not be empty")
        if self.api_key is not None and not _KEY.fullmatch(self.api_key):
            raise ValueError("api_key must be printable ASCII without spaces, and not empty")
        for name in ("max_waiting", "max_body"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not (math.isfinite(self.timeout) and self.timeout > 0):
            raise ValueError(f"timeout must be above 0, got {self.timeout}")
        if self.lora_root is not None and not self.lora_root.is_dir():
            raise ValueError(f"lora_root: {str(self.lora_root)!r} is no folder")
