"""P6 and C45: an adapter is applied whole, or refused by the name of the part that is not."""

from pathlib import Path

import pytest
import torch
from adapters import adapter_tensors, changed, write_adapter
from harness import PROMPTS, assert_no_leak, cpu_engine, greedy
from safetensors.torch import save_file
from tiny import HEAD, make_tiny, read_tensors

LORA = "base_model.model."
Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def good(models, tmp_path_factory):
    return write_adapter(tmp_path_factory.mktemp("good"), models["target"], seed=1)


@pytest.fixture(scope="module")
def engine(models, good):
    with cpu_engine(
        models["target"], None, 0, lora={"good": good}, max_lora_rank=8, cudagraph_mode="NONE"
    ) as engine:
        yield engine


def refuse(engine, path, match, error=ValueError):
    """The load fails by name, nothing is known under the name, and the engine keeps serving."""
    before = engine.generate(PROMPTS[0], greedy(4), lora="good").token_ids
    with pytest.raises(error, match=match):
        engine.add_lora("bad", str(path))
    assert engine.loras == ["good"]
    with pytest.raises(ValueError, match="bad"):
        engine.generate(PROMPTS[0], greedy(4), lora="bad")
    # The name of a good adapter stays with it too.
    with pytest.raises(error, match=match):
        engine.add_lora("good", str(path))
    assert engine.generate(PROMPTS[0], greedy(4), lora="good").token_ids == before
    engine.check_integrity()


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["embed_tokens", "lm_head"]}, "modules_to_save"),
        ({"bias": "lora_only"}, "bias"),
        ({"bias": "all"}, "bias"),
        ({"lora_bias": True}, "lora_bias"),
        ({"layers_to_transform": [0]}, "layers_to_transform"),
        ({"layers_to_transform": 0}, "layers_to_transform"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"target_parameters": ["mlp.experts.gate"]}, "target_parameters"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
        ({"a_setting_of_next_year": {"strength": 2}}, "a_setting_of_next_year"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"peft_type": None}, "peft_type"),
        ({"init_lora_weights": "pissa"}, "pissa"),
        ({"init_lora_weights": "olora"}, "olora"),
        ({"target_modules": ["rotary_emb"]}, "rotary_emb"),
        ({"target_modules": ["q_proj", "experts"]}, "experts"),
        ({"target_modules": None}, "target_modules"),
        ({"target_modules": r".*\.wobbly"}, "wobbly"),
        ({"target_modules": ["q_proj"]}, "k_proj|target_modules"),
        ({"r": 4}, r"q_proj.*\[8, 64\].*\[4, 64\]"),
        ({"r": 0}, r"\br=0"),
        ({"r": "8"}, r"\br='8'"),
        ({"lora_alpha": None}, "lora_alpha"),
        pytest.param({"lora_alpha": 10**400}, "lora_alpha", id="lora_alpha-huge"),
        ({"rank_pattern": {"q_proj": 4}}, "q_proj"),
        ({"alpha_pattern": {"q_proj": "much"}}, "alpha_pattern"),
        ({"target_modules": "(.*"}, "adapter_config.json: target_modules: .*expression"),
        ({"target_modules": ["q_proj", 5]}, "target_modules must be"),
        ({"target_modules": {"q_proj": 1}}, "target_modules must be"),
        ({"exclude_modules": 5}, "exclude_modules must be"),
        ({"exclude_modules": "*"}, "exclude_modules: .*expression"),
        ({"rank_pattern": {"[": 4}}, "rank_pattern: .*expression"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern must be an object"),
        ({"alpha_pattern": 3}, "alpha_pattern must be an object"),
        ({"alpha_pattern": {"a{2,1}": 3}}, "alpha_pattern: .*expression"),
        ({"use_rslora": "no"}, "use_rslora must be"),
        ({"r": 9}, "rank 9 .*max_lora_rank 8"),
        ({"rank_pattern": {"v_proj": 64}}, "rank 64 .*max_lora_rank 8"),
    ],
    ids=str,
)
def test_settings(engine, good, tmp_path, settings, part):
    refuse(engine, changed(good, tmp_path / "bad", **settings), part)


