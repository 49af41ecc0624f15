"""Simulated acceptance: what a drafter of a given quality would give, on this model and device.

Everything of a step runs as it always does; only the comparison of drafts with the target's tokens
is replaced by draws. The text means nothing then, so this is for measurements alone.

Shape letters: R requests of the batch, k drafts.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.kernels.sampling import SIMULATED, uniform_noise
from specdec.verifier.state import RowState


def rates_by_position(value: float | Sequence[float], max_k: int) -> list[float]:
    """One rate per position: a number stands for all, a list's last entry for those past its end.

    A rate is the chance that a draft is accepted if all drafts before it were.
    """
    rates = [float(value)] if isinstance(value, int | float) else [float(rate) for rate in value]
    return [rates[min(position, len(rates) - 1)] for position in range(max_k)]


def simulated_agreement(rows: RowState, rates: Tensor, k: int) -> Tensor:
    """[R, k] bool: which drafts pass. ``rates`` [at least k] float32.

    The draws are counter-based, keyed by the request's seed (its prompt's, see ``intake``), its
    state row and the position in its text: a run repeats, padding changes nothing, and prompts of
    one length that follow each other in one row are not all given the same draws.
    """
    positions = rows.seq_lens[:, None] + torch.arange(k, device=rates.device)
    return uniform_noise(rows.simulation_keys, positions, SIMULATED) < rates[:k]
