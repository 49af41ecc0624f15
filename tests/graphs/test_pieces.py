"""A model in pieces: how it is split, and that pieces, their graphs and eager give the same."""

import pytest
import torch
from flat import (
    FULL,
    LIVE,
    MAX_SEQS,
    MAX_TOKENS,
    NONE,
    PIECEWISE,
    WIDTH,
    capture,
    flat,
    mixed_batch,
    run,
    same,
)
from paged import BLOCK_SIZE, load
from tiny import make_tiny

from specdec.verifier.compile import CompilationConfig, compile_pieces
from specdec.verifier.context import set_forward_context
from specdec.verifier.split import OpCall, PieceCall, split, trace_model

ATTENTION = "specdec::attention"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("pieces"), layers=4)


@pytest.fixture(scope="module")
def model(folder):
    return load(folder)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("layers", [3, 6])
def test_a_homogeneous_stack_has_three_pieces(tmp_path, family, layers):
    """First, middle and last, however many layers: neither a layer's number nor a weight is in."""
    model = load(make_tiny(tmp_path, layers=layers, family=family))
    chain = split(trace_model(model), model, {ATTENTION})
    pieces = [call.piece for call in chain.calls if isinstance(call, PieceCall)]
    assert len(chain.pieces) == 3
    assert pieces == [0] + [1] * (layers - 1) + [2]
    assert [type(call) for call in chain.calls[:2]] == [PieceCall, OpCall]
    for piece in chain.pieces:
        assert "attention" not in piece.text
        assert not [node for node in piece.module.graph.nodes if node.op == "get_attr"]


def test_layers_of_different_widths_share_no_piece(tmp_path):
    """The text of a piece names the shapes of its weights."""
    model = load(make_tiny(tmp_path, layers=3))
    wide = model.layers[1].mlp
    wide.gate_up_proj.weight = torch.nn.Parameter(torch.zeros(512, 64), requires_grad=False)
    wide.down_proj.weight = torch.nn.Parameter(torch.zeros(64, 256), requires_grad=False)
    assert len(split(trace_model(model), model, {ATTENTION}).pieces) == 4


def test_no_number_of_tokens_is_frozen(model):
    for piece in split(trace_model(model), model, {ATTENTION}).pieces:
        assert "size" not in piece.text and "shape" not in piece.text.partition("weights")[0]


@pytest.mark.parametrize("mode", [PIECEWISE, FULL])
@pytest.mark.parametrize("size", [LIVE, LIVE + 1, MAX_TOKENS])
def test_graph_equals_eager(model, mode, size):
    """Padded or not, twice in a row, on other values than those of the capture."""
    runner = flat(model)
    capture(runner, mode, MAX_TOKENS, size)
    for seed in (0, 1):
        expected = run(runner, NONE, seed=seed)
        assert same(run(runner, mode, size, seed), expected)
    (row,) = [row for row in runner.table() if row.descriptor.num_tokens == size]
    assert row.mode == mode.name and row.role == "target" and row.replays == 2
    assert row.num_bytes > 0 and not row.descriptor.uniform


def test_only_the_matching_mode_fires(model):
    """Both kinds for one shape: a FULL replay counts no piece, a PIECEWISE one no whole."""
    runner = flat(model)
    capture(runner, PIECEWISE, MAX_TOKENS)
    capture(runner, FULL, MAX_TOKENS)
    replays = []
    for mode in (NONE, PIECEWISE, FULL, PIECEWISE):
        run(runner, mode, MAX_TOKENS)
        replays.append({row.mode: row.replays for row in runner.table()})
    assert replays == [
        {"PIECEWISE": 0, "FULL": 0},
        {"PIECEWISE": 1, "FULL": 0},
        {"PIECEWISE": 1, "FULL": 1},
        {"PIECEWISE": 2, "FULL": 1},
    ]