def rewritten(good, out, change):
    folder = changed(good, out)
    tensors = adapter_tensors(good)
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda t: t.pop(f"{LORA}{Q}.lora_B.weight"), f"lora_B of {Q}"),
        (lambda t: t.update({f"{LORA}{Q}.lora_magnitude_vector": torch.ones(64)}), "DoRA"),
        (lambda t: t.update({f"{LORA}{Q}.lora_B.bias": torch.ones(64)}), "lora_B.bias"),
        (lambda t: t.update({f"{LORA}model.norm.weight": torch.ones(64)}), "norm.weight"),
        (lambda t: t.update({f"{LORA}lm_head.weight": torch.ones(128, 64)}), "lm_head"),
        (lambda t: t.update({f"{LORA}{Q}.lora_A.weight": torch.ones(8, 65)}), r"\[8, 65\]"),
        (
            lambda t: t.update(
                {
                    f"{LORA}model.layers.2.mlp.up_proj.lora_{p}.weight": torch.ones(8, 8)
                    for p in "AB"
                }
            ),
            "layers.2.mlp.up_proj",
        ),
        (lambda t: t[f"{LORA}{Q}.lora_A.weight"].fill_(torch.nan), "finite"),
        (lambda t: t.update({f"{LORA}{Q}.lora_A.weight": torch.ones(8, 64).int()}), "floating"),
    ],
    ids=["no-B", "dora", "bias", "norm", "own-head", "shape", "third-layer", "nan", "integers"],
)
def test_tensors(engine, good, tmp_path, change, part):
    """The layers of the model are 0 and 1."""
    refuse(engine, rewritten(good, tmp_path / "bad", change), part)


def test_values_beyond_the_models_dtype(models, good, tmp_path):
    """float16 ends at 65504: by A alone, and by B times its scale, which is finite in the file."""
    with cpu_engine(
        models["target"], None, 0, dtype="float16", lora={"good": good}, cudagraph_mode="NONE"
    ) as engine:
        for part, value, named in (
            ("A", 1e6, "lora_A holds"),
            ("B", 6e4, "lora_B times its scale"),
        ):
            key = f"{LORA}{Q}.lora_{part}.weight"
            path = rewritten(good, tmp_path / part, lambda t, key=key, v=value: t[key].fill_(v))
            refuse(engine, path, f"{Q}: {named}.*not finite.*float16")


def test_files(engine, good, tmp_path):
    refuse(engine, tmp_path / "nowhere", "nowhere", FileNotFoundError)
    (tmp_path / "empty").mkdir()
    refuse(engine, tmp_path / "empty", "adapter_config.json", FileNotFoundError)

    truncated = changed(good, tmp_path / "truncated")
    file = truncated / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    refuse(engine, truncated, r"adapter_model\.safetensors.*(damaged|cut)")

    file.write_bytes(b"\x00" * 8)
    refuse(engine, truncated, r"adapter_model\.safetensors.*(damaged|cut)")

    file.unlink()
    refuse(engine, truncated, r"adapter_model\.safetensors", FileNotFoundError)
    # It is not even a pickle: it must not be opened to find out.
    (truncated / "adapter_model.bin").write_bytes(b"not to be read")
    refuse(engine, truncated, r"pickled.*adapter_model\.bin")

    for text in ("{", "[" * 100_000, '{"r": ' + "9" * 5000 + "}"):
        (truncated / "adapter_config.json").write_text(text)
        refuse(engine, truncated, r"adapter_config\.json")


def test_embedding_and_head_need_room_and_an_untied_model(engine, models, tmp_path):
    base = models["target"]
    for target in ("embed_tokens", "lm_head"):
        path = write_adapter(tmp_path / target, base, target_modules=[target])
        refuse(engine, path, rf"{target}.*lora_vocabulary")
    tied = make_tiny(tmp_path / "tied", tie=True)
    path = write_adapter(tmp_path / "tied-head", tied, target_modules=["embed_tokens"])
    with pytest.raises(ValueError, match="tied"):
        cpu_engine(str(tied), None, 0, lora={"a": path})


