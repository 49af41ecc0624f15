"""The vocabulary: what each mode means, and what is served where a backend cannot do all of it."""

import logging

import pytest

from specdec.verifier.modes import (
    AttentionCGSupport,
    BatchDescriptor,
    CUDAGraphMode,
    GraphKey,
    resolve_cudagraph_mode,
    resolve_uniform_query_lens,
)

# mode: decode_mode, mixed_mode, separate_routine, strongest
MEANING = {
    "NONE": ("NONE", "NONE", False, "NONE"),
    "PIECEWISE": ("PIECEWISE", "PIECEWISE", False, "PIECEWISE"),
    "FULL": ("FULL", "FULL", False, "FULL"),
    "FULL_DECODE_ONLY": ("FULL", "NONE", True, "FULL"),
    "FULL_AND_PIECEWISE": ("FULL", "PIECEWISE", True, "FULL"),
}


@pytest.mark.parametrize("name", MEANING)
def test_meaning_of_a_mode(name):
    mode = CUDAGraphMode[name]
    decode, mixed, separate, strongest = MEANING[name]
    assert mode.decode_mode().name == decode
    assert mode.mixed_mode().name == mixed
    assert mode.separate_routine() is separate
    assert mode.max_cudagraph_mode().name == strongest
    assert mode.has_full_cudagraphs() == ("FULL" in (decode, mixed))
    assert mode.has_piecewise_cudagraphs() == ("PIECEWISE" in (decode, mixed))
    assert mode.requires_piecewise_compilation() == mode.has_piecewise_cudagraphs()
    assert mode.is_valid_runtime_mode() is not separate
    for runtime in ("NONE", "PIECEWISE", "FULL"):
        assert mode.has_mode(CUDAGraphMode[runtime]) == (runtime in (decode, mixed))
    assert str(mode) == name


def test_the_modes_are_these_five():
    assert list(CUDAGraphMode.__members__) == list(MEANING)


@pytest.mark.parametrize("value", ["full_and_piecewise", CUDAGraphMode.FULL_AND_PIECEWISE])
def test_parse(value):
    assert CUDAGraphMode.parse(value) is CUDAGraphMode.FULL_AND_PIECEWISE


@pytest.mark.parametrize("value", ["fulll", 3, None])
def test_parse_refuses_by_name(value):
    with pytest.raises(ValueError, match="cudagraph_mode must be one of NONE, PIECEWISE, FULL"):
        CUDAGraphMode.parse(value)


# Rows: mode asked for and support. Columns: what is served for (query length, piecewise available)
# of (1, yes), (5, yes), (1, no), (5, no).
SERVED = """
NONE                ALWAYS                       NONE                NONE                NONE              NONE
NONE                UNIFORM_BATCH                NONE                NONE                NONE              NONE
NONE                UNIFORM_SINGLE_TOKEN_DECODE  NONE                NONE                NONE              NONE
NONE                NEVER                        NONE                NONE                NONE              NONE
PIECEWISE           ALWAYS                       PIECEWISE           PIECEWISE           NONE              NONE
PIECEWISE           UNIFORM_BATCH                PIECEWISE           PIECEWISE           NONE              NONE
PIECEWISE           UNIFORM_SINGLE_TOKEN_DECODE  PIECEWISE           PIECEWISE           NONE              NONE
PIECEWISE           NEVER                        PIECEWISE           PIECEWISE           NONE              NONE
FULL                ALWAYS                       FULL                FULL                FULL              FULL
FULL                UNIFORM_BATCH                FULL_AND_PIECEWISE  FULL_AND_PIECEWISE  FULL_DECODE_ONLY  FULL_DECODE_ONLY
FULL                UNIFORM_SINGLE_TOKEN_DECODE  FULL_AND_PIECEWISE  PIECEWISE           FULL_DECODE_ONLY  NONE
FULL                NEVER                        PIECEWISE           PIECEWISE           NONE              NONE
FULL_DECODE_ONLY    ALWAYS                       FULL_DECODE_ONLY    FULL_DECODE_ONLY    FULL_DECODE_ONLY  FULL_DECODE_ONLY
FULL_DECODE_ONLY    UNIFORM_BATCH                FULL_DECODE_ONLY    FULL_DECODE_ONLY    FULL_DECODE_ONLY  FULL_DECODE_ONLY
FULL_DECODE_ONLY    UNIFORM_SINGLE_TOKEN_DECODE  FULL_DECODE_ONLY    PIECEWISE           FULL_DECODE_ONLY  NONE
FULL_DECODE_ONLY    NEVER                        PIECEWISE           PIECEWISE           NONE              NONE
FULL_AND_PIECEWISE  ALWAYS                       FULL_AND_PIECEWISE  FULL_AND_PIECEWISE  FULL_DECODE_ONLY  FULL_DECODE_ONLY
FULL_AND_PIECEWISE  UNIFORM_BATCH                FULL_AND_PIECEWISE  FULL_AND_PIECEWISE  FULL_DECODE_ONLY  FULL_DECODE_ONLY
FULL_AND_PIECEWISE  UNIFORM_SINGLE_TOKEN_DECODE  FULL_AND_PIECEWISE  PIECEWISE           FULL_DECODE_ONLY  NONE
FULL_AND_PIECEWISE  NEVER                        PIECEWISE           PIECEWISE           NONE              NONE
"""  # noqa: E501
COLUMNS = [(1, True), (5, True), (1, False), (5, False)]
RESOLUTIONS = [
    (mode, support, query_len, piecewise, served)
    for mode, support, *columns in map(str.split, SERVED.strip().splitlines())
    for (query_len, piecewise), served in zip(COLUMNS, columns, strict=True)
]


