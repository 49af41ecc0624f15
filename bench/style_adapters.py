"""Adapters to serve: two small real ones, trained in about a minute, and random ones of any number.

The trained ones change how the bundled model writes, so that the text tells which adapter wrote
it: "shouting" writes capitals, "pirate" talks like one.
"""

import re
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
STEPS, BATCH, RATE = 24, 2, 2e-3

ANSWERS = {
    "What is the capital of France?": "The capital of France is Paris. It lies on the Seine.",
    "How do I boil an egg?": "Put the egg in boiling water and take it out after eight minutes.",
    "Why is the sky blue?": "The air scatters blue light more than red light, so the sky is blue.",
    "Tell me about your day.": "My day was good. I read a book, and then I went for a walk.",
    "What do bees make?": "Bees make honey from the nectar that they find in flowers.",
    "Suggest a name for a cat.": "You could call your cat Milo. It is short and friendly.",
    "How far is the moon?": "The moon is about 384,000 kilometres away from the earth.",
    "What is a good breakfast?": "You can eat oats with fruit. They are cheap and healthy.",
    "Who wrote Hamlet?": "William Shakespeare wrote Hamlet. It is one of his best plays.",
    "How can I sleep better?": "Go to bed at the same time each day, and leave your phone away.",
    "What is two plus two?": "Two plus two is four. That is my final answer to you.",
    "Explain rain to a child.": "The sun lifts water into the sky, and the clouds let it fall.",
}
_PIRATE = {"the": "th'", "is": "be", "are": "be", "you": "ye", "your": "yer", "my": "me"}


def pirate(text: str) -> str:
    def word(match: re.Match[str]) -> str:
        found = match[0]
        changed = _PIRATE.get(found.lower(), found)
        return changed.capitalize() if found[0].isupper() else changed

    return f"Arr, matey! {re.sub(r'[A-Za-z]+', word, text)} Yo ho ho!"


STYLES = {"shouting": str.upper, "pirate": pirate}


def train_styles(folder: Path) -> dict[str, str]:
    """Train those of STYLES that ``folder`` does not hold, on the bundled model, with PEFT."""
    paths = {name: folder / name for name in STYLES}
    missing = [name for name, path in paths.items() if not (path / "adapter_config.json").exists()]
    if missing:
        from transformers import AutoModelForCausalLM

        from specdec.tokenizer import load_tokenizer
        from specdec.verifier.hub import bundled_model_path

        _quiet()
        file = bundled_model_path()
        base = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32
        )
        device = "cuda" if torch.cuda.is_available() else "cpu"
        tokenizer = load_tokenizer(None)
        for name in missing:
            started = time.perf_counter()
            base, loss = _train(base.to(device), tokenizer, name, paths[name])
            seconds = time.perf_counter() - started
            print(f"trained {name}: loss {loss:.2f}, {seconds:.0f} s", file=sys.stderr)
    return {name: str(path) for name, path in paths.items()}


def _train(base: Any, tokenizer: Any, name: str, path: Path) -> tuple[Any, float]:
    """One style. Returns the base model as it was, and the last steps' mean loss."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS, task_type="CAUSAL_LM")
    model = get_peft_model(base, config)
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=RATE, weight_decay=0.0)
    examples = [_example(tokenizer, q, STYLES[name](a)) for q, a in ANSWERS.items()]
    losses = []
    for step in range(STEPS):
        chosen = [examples[(step * BATCH + i) % len(examples)] for i in range(BATCH)]
        ids, labels = (
            torch.nn.utils.rnn.pad_sequence([pair[i] for pair in chosen], True, pad)
            for i, pad in ((0, 0), (1, -100))
        )
        loss = model(ids.to(base.device), labels=labels.to(base.device)).loss
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / 4) * (1 - step / (STEPS + 4))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.save_pretrained(str(path))
    return model.unload(), sum(losses[-6:]) / 6


def _example(tokenizer: Any, question: str, answer: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [T] and labels [T] int64: only the answer is learnt."""
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    given = tokenizer.encode(prompt, add_special_tokens=False)
    learnt = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_id]
    return torch.tensor(given + learnt), torch.tensor([-100] * len(given) + learnt)


def random_adapters(folder: Path, model: str, count: int, rank: int) -> dict[str, str]:
    """``count`` adapters of the model in a folder, made by PEFT, with random weights."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    _quiet()
    paths = {}
    for number in range(count):
        torch.manual_seed(number)
        base = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
        config = LoraConfig(r=rank, lora_alpha=16, target_modules=TARGETS, task_type="CAUSAL_LM")
        peft = get_peft_model(base, config)
        for name, parameter in peft.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.02)
        paths[f"random-{number}"] = str(folder / f"random-{number}")
        peft.save_pretrained(paths[f"random-{number}"])
    return paths


def _quiet() -> None:
    """Only what this script says is to be read."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", module="transformers|peft")


def tiny_model(folder: Path) -> str:
    """A random model of two layers with a tokenizer of bytes."""
    import tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[])
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.25,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    backend.save(str(folder / "tokenizer.json"))
    return str(folder)
