"""A model in parts: each part is a slice of the whole, and together they compute what it does."""

from dataclasses import replace

import pytest
import torch
from threaded_ranks import on_ranks
from tiny import make_tiny, read_tensors

from specdec.kernels.argmax import argmax_reference, best_of_parts_reference, best_part_reference
from specdec.verifier.attention.select import select_backend
from specdec.verifier.loading import load_model, read_config
from specdec.verifier.lora import LoraSlots
from specdec.verifier.made import MadeModel
from specdec.verifier.parallel.sharding import (
    WHOLE,
    TensorParallel,
    check_shardable,
    cut_of,
    local_config,
    vocab_part,
)
from specdec.verifier.peft_format import EMBEDDING, HEAD, AdapterWeights


def backend_for(config):
    return select_backend(
        "sdpa", head_size=config.head_size, dtype=torch.float32, block_size=4, device="cpu"
    )


def part(path, tp=WHOLE):
    return load_model(path, attention_backend=backend_for(read_config(path)), tp=tp)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Biases everywhere, two key/value heads, and a vocabulary that no number of ranks divides."""
    root = tmp_path_factory.mktemp("sharding")
    options = {"attention_bias": True, "mlp_bias": True, "vocab": 123, "seed": 3}
    return make_tiny(root / "model", **options)


@pytest.mark.parametrize("size", [2, 4])
def test_parts_are_slices_and_put_together_the_whole(folder, size):
    """With 4 ranks each of the two key/value heads is held by two of them."""
    whole = read_tensors(folder)
    parts = [part(folder, TensorParallel(rank, size, "-")) for rank in range(size)]
    slots = [model.weight_slots() for model in parts]
    for name, tensor in whole.items():
        cuts = [cut_of(name, parts[0].config, model.tp) for model in parts]
        for rank, cut in enumerate(cuts):
            expected = tensor if cut is None else cut.of(tensor)
            assert torch.equal(slots[rank][name], expected), name
        if cuts[0] is not None:
            rows = [each[name] for each in slots]
            if size == 4 and (".k_proj" in name or ".v_proj" in name):
                assert torch.equal(rows[0], rows[1]) and torch.equal(rows[2], rows[3])
                rows = rows[::2]
            assert torch.equal(torch.cat(rows, cuts[0].dim), tensor), name
    assert parts[0].local_config.num_kv_heads == max(1, 2 // size)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("vocab", [123, 128])
def test_logits_and_greedy_tokens_are_those_of_the_whole(tmp_path, size, vocab):
    model = make_tiny(tmp_path / "m", vocab=vocab, tie=True)
    hidden = torch.randn(9, 64, generator=torch.Generator().manual_seed(0))
    whole = part(model)
    logits, tokens = whole.compute_logits(hidden), whole.greedy_tokens(hidden, 100)
    embedded = whole.embed(torch.tensor([0, 1, 57, vocab - 1]))

    def run(tp, _):
        own = part(model, tp)
        return (
            own.compute_logits(hidden),
            own.greedy_tokens(hidden, 100),
            own.embed(torch.tensor([0, 1, 57, vocab - 1])),
            own.whole_vocabulary(own.embed_tokens),
        )

    for own_logits, own_tokens, own_embedded, embedding in on_ranks(size, run):
        torch.testing.assert_close(own_logits, logits, rtol=1e-5, atol=1e-4)
        assert torch.equal(own_tokens[0], tokens[0]) and own_tokens[1].all()
        assert torch.equal(own_embedded, embedded)
        assert torch.equal(embedding, whole.embed_tokens)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_best_of_parts_is_the_argmax_with_ties_to_the_lowest_id(size):
    """Values from a handful, so that most rows tie across the borders of the parts."""
    vocab, limit = 40, 37
    generator = torch.Generator().manual_seed(1)
    choices = torch.tensor([-1.5, -0.0, 0.0, 2.0, 2.0])
    logits = choices[torch.randint(0, 5, (64, vocab), generator=generator)]
    logits[1, 30], logits[2, 5], logits[3], logits[4, 36] = torch.nan, torch.inf, -torch.inf, 9.0
    logits[5], logits[6, 39] = -2.0, 100.0  # past the limit
    ids, finite = argmax_reference(logits, limit)
    parts = []
    for rank in range(size):
        own = vocab_part(vocab, TensorParallel(rank, size))
        count = max(0, min(limit, own.stop) - own.start)
        parts.append(best_part_reference(logits[:, own.start : own.stop], count, own.start))
    assert size < 4 or count == 0  # a rank without a row to choose from
    got = best_of_parts_reference(torch.stack(parts))
    assert torch.equal(got[0], ids) and torch.equal(got[1], finite)


def test_made_parts_are_slices_and_shallow_models_the_first_layers(folder):
    config = read_config(folder)
    options = {"dtype": torch.float32, "device": "cpu", "attention_backend": backend_for(config)}
    made = MadeModel(config=config, seed=5, std=0.25)
    whole = made.make(**options).weight_slots()
    for rank in range(2):
        tp = TensorParallel(rank, 2, "-")
        for name, slot in made.make(**options, tp=tp).weight_slots().items():
            cut = cut_of(name, config, tp)
            assert torch.equal(slot, whole[name] if cut is None else cut.of(whole[name])), name
    silent = MadeModel(config=config, seed=5, std=0.25, silent_from=1).make(**options)
    assert not silent.first_layers()[1].mlp.down_proj.weight.any()
    assert torch.equal(silent.weight_slots()["lm_head.weight"], whole["lm_head.weight"])


@pytest.mark.parametrize("size", [2, 4])
def test_adapter_factors_are_cut_as_their_weights(folder, size):
    """Every rank's delta, put together or added up, is that of the whole adapter."""
    config, generator = read_config(folder), torch.Generator().manual_seed(2)
    shapes = {
        "model.layers.0.self_attn.q_proj": (64, 64),
        "model.layers.0.self_attn.v_proj": (32, 64),
        "model.layers.0.self_attn.o_proj": (64, 64),
        "model.layers.0.mlp.down_proj": (64, 128),
        HEAD: (123, 64),
    }
    sites = {
        name: (
            torch.randn(4, columns, generator=generator),
            torch.randn(rows, 4, generator=generator),
        )
        for name, (rows, columns) in shapes.items()
    }
    sites[EMBEDDING] = (
        torch.randn(4, 123, generator=generator),
        torch.randn(64, 4, generator=generator),
    )
    weights = AdapterWeights(path="-", rank=4, sites=sites, base_weights={})
    for rank in range(size):
        model = part(folder, TensorParallel(rank, size, "-"))
        slots = LoraSlots(model, max_loras=1, max_rank=8, vocabulary=True)
        slots.attach()
        slots.load(0, slots.pack(weights))
        for name, (a, b) in sites.items():
            cut = cut_of(f"{name}.weight", config, model.tp)
            assert cut is not None
            delta = (a.t() @ b.t()) if name == EMBEDDING else b @ a
            torch.testing.assert_close(own_delta(model, name), cut.of(delta), msg=name)