def test_padding_writes_to_no_block(model):
    """Slots of no live token keep what they held, the last of the pool too."""
    runner = flat(model)
    capture(runner, PIECEWISE, MAX_TOKENS)
    capture(runner, FULL, MAX_TOKENS)
    before = runner.kv_cache.data.clone().normal_(generator=torch.Generator().manual_seed(3))
    *_, metadata = mixed_batch()
    written = torch.zeros(MAX_SEQS * WIDTH * BLOCK_SIZE, dtype=torch.bool)
    written[metadata.slot_mapping] = True
    for mode in (PIECEWISE, FULL):
        _, cache = run(runner, mode, MAX_TOKENS)
        changed = (cache != before[:, :, :-1]).any(-1).any(-1).flatten(2)  # [2, layers, slots]
        assert (changed == written).all()


def test_a_shape_without_a_graph_is_an_error(model):
    runner = flat(model)
    capture(runner, PIECEWISE, MAX_TOKENS)
    with pytest.raises(RuntimeError, match="no PIECEWISE graph"):
        run(runner, PIECEWISE, LIVE)


def test_verified_graphs_keep_their_error(model):
    runner = flat(model, verify=True)
    capture(runner, PIECEWISE, MAX_TOKENS)
    capture(runner, FULL, MAX_TOKENS)
    assert [row.max_error for row in runner.table()] == [None, None]
    for mode in (PIECEWISE, FULL):
        assert same(run(runner, mode, MAX_TOKENS), run(runner, NONE))
    assert [row.max_error for row in runner.table()] == [0.0, 0.0]


def test_a_kernel_may_be_a_splitting_operator(model):
    """More pieces, the same result."""
    runner = flat(model, mode=3, splitting_ops=[ATTENTION, "specdec.linear_silu_mul"])
    capture(runner, PIECEWISE, MAX_TOKENS)
    assert same(run(runner, PIECEWISE, MAX_TOKENS), run(flat(model), NONE))
    assert runner.num_pieces == 4


@pytest.mark.parametrize("backend", ["eager"])
def test_compiled_pieces_serve_every_mode(model, backend):
    runner = flat(model, mode=3, backend=backend)
    capture(runner, PIECEWISE, MAX_TOKENS)
    capture(runner, FULL, MAX_TOKENS)
    expected = run(flat(model), NONE)
    for mode in (NONE, PIECEWISE, FULL):
        assert same(run(runner, mode, MAX_TOKENS), expected)


def test_the_opaque_operator_needs_a_context(model):
    ids, positions, _ = mixed_batch()
    out = torch.zeros(LIVE, model.config.num_heads, model.config.head_size)
    with pytest.raises(RuntimeError, match="attn_metadata"), set_forward_context():
        model.opaque_forward(ids, positions, out)


def test_config_in_vllms_form():
    config = CompilationConfig.parse({"mode": 3, "compile_sizes": [1, 8]})
    assert config.level == 3 and config.no_piecewise is None
    assert CompilationConfig().level == 0 and CompilationConfig(compile_sizes=[4]).level == 3
    for mode in (1, 2):
        assert "no graphs of pieces" in CompilationConfig(mode=mode).no_piecewise
    assert "splitting_ops" in CompilationConfig(mode=3, splitting_ops=[]).no_piecewise


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mode": 4}, "mode"),
        ({"mode": True}, "mode"),
        ({"backend": "tvm"}, "backend"),
        ({"splitting_ops": ["vllm::unified_attention"]}, "splitting_ops vllm::unified_attention"),
        ({"compile_sizes": [0]}, "compile_sizes"),
        ({"use_inductor_graph_partition": "yes"}, "use_inductor_graph_partition"),
        ({"mode": 0, "backend": "inductor"}, "mode 0"),
        ({"mode": 0, "compile_sizes": [4]}, "mode 0"),
    ],
)
def test_bad_values_are_refused_by_name(values, message):
    with pytest.raises(ValueError, match=message):
        CompilationConfig.parse(values)


def test_a_setting_without_effect_is_said(model, caplog):
    compile_pieces(model, CompilationConfig(backend="eager", compile_sizes=[4]))
    assert "compile_sizes are not used" in caplog.text


def test_eager_pieces_are_the_traced_graphs(model):
    chain, functions = compile_pieces(model, CompilationConfig(mode=3, backend="eager"))
    assert functions == [piece.module for piece in chain.pieces]
