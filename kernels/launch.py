"""What kernels do for the kernel after them: an early launch, and weights brought near in advance.

With programmatic dependent launch a kernel is set up while the one before it ends. It begins with
``wait_for_inputs``, before it touches memory that another kernel writes; order is then as without.

Attention and norms leave most of the GPU and its memory idle. ``fetch_ahead`` lets programs that
have nothing else to do bring the weights that are read next to the second-level cache: no kernel
writes weights, so nothing has to be waited for, and no result depends on it.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Go on when all earlier kernels are over and what they wrote can be seen."""
    if PDL:
        gdc_wait()


@triton.jit
def fetch_ahead(
    weight,
    worker,
    num_workers,
    num_rows,
    row_stride,
    ROW_BYTES: tl.constexpr,
    LANES: tl.constexpr,
):
    """Start reading the first ``ROW_BYTES`` of ``num_rows`` rows, shared out among workers.

    ``row_stride`` in elements, a multiple of 16 bytes as ROW_BYTES is; LANES threads per program.
    """
    for start in range(worker * LANES, num_rows, num_workers * LANES):
        rows = tl.minimum(start + tl.arange(0, LANES), num_rows - 1).to(tl.int64)
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
            "=r,l,r",
            [
                (weight + rows * row_stride).to(tl.int64),
                tl.full([LANES], ROW_BYTES, tl.int32),
            ],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@cache
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def pdl_options(like: Tensor) -> dict[str, Any]:
    """Launch options of a kernel with a ``PDL`` parameter, for work on the device of ``like``."""
    if _is_hopper(like.device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


class Ahead(NamedTuple):
    """The part of a weight matrix to fetch ahead."""

    num_rows: int
    row_bytes: int  # 0 for nothing

    @classmethod
    def of(cls, weight: Tensor | None, num_bytes: int) -> "Ahead":
        """About ``num_bytes`` of it: the beginning of every row, where all programs start."""
        if weight is None or not _is_hopper(weight.device) or weight.data_ptr() % 16:
            return cls(0, 0)
        num_rows, depth = weight.shape
        whole = depth * weight.itemsize
        if whole % 16:
            return cls(0, 0)
        row_bytes = min(whole, max(256, num_bytes // num_rows // 256 * 256))
        return cls(min(num_rows, num_bytes // row_bytes), row_bytes)
