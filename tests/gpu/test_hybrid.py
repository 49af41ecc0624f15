"""Mamba-2 layers on a GPU: accuracy, bits that no cut or neighbour moves, and engines on graphs."""

from dataclasses import replace

import pytest
import torch
from harness import PROMPTS, assert_decodes_replayed, assert_no_leak, greedy
from oracle import Oracle, expect, speculate
from tiny import blended, make_tiny

import specdec
from specdec.kernels import mamba, mamba_triton

pytestmark = pytest.mark.gpu

TAPS, RUN_LENGTH = 4, 5
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# Heads, features of a head, of the state, groups: of Bamba 9B, and one that fills no tile.
SHAPES = [(128, 64, 128, 1), (24, 40, 48, 3)]


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype)


class Layer:
    """A layer between its projections, with states for ``num_rows`` requests and the padding."""

    def __init__(self, shape, dtype: torch.dtype, num_rows: int = 8) -> None:
        self.heads, self.size, self.state_size, self.groups = shape
        self.dtype = dtype
        self.inner = self.heads * self.size
        self.channels = self.inner + 2 * self.groups * self.state_size
        self.num_rows = num_rows + 1
        self.conv = randn(self.channels, TAPS, seed=1, dtype=dtype) / 2
        self.bias = randn(self.channels, seed=2, dtype=dtype) / 4
        self.a_log = randn(self.heads, seed=3, dtype=dtype) / 2 - 2
        self.skip = randn(self.heads, seed=4, dtype=dtype)
        self.dt_bias = randn(self.heads, seed=5, dtype=dtype) - 1
        self.norm = 1 + randn(self.inner, seed=6, dtype=dtype) / 8
        self.config = mamba.ScanConfig(self.groups, RUN_LENGTH, 0.0, float("inf"))
        self.clear()

    def clear(self) -> None:
        """What an earlier owner may leave; NaN shows where it is read."""
        kept, rows = RUN_LENGTH + TAPS - 1, self.num_rows

        def nan(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.full(shape, torch.nan, dtype=dtype, device="cuda")

        self.state = mamba.LayerState(
            nan(rows, self.heads, self.size, self.state_size, dtype=torch.float32),
            torch.full((rows, self.heads, self.size), 77, dtype=torch.int32, device="cuda"),
            nan(rows, kept, self.channels + self.heads, dtype=self.dtype),
            nan(rows, kept, self.channels, dtype=self.dtype),
        )

    def projected(self, length: int, seed: int) -> torch.Tensor:
        width = self.inner + self.channels + self.heads
        return randn(length, width, seed=100 + seed, dtype=self.dtype)

    def run(self, projected, contexts, lengths, valid=None, rows=None, module=mamba_triton):
        valid = lengths if valid is None else valid
        ends = [c + n if n else 0 for c, n in zip(contexts, valid, strict=True)]

        def ints(values, dtype=torch.int32):
            return torch.tensor(values, dtype=dtype, device="cuda")

        runs = mamba.Runs(
            num_tokens=sum(lengths),
            query_start_loc=ints([0, *torch.tensor(lengths).cumsum(0).tolist()]),
            context_lens=ints(contexts),
            seq_lens=ints(ends),
            state_rows=ints(range(len(lengths)) if rows is None else rows, torch.int64),
            max_query_len=max(lengths),
            tentative=False,
        )
        suffix = "_reference" if module is mamba else ""
        conv, scan, keep, norm = (
            getattr(module, name + suffix)
            for name in ("causal_conv", "selective_scan", "keep_run", "gated_rms_norm")
        )
        gate, inputs = projected[:, : self.inner], projected[:, self.inner :]
        activated = conv(inputs, self.conv, self.bias, self.state, runs)
        weights = (self.a_log, self.skip, self.dt_bias)
        y = scan(activated, inputs, *weights, self.state, runs, self.config)
        keep(inputs, activated, self.state, runs)
        return norm(y, gate, self.norm, 1e-5, self.groups)

    def widened(self) -> "Layer":
        """The same weights in float32, so that nothing is rounded on the way."""
        other = Layer((self.heads, self.size, self.state_size, self.groups), torch.float32)
        for name in ("conv", "bias", "a_log", "skip", "dt_bias", "norm"):
            setattr(other, name, getattr(self, name).float())
        return other


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def layer(request) -> Layer:
    return Layer(request.param, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_accuracy(shape, dtype) -> None:
    """Prompts, then a step behind each: no further from the float32 twin than twice the twin in
    the same dtype, whose own float32 is good to a hundred additions' rounding.
    """
    layer, twin = Layer(shape, dtype), Layer(shape, dtype)
    wide = layer.widened()
    lengths = [75, 1, 9, 64]
    for contexts, counts in ([0] * 4, lengths), (lengths, [5] * 4):
        projected = layer.projected(sum(counts), seed=counts[0])
        ours = layer.run(projected, contexts, counts)
        theirs = twin.run(projected, contexts, counts, module=mamba)
        exact = wide.run(projected.float(), contexts, counts, module=mamba)

        def error(result, exact=exact) -> float:
            return float((result.float() - exact).norm() / exact.norm())

        assert error(ours) <= 2 * error(theirs) + 1e-5


def test_bits_do_not_depend_on_chunks(layer) -> None:
    text = layer.projected(333, seed=1)
    whole = layer.run(text, [0], [333])
    for cuts in ([1] * 40 + [293], [5, 16, 312], [128, 128, 77], [332, 1]):
        layer.clear()
        start, out = 0, []
        for length in cuts:
            out.append(layer.run(text[start : start + length], [start], [length]))
            start += length
        assert torch.equal(torch.cat(out), whole), cuts


def test_bits_do_not_depend_on_what_was_rejected(layer) -> None:
    """Steps of five tokens, in eight rows at once, of which another number stays each time."""
    text, wrong = layer.projected(200, seed=1), layer.projected(200, seed=2)
    whole = layer.run(text, [0], [200])
    layer.clear()
    rows = [3, 1, 7, 0, 5, 2, 6, 4]
    places = [20 + i for i in range(8)]
    layer.run(torch.cat([text[:place] for place in places]), [0] * 8, places, rows=rows)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        accepted = torch.randint(0, 5, (8,), generator=generator).tolist()
        given = [
            torch.cat([text[at : at + kept + 1], wrong[at + kept + 1 : at + 5]])
            for at, kept in zip(places, accepted, strict=True)
        ]
        # The last row has drafted less than the others.
        valid = [5] * 7 + [accepted[7] + 1]
        out = layer.run(torch.cat(given), places, [5] * 8, valid, rows).view(8, 5, -1)
        for row, (at, kept) in enumerate(zip(places, accepted, strict=True)):
            assert torch.equal(out[row, : kept + 1], whole[at : at + kept + 1])
        places = [at + kept + 1 for at, kept in zip(places, accepted, strict=True)]


def test_padding_writes_nothing(layer) -> None:
    layer.clear()
    before = [each.clone() for each in (layer.state.ssm, layer.state.inputs)]
    out = layer.run(layer.projected(10, seed=1), [0, 7], [5, 5], [0, 0])
    assert not out.any()
    for now, then in zip((layer.state.ssm, layer.state.inputs), before, strict=True):
        assert torch.equal(now.nan_to_num(9.0), then.nan_to_num(9.0))


SHAPE = {"hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "ffn": 512, "vocab": 512}
MAMBA = {"mamba_d_head": 64, "mamba_d_state": 64, "mamba_n_groups": 1, "layers": 3}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("hybrid")
    target = make_tiny(root / "target", family="bamba", seed=5, std=0.1, **SHAPE | MAMBA)
    return {
        "target": str(target),
        "draft": str(blended(target, root / "draft", 0.05)),
        "llama": str(make_tiny(root / "llama", seed=6, std=0.1, **SHAPE)),
    }


def engine_of(model, draft, k, **options):
    defaults = {
        "device": "cuda",
        "dtype": "bfloat16",
        "uniform_request_counts": [1, 5],
        "max_num_seqs": 5,
        "max_model_len": 256,
        "num_kv_blocks": 128,
    }
    return specdec.Engine(model, draft, k, **(defaults | options))


@pytest.fixture(scope="module")
def solo(models):
    with engine_of(models["target"], None, 0) as engine:
        return [engine.generate(prompt, greedy(80)).token_ids for prompt in PROMPTS]


@pytest.mark.parametrize(
    "options",
    [
        {"steps_per_replay": 4},
        {"max_num_batched_tokens": 25},
        {"num_kv_blocks": 16, "kv_block_size": 16},
        {"max_num_seqs": 2, "uniform_request_counts": [1, 2]},
        {"exact": True, "verify_graphs": True},
    ],
    ids=["rounds", "chunks", "preemption", "waiting", "verified"],
)
def test_text_is_the_solo_text_bit_for_bit(models, solo, options) -> None:
    for draft in (models["draft"], "layer_skip:1"):
        with engine_of(models["target"], draft, 4, **options) as engine:
            outs = engine.generate(PROMPTS, greedy(80))
            assert [out.token_ids for out in outs] == solo
            assert_decodes_replayed(engine)
            assert_no_leak(engine)
            if "verify_graphs" in options:
                assert {row.max_error for row in engine.graph_table()} <= {0.0, None}


def test_a_hybrid_draft_of_another_target(models) -> None:
    with engine_of(models["llama"], None, 0) as engine:
        plain = [engine.generate(prompt, greedy(60)).token_ids for prompt in PROMPTS]
    with engine_of(models["llama"], models["target"], 3) as engine:
        assert [out.token_ids for out in engine.generate(PROMPTS, greedy(60))] == plain
        assert not engine._scheduler.prefix_caching


def test_float32_counts_are_the_oracles(tmp_path) -> None:
    target = make_tiny(tmp_path / "target", family="bamba", seed=5, layers=3, mamba_n_groups=1)
    draft = blended(target, tmp_path / "draft", 0.1)
    reference, proposer = Oracle(target), Oracle(draft)
    with engine_of(str(target), str(draft), 4, dtype="float32") as engine:
        outs = engine.generate(PROMPTS, greedy(24))
        assert_decodes_replayed(engine)
    for prompt, out in zip(PROMPTS, outs, strict=True):
        expect(out, speculate(reference, proposer, prompt, k=4, max_new_tokens=24))


def test_tentative_runs_leave_the_state(layer) -> None:
    text = layer.projected(12, seed=1)
    layer.clear()
    layer.run(text, [0], [12])
    before = layer.state.ssm.clone()
    runs = mamba.Runs(
        num_tokens=1,
        query_start_loc=torch.tensor([0, 1], dtype=torch.int32, device="cuda"),
        context_lens=torch.tensor([12], dtype=torch.int32, device="cuda"),
        seq_lens=torch.tensor([13], dtype=torch.int32, device="cuda"),
        state_rows=torch.zeros(1, dtype=torch.int64, device="cuda"),
        max_query_len=1,
        tentative=True,
    )
    inputs = layer.projected(1, seed=2)[:, layer.inner :]
    activated = mamba.causal_conv(inputs, layer.conv, layer.bias, layer.state, runs)
    arguments = (layer.a_log, layer.skip, layer.dt_bias, layer.state)
    first = mamba.selective_scan(activated, inputs, *arguments, runs, layer.config)
    assert torch.equal(layer.state.ssm.nan_to_num(9.0), before.nan_to_num(9.0))
    second = mamba.selective_scan(
        activated, inputs, *arguments, replace(runs, tentative=False), layer.config
    )
    assert torch.equal(first, second)
    assert not torch.equal(layer.state.ssm.nan_to_num(9.0), before.nan_to_num(9.0))
