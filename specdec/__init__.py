"""Speculative decoding that leaves the text as it is, on full CUDA graphs.

The names below are imported on first use: ``import specdec`` loads neither torch nor Triton.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from specdec.api import generate
    from specdec.drafters.base import Drafter
    from specdec.engine import Engine
    from specdec.outputs import Generation
    from specdec.params import SamplingParams
    from specdec.verifier.modes import CUDAGraphMode

_EXPORTS = {
    "CUDAGraphMode": "specdec.verifier.modes",
    "Drafter": "specdec.drafters.base",
    "Engine": "specdec.engine",
    "Generation": "specdec.outputs",
    "SamplingParams": "specdec.params",
    "generate": "specdec.api",
}
__all__ = ["CUDAGraphMode", "Drafter", "Engine", "Generation", "SamplingParams", "generate"]


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
