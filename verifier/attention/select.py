"""The attention backend of an engine, by name or by what fits, and why it was that one."""

import importlib.util
import logging
from dataclasses import dataclass

import torch

from specdec.verifier.attention.base import AttentionBackend, AttentionNeeds

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendInfo:
    """What can be said of a backend before it is built."""

    summary: str
    package: str | None = None  # the module that it needs
    install: str | None = None  # how to get it
    block_size: int = 16  # positions per KV block where the user leaves it open
    unavailable: str | None = None  # why this release cannot run it anywhere


BACKENDS: dict[str, BackendInfo] = {
    "sdpa": BackendInfo(summary="plain PyTorch: the reference, and the CPU"),
    "triton": BackendInfo(
        summary="our paged kernel: every batch on a graph, batch-invariant",
        package="triton",
        install="pip install triton",
    ),
    "mla": BackendInfo(
        summary="latent attention (DeepSeek type): our kernel on a GPU, PyTorch elsewhere"
    ),
    "flash_attn": BackendInfo(
        summary="the flash-attn package, 2.x",
        package="flash_attn",
        install="pip install 'flash-attn>=2.8,<3' --no-build-isolation",
        block_size=256,
    ),
    "flashinfer": BackendInfo(
        summary="the flashinfer package",
        package="flashinfer",
        install="pip install 'flashinfer-python>=0.6.14'",
    ),
    "flashmla": BackendInfo(
        summary="the FlashMLA package",
        unavailable="this release has not been run with it; 'mla' serves latent attention",
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendChoice:
    """The backend that was taken, why, and what speaks against each of the others."""

    backend: AttentionBackend
    asked: str
    reason: str
    others: tuple[tuple[str, str], ...] = ()  # (name, why not)

    def __str__(self) -> str:
        lines = [f"attention: {self.backend.name} ({self.reason})"]
        return "\n".join(lines + [f"  not {name}: {why}" for name, why in self.others])


def default_block_size(name: str) -> int:
    """Positions per KV block for ``kv_block_size="auto"`` under this ``attention_backend``."""
    return BACKENDS[name].block_size if name in BACKENDS else 16


def unavailable(name: str) -> str | None:
    """Why the backend called ``name`` cannot be built here, with how to install it, or None."""
    info = BACKENDS[name]
    if info.unavailable is not None:
        return info.unavailable
    if info.package is not None and importlib.util.find_spec(info.package) is None:
        return f"{info.package} is not installed: {info.install}"
    return None


def choose_backend(
    name: str,
    *,
    head_size: int,
    dtype: torch.dtype,
    block_size: int,
    device: torch.device | str,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    latent_size: int | None = None,
) -> BackendChoice:
    """The backend called ``name``. ``"auto"`` takes our kernels on a GPU, PyTorch elsewhere.

    The other packages are not batch-invariant, so only their names bring them in. Where triton
    cannot serve the model, ``"auto"`` falls back to sdpa with a warning.
    Raises ValueError for a name that does not exist, for one whose package is missing (with the
    line that installs it), and for one that cannot serve such a model.
    """
    needs = AttentionNeeds(
        head_size=head_size,
        dtype=dtype,
        block_size=block_size,
        device=torch.device(device),
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        latent_size=latent_size,
    )
    if name not in ("auto", *BACKENDS):
        known = ", ".join(("auto", *BACKENDS))
        raise ValueError(f"attention_backend: {name!r} is not known; choose one of {known}")
    if name != "auto":
        backend, why_not = _try(name, needs)
        if backend is None:
            raise ValueError(f"attention_backend {name!r} cannot serve this model: {why_not}")
        return BackendChoice(backend=backend, asked=name, reason="asked for by name")

    against: dict[str, str] = {}
    on_gpu = needs.device.type == "cuda"
    for each in ("mla",) if latent_size is not None else ("triton", "sdpa"):
        backend, why_not = _try(each, needs)
        if backend is None:
            against[each] = why_not
            continue
        if on_gpu and each == "sdpa":
            logger.warning("attention_backend: serving sdpa, not triton: %s", against["triton"])
        for other in BACKENDS.keys() - against.keys() - {each}:
            against[other] = unavailable(other) or _not_by_itself(other, latent_size)
        return BackendChoice(
            backend=backend,
            asked=name,
            reason=BACKENDS[each].summary,
            others=tuple((other, against[other]) for other in BACKENDS if other in against),
        )
    raise ValueError(f"attention_backend: none can serve this model; {against}")


def select_backend(
    name: str,
    *,
    head_size: int,
    dtype: torch.dtype,
    block_size: int,
    device: torch.device | str,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    latent_size: int | None = None,
) -> AttentionBackend:
    """``choose_backend`` without the reasons."""
    return choose_backend(
        name,
        head_size=head_size,
        dtype=dtype,
        block_size=block_size,
        device=device,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        latent_size=latent_size,
    ).backend


def _try(name: str, needs: AttentionNeeds) -> tuple[AttentionBackend | None, str]:
    """The backend, or None and why not."""
    reasons = [unavailable(name)]
    if needs.device.type != "cuda" and name not in ("sdpa", "mla", "flashmla"):
        # Said first: to install a package would not help here.
        reasons.insert(0, f"it runs on CUDA, not on {needs.device.type}")
    against = [reason for reason in reasons if reason is not None]
    if against:
        return None, "; ".join(against)
    try:
        backend = build_backend(name, needs.device, needs.latent_size)
    except (ImportError, OSError) as error:
        return None, f"{BACKENDS[name].package} does not load: {error}"
    reason = backend.unsupported(needs)
    return (None, reason) if reason is not None else (backend, "")


def build_backend(
    name: str, device: torch.device, latent_size: int | None = None
) -> AttentionBackend:
    """A backend of this name, whatever it may be asked to serve. Imports its package."""
    if name == "triton":
        from specdec.verifier.attention.triton import TritonBackend

        return TritonBackend()
    if name == "mla":
        from specdec.verifier.attention.mla import MlaBackend

        return MlaBackend(device, latent_size)
    if name == "flash_attn":
        from specdec.verifier.attention.flash_attn import FlashAttnBackend

        return FlashAttnBackend()
    if name == "flashinfer":
        from specdec.verifier.attention.flashinfer import FlashInferBackend

        return FlashInferBackend()
    assert name == "sdpa", name
    from specdec.verifier.attention.sdpa import SdpaBackend

    return SdpaBackend(device)


def _not_by_itself(name: str, latent_size: int | None) -> str:
    if name == "mla":
        return "the model has no latent attention"
    if latent_size is not None:
        return "the model has latent attention"
    if name in ("flash_attn", "flashinfer"):
        return "not batch-invariant: only by name"
    return "comes after the one taken"
