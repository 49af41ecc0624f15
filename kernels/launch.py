"""Programmatic dependent launch: a kernel is set up while the one before it ends.

Every kernel launched so begins with ``wait_for_inputs``, before it touches memory that another
kernel writes; order is then as without.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Go on when all earlier kernels are over and what they wrote can be seen."""
    # Nothing says early that the next kernel may start: programs that wait take room from those
    # that work, and end up several on one multiprocessor.
    if PDL:
        gdc_wait()


@cache
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def pdl_options(like: Tensor) -> dict[str, Any]:
    """Launch options of a kernel with a ``PDL`` parameter, for work on the device of ``like``."""
    if _is_hopper(like.device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}
