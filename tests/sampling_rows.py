"""Rows with sampling parameters, for tests of the sampler and of its kernels."""

import torch

from specdec.kernels.sampler import SamplingRows

# (temperature, top_k, top_p, min_p): each cut alone, all together, their ends, and greedy.
KINDS = [
    (1.0, 0, 1.0, 0.0),
    (0.8, 50, 0.95, 0.0),
    (0.0, 5, 0.5, 0.0),
    (1.0, 0, 0.9, 0.0),
    (0.5, 1, 1.0, 0.0),
    (100.0, 99, 0.9, 0.0),
    (0.01, 5, 0.5, 0.0),
    (2.0, 10**6, 1e-6, 0.0),
    (1.0, 3000, 0.7, 0.02),
    (1.5, 0, 1.0, 0.1),
]


def sampling_rows(
    kinds: list[tuple[float, int, float, float]],
    coupled: list[bool] | bool = True,
    device: str = "cpu",
    first_seed: int = 1,
) -> SamplingRows:
    temperature, top_k, top_p, min_p = zip(*kinds, strict=True)
    count = len(kinds)
    if isinstance(coupled, bool):
        coupled = [coupled] * count

    def column(values: object, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return SamplingRows(
        temperature=column(temperature, torch.float32),
        top_k=column(top_k, torch.int64),
        top_p=column(top_p, torch.float32),
        min_p=column(min_p, torch.float32),
        seed=column([7 * row + first_seed for row in range(count)], torch.int64),
        coupled=column(coupled, torch.bool),
        output_index=column([3 * row for row in range(count)], torch.int64),
    )


def row_of(rows: SamplingRows, row: int) -> SamplingRows:
    """One of them alone."""
    fields = SamplingRows.__dataclass_fields__
    return SamplingRows(**{name: getattr(rows, name)[row : row + 1] for name in fields})
