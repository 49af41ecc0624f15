"""Everything that scores drafted tokens and accepts them: batches, graphs, attention, models, KV.

The names below are imported on first use, so that ``import specdec.verifier`` stays cheap.
"""

from importlib import import_module

_EXPORTS = {
    "AttentionCGSupport": "modes",
    "BatchDescriptor": "modes",
    "CUDAGraphMode": "modes",
    "CUDAGraphWrapper": "graph",
    "CudagraphDispatcher": "dispatcher",
    "GraphKey": "modes",
    "resolve_cudagraph_mode": "modes",
    "set_forward_context": "context",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