def test_at_start_an_adapter_is_refused_before_weights_are_opened(models, good, tmp_path):
    folder = tmp_path / "no-weights"
    folder.mkdir()
    config = (Path(models["target"]) / "config.json").read_text()
    (folder / "config.json").write_text(config)
    bad = changed(good, tmp_path / "bad", use_dora=True)
    with pytest.raises(ValueError, match="DoRA"):
        cpu_engine(str(folder), None, 0, lora={"good": good, "bad": str(bad)})
    with pytest.raises(FileNotFoundError, match="nowhere"):
        cpu_engine(str(folder), None, 0, lora={"a": "nowhere"})
    with pytest.raises(ValueError, match=r"rank 8 .*max_lora_rank 4"):
        cpu_engine(str(folder), None, 0, lora={"good": good}, max_lora_rank=4)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"lora": ["a"]}, "lora"),
        ({"lora": {"base": "x"}}, "base"),
        ({"lora": {"": "x"}}, "lora"),
        ({"lora": {3: "x"}}, "lora"),
        ({"lora": {"a": 3}}, "lora"),
        ({"max_loras": 0}, "max_loras"),
        ({"max_lora_rank": 0}, "max_lora_rank"),
        ({"max_lora_rank": 2.5}, "max_lora_rank"),
        ({"lora_vocabulary": 1}, "lora_vocabulary"),
        ({"draft_lora": {"a": "x"}}, "draft_lora"),
        ({"draft_lora": {}}, "draft_lora"),
    ],
    ids=str,
)
def test_engine_fields(models, fields, name):
    with pytest.raises((ValueError, TypeError), match=name):
        cpu_engine(models["target"], None, 0, **fields)


@pytest.mark.parametrize("lora", ["typo", "", "base", "Good", 3, ["good"], ["good"] * 3, [3, 4]])
def test_names_of_requests(engine, lora):
    """Two prompts: a list must name two adapters. Nothing runs, base output never comes back."""
    before = engine.stats().steps_by_mode
    with pytest.raises((ValueError, TypeError), match="lora"):
        engine.generate(PROMPTS[:2], greedy(4), lora=lora)
    with pytest.raises((ValueError, TypeError), match="lora"):
        engine.generate(PROMPTS[:2], greedy(4), lora=["good", "typo"])
    assert engine.stats().steps_by_mode == before
    assert_no_leak(engine)
    engine.check_integrity()


def test_names_of_adapters(engine, good):
    for name in ("base", "", None, 3):
        with pytest.raises((ValueError, TypeError), match="name"):
            engine.add_lora(name, good)
    with pytest.raises(ValueError, match="typo"):
        engine.remove_lora("typo")
    with pytest.raises(ValueError, match="draft_lora"):
        engine.add_lora("other", good, good)
    assert engine.loras == ["good"]


def test_a_repeated_base_weight_must_be_the_models_own(models, good, tmp_path):
    """PEFT stores the embedding beside an adapter of it; another one would be half applied."""
    base = models["target"]
    path = write_adapter(tmp_path / "own", base, target_modules=["lm_head"])
    head = LORA + "lm_head.base_layer.weight"
    own = read_tensors(base)[HEAD]

    def with_head(tensor, name):
        return rewritten(path, tmp_path / name, lambda tensors: tensors.update({head: tensor}))

    with cpu_engine(base, None, 0, lora_vocabulary=True, cudagraph_mode="NONE") as engine:
        engine.add_lora("own", with_head(own, "same"))
        with pytest.raises(ValueError, match="lm_head"):
            engine.add_lora("other", with_head(own + 1e-3, "other"))
        with pytest.raises(ValueError, match="lm_head"):
            engine.add_lora("resized", with_head(own[:-1].clone(), "resized"))
        assert engine.loras == ["own"]
