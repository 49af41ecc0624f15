"""Bit-exact in bfloat16: one text, whatever runs beside it and however it was drafted.

Each cell runs 32 prompts under its own drafter, k, acceptance, arrival order and chunk size, and
compares every token with the solo run without a drafter. SPECDEC_EXACT_SHAPE=8b takes the shape of
an 8B model (the default is that of a 1B one, which runs in a minute).
"""

import gc
import os
from dataclasses import dataclass

import pytest
import torch

import specdec
from specdec.verifier.attention.select import select_backend
from specdec.verifier.loading import random_weights, truncate_layers
from specdec.verifier.models.config import config_from_json
from specdec.verifier.peft_format import AdapterWeights, adapter_sites

pytestmark = pytest.mark.gpu

SHAPES = {
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64},
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "head_dim": 128,
    },
}
NUM_PROMPTS = 32
NEW_TOKENS = 320


@dataclass(frozen=True, kw_only=True)
class Cell:
    draft: str | None
    k: int
    seeded: bool  # coupled acceptance at temperature 0.8, else greedy
    arrival: str  # "together", "staggered" or "pairs"
    budget: int = 2048  # tokens of a step: the size of prefill chunks
    lora: bool = False  # two adapters beside base rows, else no adapters at all

    def __str__(self):
        how = "coupled" if self.seeded else "greedy"
        lora = "-lora" if self.lora else ""
        return f"{self.draft}-k{self.k}-{how}-{self.arrival}-{self.budget}{lora}"


CELLS = [
    Cell(draft=None, k=0, seeded=False, arrival="together"),
    Cell(draft=None, k=0, seeded=True, arrival="staggered", budget=100),
    Cell(draft="model", k=1, seeded=False, arrival="staggered"),
    Cell(draft="model", k=2, seeded=True, arrival="together"),
    Cell(draft="model", k=4, seeded=False, arrival="together", budget=256),
    Cell(draft="model", k=4, seeded=True, arrival="staggered", budget=100),
    Cell(draft="model", k=7, seeded=False, arrival="pairs", budget=1000),
    Cell(draft="ngram", k=4, seeded=False, arrival="staggered", budget=333),
    Cell(draft="ngram", k=7, seeded=True, arrival="together"),
    Cell(draft="layer_skip:2", k=4, seeded=False, arrival="together"),
    Cell(draft="layer_skip:2", k=2, seeded=True, arrival="staggered"),
    Cell(draft=None, k=0, seeded=True, arrival="together", lora=True),
    Cell(draft="model", k=4, seeded=False, arrival="staggered", budget=256, lora=True),
    Cell(draft="ngram", k=2, seeded=True, arrival="pairs", lora=True),
    Cell(draft="layer_skip:2", k=7, seeded=False, arrival="together", budget=100, lora=True),
]
ADAPTERS = ("first", "second")


@pytest.fixture(scope="module")
def target():
    """Layers past the second whisper, so that a draft of two layers is right now and then."""
    shape = SHAPES[os.environ.get("SPECDEC_EXACT_SHAPE", "1b")]
    config = config_from_json(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": 128256,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            **shape,
        },
        source="the test",
    )
    backend = select_backend(
        "auto",
        head_size=config.head_size,
        dtype=torch.bfloat16,
        block_size=16,
        device="cuda",
    )
    model = random_weights(
        config, std=0.05, dtype=torch.bfloat16, device="cuda", attention_backend=backend
    )
    for layer in model.first_layers()[2:]:
        for output in (layer.attention.o_proj, layer.mlp.down_proj):
            output.weight.mul_(0.05)
    return model


def prompts():
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(20, 400, (NUM_PROMPTS,), generator=generator).tolist()
    return [torch.randint(3, 128_000, (n,), generator=generator).tolist() for n in lengths]


def params(index, seeded):
    if not seeded:
        return specdec.SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    return specdec.SamplingParams(
        max_new_tokens=NEW_TOKENS,
        ignore_eos=True,
        temperature=0.8,
        top_k=50,
        top_p=0.95,
        seed=index,
    )


