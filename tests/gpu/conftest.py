"""Fixtures of several GPU test files."""

import pytest
import torch

from specdec.kernels.linear import configure_exact_blas


@pytest.fixture
def exact_and_poisoned():
    """cuBLASLt without split-K, and NaN in all memory that PyTorch hands out unwritten."""
    configure_exact_blas()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