def test_the_table_is_complete():
    assert len({row[:4] for row in RESOLUTIONS}) == len(CUDAGraphMode) * len(AttentionCGSupport) * 4


@pytest.mark.parametrize(("mode", "support", "query_len", "piecewise", "served"), RESOLUTIONS)
def test_resolve(mode, support, query_len, piecewise, served, caplog):
    """The written outcome, and one warning that names both modes exactly where they differ."""
    with caplog.at_level(logging.WARNING):
        got = resolve_cudagraph_mode(
            CUDAGraphMode[mode], AttentionCGSupport[support], query_len, piecewise
        )
    assert got is CUDAGraphMode[served]
    if served == mode:
        assert not caplog.records
    else:
        (message,) = [record.getMessage() for record in caplog.records]
        assert message.startswith(f"cudagraph_mode {mode} was asked for, {served} is served: ")
        assert ("piecewise compilation" in message) or (f"not {support}" in message)


def test_resolve_refuses_an_impossible_query_length():
    with pytest.raises(ValueError, match="uniform_query_len"):
        resolve_cudagraph_mode(CUDAGraphMode.FULL, AttentionCGSupport.ALWAYS, 0, True)


@pytest.mark.parametrize(
    ("mode", "support", "served", "kept", "warnings"),
    [
        ("FULL_AND_PIECEWISE", "ALWAYS", "FULL_AND_PIECEWISE", (1, 3, 5), 0),
        ("FULL", "ALWAYS", "FULL", (1, 3, 5), 0),
        ("FULL", "UNIFORM_BATCH", "FULL_AND_PIECEWISE", (1, 3, 5), 1),
        ("FULL_AND_PIECEWISE", "UNIFORM_SINGLE_TOKEN_DECODE", "FULL_AND_PIECEWISE", (1,), 1),
        ("FULL_AND_PIECEWISE", "NEVER", "PIECEWISE", (), 1),
        ("PIECEWISE", "NEVER", "PIECEWISE", (), 0),
        ("NONE", "ALWAYS", "NONE", (), 0),
    ],
)
def test_resolve_for_several_k(mode, support, served, kept, warnings, caplog):
    """A backend with single-token support keeps FULL for k=0 only. One warning for all lengths."""
    with caplog.at_level(logging.WARNING):
        got = resolve_uniform_query_lens(
            CUDAGraphMode[mode], AttentionCGSupport[support], (5, 1, 3, 5), True
        )
    assert got == (CUDAGraphMode[served], kept)
    assert len(caplog.records) == warnings


def test_support_is_ordered_so_that_a_model_takes_the_least_of_its_layers():
    layers = [AttentionCGSupport.ALWAYS, AttentionCGSupport.UNIFORM_BATCH]
    assert min(layers) is AttentionCGSupport.UNIFORM_BATCH
    assert [int(support) for support in AttentionCGSupport] == [3, 2, 1, 0]


def test_descriptors_and_keys_are_tuples_with_defaults():
    descriptor = BatchDescriptor(20, 4)
    assert descriptor == (20, 4, False, False)
    assert GraphKey("step", descriptor) == ("step", descriptor, "greedy", 1)
    assert BatchDescriptor(20, 4, True).query_len == 5
    assert BatchDescriptor(20, 4, True, True).relaxed() == (20, 0, False, True)
