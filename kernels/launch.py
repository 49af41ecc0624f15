"""Programmatic dependent launch: a kernel is set up while the one before it ends.

Every kernel launched so calls ``wait_for_inputs`` before it touches memory that the kernel before
it writes, and before it writes anything itself; order is then as without.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Values of ``PDL``: launched without; launched so; launched so, and lets the next kernel in early.
OFF, WAITS, LETS_IN = 0, 1, 2
_LETS_IN = tl.constexpr(LETS_IN)


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Go on when all earlier kernels are over and what they wrote can be seen.

    With LETS_IN the programs of the next kernel may then take the room that this one leaves. They
    find all kernels before this one over, since every program of this one has waited for that.
    """
    if PDL:
        gdc_wait()
        if PDL == _LETS_IN:
            gdc_launch_dependents()


@triton.jit
def wait_unless_early(early, PDL: tl.constexpr):
    """Go on at once where ``early`` is set; what the kernel before this one writes must wait."""
    if PDL:  # noqa: SIM102 (PDL is known when the kernel is compiled)
        if early == 0:
            gdc_wait()


@cache
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def pdl_options(like: Tensor, *, lets_in: bool = False) -> dict[str, Any]:
    """Launch options of a kernel with a ``PDL`` parameter, for work on the device of ``like``.

    ``lets_in``: the kernel leaves room on the GPU, so programs of the next one that wait there take
    none from programs that work. Where it does not, they do, and end up several on one
    multiprocessor.
    """
    if _is_hopper(like.device):
        return {"PDL": LETS_IN if lets_in else WAITS, "launch_pdl": True}
    return {"PDL": OFF}


def reads_early(like: Tensor) -> int:
    """``early`` of a kernel that reads some of its inputs before the kernel before it is over.

    1 inside a capture. Such inputs are weights, which no kernel of a graph writes, and what only
    kernels before the one before it write, since those are over when it starts: positions, slots,
    lengths, block tables and keys of earlier positions. The model sees to that: what makes a
    batch's tensors is followed by the embedding lookup. 0 in a stream, where the kernel before may
    be the one that fills them.
    """
    return int(like.is_cuda and torch.cuda.is_current_stream_capturing())
