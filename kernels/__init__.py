"""Triton kernels, each beside a plain-PyTorch reference of the same signature."""
