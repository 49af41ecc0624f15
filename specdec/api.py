"""One call from prompt to text."""

import gc
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from specdec.config import EngineConfig
from specdec.drafters.base import Drafter
from specdec.engine import Engine
from specdec.outputs import Generation
from specdec.params import SamplingParams

# Engines that ``generate`` keeps, the one used last at the end. Each holds its weights, KV and
# graphs, so there are few: enough for comparing two ways in turn.
MAX_ENGINES = 2
_engines: dict[str, Engine] = {}


def generate(
    prompt: Any,
    *,
    model: str | Path | None = None,
    draft: str | Path | Drafter | None = "auto",
    k: int | str = 4,
    lora: str | Path | None = None,
    **params: Any,
) -> Generation | list[Generation]:
    """Generate text, drafting k tokens a step. The text does not depend on the drafter.

    Args:
        prompt: a string, a list of token ids, a list of either, or a list of chat messages
            (``{"role": ..., "content": ...}``). An instruct model's chat template is applied to
            strings and messages.
        model: see ``Engine``; None is the bundled SmolLM2-135M-Instruct.
        draft: see ``Engine``; "auto" picks a drafter that needs no other weights.
        lora: the folder of an adapter in PEFT's format, or None for the model as it is.
        params: fields of ``SamplingParams`` and of ``EngineConfig``. The engine is kept for the
            next call with the same model, draft, k and engine fields: the two engines that were
            used last are. Before another is made the older of them is closed and its memory freed.

    Raises:
        TypeError: an unknown name. ValueError: a value out of range, named.
    """
    sampling_names = {field.name for field in fields(SamplingParams)}
    if lora is not None and (not isinstance(lora, str | Path) or not str(lora)):
        raise TypeError(f"lora must be the path of an adapter's folder or None, got {lora!r}")
    unknown = sorted(set(params) - sampling_names - EngineConfig.field_names())
    if unknown:
        raise TypeError(f"generate has no parameter {', '.join(unknown)}")
    sampling = SamplingParams(**{n: v for n, v in params.items() if n in sampling_names})
    engine_fields = {n: v for n, v in params.items() if n not in sampling_names}
    EngineConfig(**engine_fields)
    engine = _engine(model, draft, k, engine_fields)
    name = None if lora is None else _adapter(engine, lora)
    return engine.generate(chat_prompts(engine, prompt), sampling, lora=name)


def chat_prompts(engine: Engine, prompt: Any) -> Any:
    """Strings and messages under the model's chat template, as token ids; ids as they are."""
    if isinstance(prompt, str):
        if not prompt:
            raise ValueError("prompt is empty; at least one token is needed")
        return _templated(engine, [{"role": "user", "content": prompt}], prompt)
    if isinstance(prompt, Sequence) and prompt:
        if all(isinstance(item, Mapping) for item in prompt):
            for number, message in enumerate(prompt):
                _check_message(message, number)
            return _templated(engine, list(prompt), None)
        if any(isinstance(item, str | Sequence) for item in prompt):
            return [chat_prompts(engine, item) for item in prompt]
    return prompt


def _check_message(message: Mapping[str, Any], number: int) -> None:
    if not isinstance(message.get("role"), str):
        raise ValueError(f"prompt[{number}]: a chat message needs a role, got {dict(message)!r}")
    if not isinstance(message.get("content"), str | list):
        raise ValueError(
            f"prompt[{number}]: a chat message needs content (a string), got {dict(message)!r}"
        )


def _templated(engine: Engine, messages: list[Any], plain: str | None) -> Any:
    tokenizer = engine.tokenizer
    if tokenizer is None or not tokenizer.is_chat:
        if plain is not None:
            return plain
        raise ValueError("prompt: this model has no chat template; pass a string or token ids")
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


def _engine(model: Any, draft: Any, k: int | str, engine_fields: dict[str, Any]) -> Engine:
    key = repr((_identity(model), _identity(draft), k))
    key += repr(sorted(engine_fields.items()))
    engine = _engines.pop(key, None)
    if engine is None:
        while len(_engines) >= MAX_ENGINES:
            _engines.pop(next(iter(_engines))).close()
            # What it held must be gone before the next one takes its memory.
            gc.collect()
        engine = Engine(model, draft, k, **engine_fields)
    _engines[key] = engine
    return engine


def _identity(value: Any) -> Any:
    """What tells one model or drafter from another: a path wherever the process stands by then."""
    if isinstance(value, str | Path):
        return str(Path(value).resolve()) if Path(value).exists() else str(value)
    return None if value is None else id(value)


def _adapter(engine: Engine, path: str | Path) -> str:
    """The name under which the adapter in ``path`` is loaded: the path and when it was written."""
    folder = Path(path).resolve()
    written = max((file.stat().st_mtime_ns for file in folder.glob("adapter_*")), default=0)
    name = f"{folder}@{written}"
    if name not in engine.loras:
        engine.add_lora(name, path)
        for other in engine.loras:
            if other != name and other.startswith(f"{folder}@"):
                engine.remove_lora(other)
    return name
