"""The attention backend of an engine, by name or by what fits."""

import logging

import torch

from specdec.verifier.attention.base import AttentionBackend

logger = logging.getLogger(__name__)

BACKENDS = ("sdpa", "triton")


def _build(name: str, device: torch.device) -> AttentionBackend:
    if name == "triton":
        from specdec.verifier.attention.triton import TritonBackend

        return TritonBackend()
    from specdec.verifier.attention.sdpa import SdpaBackend

    return SdpaBackend(device)


def select_backend(
    name: str,
    *,
    head_size: int,
    dtype: torch.dtype,
    block_size: int,
    device: torch.device | str,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> AttentionBackend:
    """The backend called ``name``; ``"auto"`` takes triton on a GPU and sdpa elsewhere.

    Where triton cannot serve the model, ``"auto"`` falls back to sdpa with a warning.
    Raises ValueError for a name that does not exist, and for one that cannot serve such a model.
    """
    device = torch.device(device)
    if name not in ("auto", *BACKENDS):
        known = ", ".join(("auto", *BACKENDS))
        raise ValueError(f"attention_backend: {name!r} is not known; choose one of {known}")
    wanted = name
    if name == "auto":
        wanted = "triton" if device.type == "cuda" else "sdpa"
    backend = _build(wanted, device)
    reason = backend.unsupported(
        head_size=head_size,
        dtype=dtype,
        block_size=block_size,
        device=device,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
    )
    if reason is None:
        return backend
    if name == "auto":
        logger.warning("attention_backend: serving sdpa instead of %s: %s", wanted, reason)
        return _build("sdpa", device)
    raise ValueError(f"attention_backend {name!r} cannot serve this model: {reason}")