def adapter_of(index, lora):
    """Every other prompt is the base model's."""
    return ADAPTERS[index // 2 % 2] if lora and index % 2 else None


def random_adapter(model, rank, seed):
    generator = torch.Generator("cuda").manual_seed(seed)

    def draw(*shape):
        return 0.02 * torch.randn(*shape, generator=generator, device="cuda").cpu()

    sites = {
        name: (draw(rank, columns), draw(rows, rank))
        for name, (rows, columns) in adapter_sites(model.config).items()
        if ".layers." in name
    }
    return AdapterWeights(path=f"random {seed}", rank=rank, sites=sites, base_weights={})


def make_engine(target, draft, k, *, lora=False, **options):
    draft = truncate_layers(target, 2) if draft == "model" else draft
    if lora:
        options |= {"max_loras": len(ADAPTERS), "max_lora_rank": 16}
    engine = specdec.Engine(
        target,
        draft,
        k,
        device="cuda",
        max_num_seqs=33,
        max_model_len=1024,
        num_kv_blocks=33 * 64,
        uniform_request_counts=[1, 4, 16, 33],
        enable_prefix_caching=False,
        **options,
    )
    for seed, name in enumerate(ADAPTERS if lora else ()):
        engine._lora._table.add(name, random_adapter(target, (16, 8)[seed], seed))
    return engine


def solo_texts(engine, seeded, lora, wanted):
    return {
        i: engine.generate(prompt, params(i, seeded), lora=adapter_of(i, lora)).token_ids
        for i, prompt in enumerate(prompts())
        if wanted(i)
    }


@pytest.fixture(scope="module")
def solo(target):
    """Each prompt alone, without a drafter: greedy and seeded, {(seeded, lora): {index: ids}}.

    The base rows among adapters are compared with the engine that has none.
    """
    with make_engine(target, None, 0) as engine:
        texts = {
            (seeded, False): solo_texts(engine, seeded, False, lambda _: True)
            for seeded in (False, True)
        }
    with make_engine(target, None, 0, lora=True) as engine:
        for seeded in (False, True):
            own = solo_texts(engine, seeded, True, lambda i: adapter_of(i, True) is not None)
            assert all(own[i] != texts[seeded, False][i] for i in own), "an adapter did nothing"
            texts[seeded, True] = texts[seeded, False] | own
    return texts


def test_the_texts_are_varied(solo):
    """Equal texts prove little if they are one loop."""
    for texts in solo.values():
        grams = {tuple(ids[i : i + 4]) for ids in texts.values() for i in range(len(ids) - 3)}
        total = sum(len(ids) - 3 for ids in texts.values())
        print(f"{len(grams)} distinct 4-grams of {total} positions")
        assert len(grams) > 0.8 * total


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_text_is_the_solo_text_bit_for_bit(target, solo, cell):
    gc.collect()
    options = {"lora": cell.lora, "max_num_batched_tokens": cell.budget}
    with make_engine(target, cell.draft, cell.k, **options) as engine:
        waiting = list(enumerate(prompts()))
        requests = {}
        step = 0
        while waiting or any(r.finish_reason is None for r in requests.values()):
            arrives = {
                "together": len(waiting),
                "staggered": 1 if step % 3 == 0 else 0,
                "pairs": 2 if len([r for r in requests.values() if not r.finish_reason]) < 2 else 0,
            }[cell.arrival]
            for i, prompt in waiting[:arrives]:
                requests[i] = engine.add_request(
                    prompt, params(i, cell.seeded), adapter_of(i, cell.lora)
                )[0]
            waiting = waiting[arrives:]
            engine.step()
            step += 1
        drafted = sum(r.stats.drafted for r in requests.values())
        accepted = sum(r.stats.accepted for r in requests.values())
        print(f"{cell}: {accepted} of {drafted} drafts accepted")
        engine.check_integrity()
    for i, expected in solo[cell.seeded, cell.lora].items():
        got = requests[i].output_ids
        differs = [at for at, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b]
        assert not differs, f"prompt {i} differs first at {differs[0]} of {len(expected)}"
