"""The conformance suite of attention backends: every case over every backend that is present.

    pytest tests/attention/test_conformance.py -k triton

On a GPU it runs there too, over the packages that are installed. The summary at the end says how
many cases each backend served and how many it refused. For a new backend see docs/attention.md.
"""

import os
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from attention_cases import (
    CASES,
    Case,
    assert_a_graph_follows,
    assert_as_good,
    attend,
    keys_of_rows,
    positions,
)

from specdec.verifier.attention.base import AttentionBackend
from specdec.verifier.attention.select import (
    build_backend,
    choose_backend,
    default_block_size,
    unavailable,
)
from specdec.verifier.graph import GraphPool
from specdec.verifier.modes import AttentionCGSupport

ON_GPU = [
    name for name in ("triton", "sdpa", "flash_attn", "flashinfer") if unavailable(name) is None
]
PRESENT = pytest.mark.parametrize(
    ("device", "name"),
    [
        pytest.param("cpu", "sdpa", id="cpu-sdpa"),
        *(pytest.param("cuda", name, id=f"cuda-{name}", marks=pytest.mark.gpu) for name in ON_GPU),
    ],
)
# flashinfer compiles a kernel, a minute each, for every dtype, head size, window and cap.
COMPILES_ALL = os.environ.get("SPECDEC_COMPILE_ALL") == "1"
GRAPH_CASES = [
    Case(query_len=1, heads=(8, 2), head_size=128),
    Case(query_len=5, heads=(8, 2), head_size=128),
    Case(query_len=5, heads=(9, 3)),
    Case(query_len=9, heads=(7, 1), head_size=80),
    Case(query_len=5, sliding_window=30, soft_cap=5.0),
    Case(query_len=2, dtype="fp32"),
    Case(query_len=0, heads=(8, 2), head_size=128),
    Case(query_len=0, sliding_window=30),
]


@cache
def backend_on(device: str, name: str) -> AttentionBackend:
    """One of each, as an engine has it, so that what one batch leaves behind meets the next."""
    return build_backend(name, torch.device(device))


def served(device: str, name: str, case: Case, record: Callable) -> tuple[AttentionBackend, int]:
    """The backend and its block size for a case that it serves; a case that it refuses ends here,
    when ``attention_backend`` has refused it too.
    """
    backend = backend_on(device, name)
    block_size = case.block_size or default_block_size(name)
    needs = case.needs(block_size, device)
    reason = backend.unsupported(needs)
    if reason is not None:
        fields = {field: getattr(needs, field) for field in needs.__slots__}
        message = f"attention_backend {name!r} cannot serve this model: {reason}"
        with pytest.raises(ValueError, match=re.escape(message)):
            choose_backend(name, **fields)
        record("attention", f"{device} {name} refused")
        raise Refused
    compiled = (case.dtype, case.head_size, case.sliding_window, case.soft_cap)
    if name == "flashinfer" and not COMPILES_ALL and compiled != ("bf16", 128, None, None):
        record("attention", f"{device} {name} left out")
        pytest.skip("flashinfer would compile a kernel for it: SPECDEC_COMPILE_ALL=1")
    record("attention", f"{device} {name} run")
    return backend, block_size


class Refused(Exception):
    """The case is outside of what the backend declares."""


@PRESENT
@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(device, name, case, record_property) -> None:
    """Each head sees exactly its own keys, up to each row's position (C04, C41, C50)."""
    try:
        backend, block_size = served(device, name, case, record_property)
    except Refused:
        return
    assert_as_good(backend, case.batch(block_size, device))


SHORT_CASES = [
    Case(heads=(8, 2), head_size=128),
    Case(heads=(9, 3)),
    Case(sliding_window=3),
    Case(soft_cap=2.0, query_len=9),
]


@PRESENT
@pytest.mark.parametrize("case", SHORT_CASES, ids=str)
def test_rows_that_drafted_less_and_padding(device, name, case, record_property) -> None:
    """Rows before the end of a text are exact where the batch has more rows than the text."""
    try:
        backend, block_size = served(device, name, case, record_property)
    except Refused:
        return
    assert_as_good(backend, case.short_batch(block_size, device))


@PRESENT
@pytest.mark.parametrize("case", [Case(heads=(8, 2), head_size=128), Case()], ids=str)
def test_a_broken_key_reaches_only_the_rows_that_see_it(
    device, name, case, record_property
) -> None:
    """What is not finite is stored as a NaN key and a zero value (``write_kv``)."""
    try:
        backend, block_size = served(device, name, case, record_property)
    except Refused:
        return
    batch = case.batch(block_size, device)
    wanted = attend(backend, batch)
    key_cache, value_cache = batch.key_cache.clone(), batch.value_cache.clone()
    for request, length in enumerate(batch.seq_lens.tolist()):
        block = int(batch.block_table[request, (length - 2) // block_size])
        key_cache[block, (length - 2) % block_size] = torch.nan
        value_cache[block, (length - 2) % block_size] = 0
    result = attend(backend, replace(batch, key_cache=key_cache, value_cache=value_cache))
    sees = positions(batch) >= keys_of_rows(batch) - 2
    assert result[sees].isnan().all()
    assert torch.equal(result[~sees], wanted[~sees])


@PRESENT
@pytest.mark.parametrize("case", GRAPH_CASES, ids=str)
def test_a_graph_follows_the_lengths_of_the_step(device, name, case, record_property) -> None:
    """Replays after the texts have grown, shrunk and gone (C26, C30)."""
    try:
        backend, block_size = served(device, name, case, record_property)
    except Refused:
        return
    if case.query_len == 0 and backend.cg_support < AttentionCGSupport.ALWAYS:
        return
    if case.query_len > 1 and backend.cg_support < AttentionCGSupport.UNIFORM_BATCH:
        return
    pool = GraphPool(device)
    assert_a_graph_follows(
        backend, case.batch(block_size, device), lambda fn: pool.capture(fn).replay
    )


@PRESENT
def test_what_must_be_served(device, name) -> None:
    """A backend that refuses everything conforms to nothing."""
    backend = backend_on(device, name)
    block_size = default_block_size(name)
    for head_size in (64, 128):
        needs = Case(head_size=head_size).needs(block_size, device)
        assert backend.unsupported(needs) is None
    if name in ("sdpa", "triton"):
        reasons = [
            backend.unsupported(case.needs(case.block_size or block_size, device)) for case in CASES
        ]
        assert reasons == [None] * len(CASES)
