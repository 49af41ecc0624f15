"""Text to token ids and back, with the tokenizer that a model's files bring."""

import json
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import tokenizers

from specdec.chat import ChatTemplate
from specdec.gguf_tokenizer import tokenizer_from_gguf
from specdec.verifier.gguf_file import GGUFFile
from specdec.verifier.hub import resolve_model
from specdec.verifier.models.config import read_json_object

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")


class Tokenizer:
    """A ``tokenizers`` tokenizer with a chat template and the names of its special tokens."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
        source: str = "tokenizer",
    ) -> None:
        # Files may ask for truncation or padding, which belong to training.
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.source = source
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = None
        if chat_template is not None:
            self.chat_template = ChatTemplate(
                chat_template, special_tokens=self.special_tokens, source=source
            )
        # The vocabulary's string of each id, None for an id that does not exist.
        vocab = backend.get_vocab(with_added_tokens=True)
        self.strings: list[str | None] = [None] * (max(vocab.values(), default=-1) + 1)
        for string, token_id in vocab.items():
            self.strings[token_id] = string

    @property
    def is_chat(self) -> bool:
        return self.chat_template is not None

    @property
    def vocab_size(self) -> int:
        """One more than the highest id that exists, added tokens included."""
        return len(self.strings)

    @property
    def bos_id(self) -> int | None:
        return self._special_id("bos_token")

    @property
    def eos_id(self) -> int | None:
        return self._special_id("eos_token")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``; with the tokens that the tokenizer puts around it, if any."""
        ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ``ids``; bytes that are no UTF-8 become U+FFFD, unknown ids nothing."""
        text: str = self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        """The prompt for ``messages``; to be encoded with ``add_special_tokens=False``.

        Raises ValueError where the model has no template or the template refuses the messages.
        """
        if self.chat_template is None:
            raise ValueError(f"{self.source} has no chat template; pass the prompt as text")
        return self.chat_template.render(messages, add_generation_prompt=add_generation_prompt)

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, as in a Hugging Face folder."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.backend.save(str(folder / "tokenizer.json"))
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        config |= self.special_tokens
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template.text
        text = json.dumps(config, indent=2, ensure_ascii=False)
        (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")

    def _special_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)


def load_tokenizer(path_or_id: str | Path | None) -> Tokenizer | None:
    """The tokenizer of a model folder, hub id or ``.gguf`` file (None: the bundled default).

    None where a folder or file has no tokenizer. Raises ValueError naming the file for one that
    cannot be read, and errors as ``resolve_model``.
    """
    path = resolve_model(path_or_id)
    if path.is_dir():
        return _from_folder(path)
    file = GGUFFile(path)
    if "tokenizer.ggml.model" not in file.metadata:
        return None
    backend, special_tokens, chat_template = tokenizer_from_gguf(file)
    return Tokenizer(
        backend, special_tokens=special_tokens, chat_template=chat_template, source=str(path)
    )


def compare_tokenizers(target: Tokenizer | None, draft: Tokenizer | None) -> str | None:
    """How two vocabularies differ: the first id and both strings; None where they agree.

    The sizes of the models' embeddings play no part, so padded vocabularies agree. A model
    without a tokenizer cannot be compared and agrees.
    """
    if target is None or draft is None:
        return None
    pairs = zip_longest(target.strings, draft.strings)
    for token_id, (our, their) in enumerate(pairs):
        if our != their:
            return (
                f"id {token_id} is {_shown(our)} in the target ({target.source}) and "
                f"{_shown(their)} in the draft ({draft.source})"
            )
    return None


def _shown(string: str | None) -> str:
    return "absent" if string is None else repr(string)


def _from_folder(folder: Path) -> Tokenizer | None:
    path = folder / "tokenizer.json"
    if path.exists():
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"{path} cannot be read: {error}") from error
    elif (folder / "tokenizer.model").exists():
        backend = _converted_sentencepiece(folder)
    else:
        return None
    config_path = folder / "tokenizer_config.json"
    config = read_json_object(config_path) if config_path.exists() else {}
    special_tokens = {name: _content(config[name]) for name in SPECIAL_TOKENS if config.get(name)}
    return Tokenizer(
        backend,
        special_tokens=special_tokens,
        chat_template=_chat_template(folder, config),
        source=str(folder),
    )


def _converted_sentencepiece(folder: Path) -> tokenizers.Tokenizer:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ValueError(
            f"{folder} has a SentencePiece tokenizer.model and no tokenizer.json; converting it "
            "needs `pip install transformers sentencepiece protobuf`"
        ) from error
    try:
        return AutoTokenizer.from_pretrained(folder).backend_tokenizer
    except Exception as error:  # whatever the conversion lacks, the file is what must be named
        raise ValueError(f"{folder / 'tokenizer.model'} cannot be converted: {error}") from error


def _content(token: Any) -> str:
    """Special tokens are strings, or objects with their content."""
    return str(token["content"] if isinstance(token, Mapping) else token)


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The default template: a file of its own, or a field of tokenizer_config.json."""
    if (folder / "chat_template.jinja").exists():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    template = config.get("chat_template")
    if (folder / "chat_template.json").exists():
        template = read_json_object(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return None if template is None else str(template)