def own_delta(model, name):
    """B A of one projection, as the model's stacks hold it."""
    if name == EMBEDDING:
        stack, own = model.embed_adapters, len(model.vocab_part)
        return (stack.a[0] @ stack.b[0].t())[:own]
    if name == HEAD:
        stack, own = model.head_adapters, len(model.vocab_part)
        return (stack.b[0] @ stack.a[0])[:own]
    at, _, last = name.rpartition(".")
    linear = next(each for prefix, each in model.linears() if prefix == at and last in each.parts)
    number = list(linear.parts).index(last)
    first = sum(list(linear.parts.values())[:number])
    a = linear.adapters.a[0].unflatten(0, (len(linear.parts), -1))[number]
    return linear.adapters.b[0, first : first + linear.parts[last]] @ a


@pytest.mark.parametrize(
    ("options", "size", "reason"),
    [
        ({"heads": 6, "kv_heads": 2, "hidden": 96}, 4, "num_attention_heads"),
        ({"heads": 12, "kv_heads": 3, "hidden": 192}, 2, "num_key_value_heads"),
        ({"ffn": 130}, 4, "intermediate_size"),
        ({"family": "qwen3_moe"}, 2, "experts"),
        ({"family": "bamba"}, 2, "recurrent"),
    ],
    ids=["heads", "key/value heads", "features", "experts", "recurrent layers"],
)
def test_what_cannot_be_cut_is_named(tmp_path, options, size, reason):
    config = read_config(make_tiny(tmp_path / "m", **options))
    with pytest.raises(ValueError, match=f"^tensor_parallel_size={size}: .*{reason}"):
        check_shardable("tensor_parallel_size", config, size)
    check_shardable("tensor_parallel_size", config, 1)
    assert local_config(config, WHOLE) is config


def test_other_implementations_are_not_cut(folder):
    config = replace(read_config(folder), implementation="transformers")
    with pytest.raises(ValueError, match=r"^tensor_parallel_size=2: .*transformers"):
        check_shardable("tensor_parallel_size", config, 2)
