"""What the doctor reads of a running engine, in one place: none of it is public."""

from collections.abc import Iterator
from contextlib import contextmanager

from specdec.engine import Engine
from specdec.request import Request
from specdec.step import DecodeStep


def step_of(engine: Engine) -> DecodeStep:
    """The engine's passes, with the target, its KV, the request state and the drafter."""
    return engine._runner.step


def running(engine: Engine) -> list[Request]:
    """Requests that hold a row of the state."""
    return engine._scheduler.running


@contextmanager
def without_prefix_cache(engine: Engine) -> Iterator[None]:
    """New requests compute all of their KV."""
    scheduler, before = engine._scheduler, engine._scheduler.prefix_caching
    scheduler.prefix_caching = False
    try:
        yield
    finally:
        scheduler.prefix_caching = before


@contextmanager
def chunks_of(engine: Engine, num_tokens: int | None) -> Iterator[None]:
    """Steps take ``num_tokens`` at most, so that prompts are read in such chunks."""
    scheduler, before = engine._scheduler, engine._scheduler.max_num_batched_tokens
    scheduler.max_num_batched_tokens = before if num_tokens is None else min(num_tokens, before)
    try:
        yield
    finally:
        scheduler.max_num_batched_tokens = before
