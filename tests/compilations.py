"""Which Triton kernels are compiled, and when."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def noted_compilations() -> Iterator[list[str]]:
    """Names of the kernels that Triton compiles, or takes from its disk cache, meanwhile."""
    import triton

    names: list[str] = []

    def note(*, repr: str, **_: object) -> None:
        names.append(repr)

    triton.knobs.runtime.jit_post_compile_hook = note
    try:
        yield names
    finally:
        triton.knobs.runtime.jit_post_compile_hook = None


def forget_compiled_kernels() -> None:
    """Empty the in-memory caches of all of our kernels: other tests have filled them."""
    import torch
    from triton.runtime.jit import JITFunction

    torch.cuda.synchronize()
    for item in gc.get_objects():
        if isinstance(item, JITFunction) and item.fn.__module__.startswith("specdec"):
            item.device_caches.clear()
