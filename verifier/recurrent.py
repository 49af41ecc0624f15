"""The states of recurrent layers: a row per request, beside the paged KV cache."""

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels.mamba import (
    LayerState,
    Runs,
    ScanConfig,
    causal_conv,
    gated_rms_norm,
    keep_run,
    selective_scan,
)
from specdec.verifier.attention.base import AttentionMetadata
from specdec.verifier.models.mamba_config import MambaConfig

_RUNS = "recurrent"


class RecurrentStates:
    """Fixed-address memory of all Mamba-2 layers of a model (``specdec.kernels.mamba``).

    Attributes:
        run_length: tokens at the end of a run that stay out of the state, so that they can be
            rejected: 1 + k of a model that verifies or drafts k tokens.
    """

    def __init__(
        self,
        config: MambaConfig,
        *,
        num_layers: int,
        max_num_seqs: int,
        run_length: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.run_length = run_length
        # The last row is that of padding.
        shapes = _shapes(config, num_layers, max_num_seqs + 1, run_length)
        ssm, folded, inputs, activated = shapes
        self.ssm = torch.zeros(ssm, dtype=torch.float32, device=device)
        self.folded = torch.zeros(folded, dtype=torch.int32, device=device)
        self.inputs = torch.zeros(inputs, dtype=dtype, device=device)
        self.activated = torch.zeros(activated, dtype=dtype, device=device)

    @property
    def tensors(self) -> list[Tensor]:
        return [self.ssm, self.folded, self.inputs, self.activated]

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in self.tensors)

    def layer(self, index: int) -> LayerState:
        """The states of the ``index``-th recurrent layer."""
        return LayerState(*(each[index] for each in self.tensors))


def runs_of(metadata: AttentionMetadata) -> Runs:
    """A batch as the kernels of recurrent layers see it; the same for all layers of a pass."""
    if _RUNS not in metadata.prepared:
        assert metadata.state_rows is not None
        metadata.prepared[_RUNS] = Runs(
            num_tokens=metadata.slot_mapping.shape[0],
            query_start_loc=metadata.query_start_loc,
            context_lens=metadata.context_lens,
            seq_lens=metadata.seq_lens,
            state_rows=metadata.state_rows,
            max_query_len=metadata.max_query_len,
            tentative=metadata.tentative,
        )
    runs: Runs = metadata.prepared[_RUNS]
    return runs


class MixerWeights(NamedTuple):
    """Of a Mamba-2 layer between its two projections: C channels, H heads, D features."""

    conv_weight: Tensor  # [C, 1, taps]
    conv_bias: Tensor | None  # [C]
    a_log: Tensor  # [H]
    skip: Tensor  # [H]
    dt_bias: Tensor  # [H]
    norm: Tensor  # [D]


class MixerSizes(NamedTuple):
    """Its constants."""

    eps: float
    num_groups: int
    dt_min: float
    dt_max: float


def recurrence(
    states: RecurrentStates,
    metadata: AttentionMetadata,
    projected: Tensor,
    weights: MixerWeights,
    layer: int,
    sizes: MixerSizes,
) -> Tensor:
    """A Mamba-2 layer between its two projections, which brings the states of its rows forward.

    projected [T, D + C + H]: gate, inputs of the convolution, steps; layer: among the recurrent
    ones -> [T, D].
    """
    state, runs = states.layer(layer), runs_of(metadata)
    inner = weights.norm.shape[0]
    gate, inputs = projected[:, :inner], projected[:, inner:]
    conv_weight = weights.conv_weight[:, 0]
    activated = causal_conv(inputs, conv_weight, weights.conv_bias, state, runs)
    config = ScanConfig(sizes.num_groups, states.run_length, sizes.dt_min, sizes.dt_max)
    y = selective_scan(
        activated, inputs, weights.a_log, weights.skip, weights.dt_bias, state, runs, config
    )
    keep_run(inputs, activated, state, runs)
    return gated_rms_norm(y, gate, weights.norm, sizes.eps, sizes.num_groups)


def state_bytes(
    config: MambaConfig, num_layers: int, max_num_seqs: int, run_length: int, dtype: torch.dtype
) -> int:
    """Bytes of ``RecurrentStates`` of these sizes."""
    sizes = [_product(each) for each in _shapes(config, num_layers, max_num_seqs + 1, run_length)]
    wide, narrow = torch.float32.itemsize, dtype.itemsize
    return (sizes[0] + sizes[1]) * wide + (sizes[2] + sizes[3]) * narrow


def _product(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _shapes(
    config: MambaConfig, num_layers: int, num_rows: int, run_length: int
) -> tuple[tuple[int, ...], ...]:
    # The convolution looks back from the first token that may be taken back.
    num_kept = run_length + config.conv_taps - 1
    rows, channels = (num_layers, num_rows), config.num_channels
    return (
        (*rows, config.num_heads, config.head_size, config.state_size),
        (*rows, config.num_heads, config.head_size),
        (*rows, num_kept, channels + config.num_heads),
        (*rows, num_kept, channels),
    )
