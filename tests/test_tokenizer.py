"""Tokenizers from folders and GGUF files, their comparison, and chat templates."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tiny import make_tiny, read_json, write_tokenizer

from specdec.gguf_tokenizer import tokenizer_from_gguf
from specdec.tokenizer import Tokenizer, compare_tokenizers, load_tokenizer
from specdec.verifier.gguf_file import GGUFFile
from specdec.verifier.hub import resolve_model
from specdec.verifier.models.config import UnsupportedModelError

PIECES = ["a", "the ", " ", "\n", "1", "23", "é", "漢", "😀", "'s", "def ", "\t", ".", "👩‍👧"]


def words(folder: Path, size: int = 100, **options: Any) -> Tokenizer:
    write_tokenizer(folder, "words", size, **options)
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer


class FakeGGUF(GGUFFile):
    """Metadata without a file."""

    def __init__(self, **fields: Any) -> None:
        self.path = Path("fake.gguf")
        self.metadata = {f"tokenizer.ggml.{name}": value for name, value in fields.items()}


# A vocabulary of bytes, two merges and three tokens of other kinds.
BYTES = list(tokenizers.pre_tokenizers.ByteLevel.alphabet())
FIELDS = {
    "model": "gpt2",
    "tokens": [*BYTES, "ab", "abc", "<s>", "<tool>", "[PAD260]"],
    "merges": ["a b", "ab c"],
    "token_type": [1] * 258 + [3, 4, 5],
    "bos_token_id": 258,
    "eos_token_id": 258,
}


def test_folder_with_words(tmp_path: Path) -> None:
    tokenizer = words(tmp_path)
    assert tokenizer.encode("w3 w4 w99") == [3, 4, 99]
    assert tokenizer.decode([3, 4]) == "w3 w4"
    assert tokenizer.vocab_size == 100
    assert tokenizer.strings[7] == "w7"
    assert not tokenizer.is_chat
    assert (tokenizer.bos_id, tokenizer.eos_id) == (None, None)


def test_folder_without_tokenizer(tmp_path: Path) -> None:
    assert load_tokenizer(make_tiny(tmp_path)) is None


def test_broken_tokenizer_file(tmp_path: Path) -> None:
    words(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(tmp_path)


def test_sentencepiece_alone_is_not_passed_over(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"not a model")
    with pytest.raises(ValueError, match=r"tokenizer\.model"):
        load_tokenizer(tmp_path)


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    words(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = read_json(path)
    content["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    content["padding"] = {
        "strategy": {"Fixed": 16},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "w0",
    }
    path.write_text(json.dumps(content))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.encode("w1 w2 w3 w4 w5 w6") == [1, 2, 3, 4, 5, 6]


def test_special_tokens_may_be_objects(tmp_path: Path) -> None:
    words(tmp_path)
    config = {"bos_token": "w1", "eos_token": {"content": "w2", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)


class TestComparison:
    """C20: by content, from the files."""

    def test_equal(self, tmp_path: Path) -> None:
        assert compare_tokenizers(words(tmp_path / "a"), words(tmp_path / "b")) is None

    def test_swapped_tokens(self, tmp_path: Path) -> None:
        difference = compare_tokenizers(words(tmp_path / "a"), words(tmp_path / "b", swap=(7, 8)))
        assert difference is not None
        assert difference.startswith("id 7 is 'w7' in the target")
        assert "and 'w8' in the draft" in difference

    @pytest.mark.parametrize("sizes", [(100, 90), (90, 100)])
    def test_tokens_that_one_lacks(self, tmp_path: Path, sizes: tuple[int, int]) -> None:
        difference = compare_tokenizers(
            words(tmp_path / "a", sizes[0]), words(tmp_path / "b", sizes[1])
        )
        assert difference is not None
        assert "id 90 is" in difference
        assert "absent" in difference
        assert "'w90'" in difference

    def test_without_a_tokenizer_there_is_nothing_to_compare(self, tmp_path: Path) -> None:
        assert compare_tokenizers(words(tmp_path), None) is None
        assert compare_tokenizers(None, words(tmp_path)) is None

    def test_padded_models_share_a_tokenizer(self, tmp_path: Path) -> None:
        """C19: sizes of embeddings are no part of the comparison."""
        one = make_tiny(tmp_path / "a", vocab=128, tokenizer="words", tokenizer_vocab=100)
        two = make_tiny(tmp_path / "b", vocab=104, tokenizer="words", tokenizer_vocab=100)
        assert compare_tokenizers(load_tokenizer(one), load_tokenizer(two)) is None


class TestGGUF:
    def test_kinds_of_tokens(self) -> None:
        """Control tokens are special, unused ones at the end are padding."""
        backend, special, template = tokenizer_from_gguf(FakeGGUF(**FIELDS, pre="gpt-2"))
        tokenizer = Tokenizer(backend, special_tokens=special, chat_template=template)
        assert tokenizer.vocab_size == 260
        assert (tokenizer.bos_id, tokenizer.eos_id) == (258, 258)
        ids = tokenizer.encode("abc<s><tool>")
        assert ids == [257, 258, 259]
        assert tokenizer.decode(ids) == "abc<tool>"
        assert tokenizer.decode(ids, skip_special_tokens=False) == "abc<s><tool>"
        assert not tokenizer.is_chat

    @pytest.mark.parametrize(
        ("pre", "cut"),
        [
            ("gpt-2", ["Ġx", "123", "45"]),
            ("smollm", ["Ġx", "1", "2", "3", "4", "5"]),
            ("llama-bpe", ["Ġx", "123", "45"]),
            ("qwen2", ["Ġx", "1", "2", "3", "4", "5"]),
        ],
    )
    def test_digits(self, pre: str, cut: list[str]) -> None:
        backend, _, _ = tokenizer_from_gguf(FakeGGUF(**FIELDS, pre=pre))
        text = " x12345" if pre != "gpt-2" else " x123 45"
        found = [piece.strip("Ġ") for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
        assert found == [piece.strip("Ġ") for piece in cut]

    @pytest.mark.parametrize(
        ("fields", "expected"),
        [
            ({"pre": "gpt-2"}, False),
            ({"pre": "gpt-2", "add_bos_token": True}, True),
            ({"pre": "llama-bpe"}, True),
            ({"pre": "llama-bpe", "add_bos_token": False}, False),
        ],
    )
    def test_bos(self, fields: dict[str, Any], expected: bool) -> None:
        backend, _, _ = tokenizer_from_gguf(FakeGGUF(**FIELDS, **fields))
        tokenizer = Tokenizer(backend)
        assert tokenizer.encode("ab") == ([258, 256] if expected else [256])
        assert tokenizer.encode("ab", add_special_tokens=False) == [256]

    @pytest.mark.parametrize(
        ("fields", "named"),
        [
            ({"model": "llama"}, "tokenizer model 'llama'"),
            ({"pre": "deepseek-llm"}, "pre-tokenizer 'deepseek-llm'"),
        ],
    )
    def test_unknown_kinds(self, fields: dict[str, Any], named: str) -> None:
        with pytest.raises(UnsupportedModelError, match=named):
            tokenizer_from_gguf(FakeGGUF(**(FIELDS | fields)))


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    tokenizer = load_tokenizer(None)
    assert tokenizer is not None
    return tokenizer


@pytest.mark.smollm2
class TestSmolLM2:
    @pytest.fixture
    def tokenizer(self, smollm2: Tokenizer) -> Tokenizer:
        return smollm2

    def test_facts(self, tokenizer: Tokenizer) -> None:
        assert tokenizer.vocab_size == 49152
        assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
        assert tokenizer.is_chat

    @pytest.mark.parametrize(
        ("text", "strings"),
        [
            ("\n\n1.", ["ĊĊ", "1", "."]),
            ("12345", ["1", "2", "3", "4", "5"]),
            ("a 42", ["a", "Ġ", "4", "2"]),
            ("don't", ["don", "'t"]),
            ("<|im_start|>user\nHi<|im_end|>", ["<|im_start|>", "user", "Ċ", "Hi", "<|im_end|>"]),
        ],
    )
    def test_tricky_strings(self, tokenizer: Tokenizer, text: str, strings: list[str]) -> None:
        ids = tokenizer.encode(text)
        assert [tokenizer.strings[i] for i in ids] == strings
        assert tokenizer.decode(ids, skip_special_tokens=False) == text

    def test_random_strings_come_back(self, tokenizer: Tokenizer) -> None:
        rng = random.Random(0)
        for _ in range(200):
            text = "".join(rng.choice(PIECES) for _ in range(20))
            assert tokenizer.decode(tokenizer.encode(text)) == text

    def test_equals_transformers_with_the_digits_put_back(self, tokenizer: Tokenizer) -> None:
        """transformers drops the pre-tokenizer that the file names; all else must agree."""
        from transformers import AutoTokenizer

        path = resolve_model(None)
        theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).backend_tokenizer
        assert theirs.get_vocab() == tokenizer.backend.get_vocab()
        assert theirs.encode("\n\n1.").ids != tokenizer.encode("\n\n1.")
        theirs.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
            [
                tokenizers.pre_tokenizers.Digits(individual_digits=True),
                tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
        rng = random.Random(1)
        for _ in range(200):
            text = "".join(rng.choice([*PIECES, "<|im_end|>"]) for _ in range(20))
            assert theirs.encode(text).ids == tokenizer.encode(text)

    def test_chat_template(self, tokenizer: Tokenizer) -> None:
        assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}]) == (
            "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
            "Face<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        )

    def test_saved_and_read_again(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        tokenizer.save(tmp_path)
        again = load_tokenizer(tmp_path)
        assert again is not None
        assert compare_tokenizers(tokenizer, again) is None
        assert (again.bos_id, again.eos_id, again.is_chat) == (1, 2, True)
        text = "né 😀 漢字 12\n\n1.<|im_end|>"
        assert again.encode(text) == tokenizer.encode(text)
        messages = [{"role": "user", "content": "Hi"}]
        assert again.apply_chat_template(messages) == tokenizer.apply_chat_template(messages)


class TestChatTemplates:
    def render(self, folder: Path, template: str, **options: Any) -> str:
        tokenizer = words(folder, chat_template=template)
        messages = [{"role": "user", "content": "a<b"}, {"role": "assistant", "content": "é"}]
        return tokenizer.apply_chat_template(messages, **options)

    def test_what_templates_expect(self, tmp_path: Path) -> None:
        template = (
            "{{ bos_token }}{% for m in messages %}\n"
            "{%- if loop.index > 9 %}{% break %}{% endif %}\n"
            "    {% generation %}{{ m['content'] | tojson }}{% endgeneration %}\n"
            "{% endfor %}"
            "{% if add_generation_prompt %}{{ strftime_now('%Y') | length }}{% endif %}"
        )
        words(tmp_path)
        (tmp_path / "tokenizer_config.json").write_text(
            json.dumps({"bos_token": "<s>", "chat_template": template})
        )
        tokenizer = load_tokenizer(tmp_path)
        assert tokenizer is not None
        messages = [{"role": "user", "content": "a<é"}]
        assert tokenizer.apply_chat_template(messages) == '<s>"a<é"4'
        assert tokenizer.apply_chat_template(messages, False) == '<s>"a<é"'

    def test_template_files_come_first(self, tmp_path: Path) -> None:
        assert self.render(tmp_path, "config") == "config"
        (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
        words_again = load_tokenizer(tmp_path)
        assert words_again is not None
        assert words_again.apply_chat_template([]) == "json"
        (tmp_path / "chat_template.jinja").write_text("jinja")
        words_again = load_tokenizer(tmp_path)
        assert words_again is not None
        assert words_again.apply_chat_template([]) == "jinja"

    def test_named_templates(self, tmp_path: Path) -> None:
        words(tmp_path)
        named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
        tokenizer = load_tokenizer(tmp_path)
        assert tokenizer is not None
        assert tokenizer.apply_chat_template([]) == "d"

    def test_refusal_in_the_templates_words(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="roles must alternate"):
            self.render(tmp_path, "{{ raise_exception('roles must alternate') }}")

    def test_sandbox(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="chat template"):
            self.render(tmp_path, "{{ messages.__class__.__mro__[1].__subclasses__() }}")
        with pytest.raises(ValueError, match="chat template"):
            self.render(tmp_path, "{{ messages.append(1) }}")

    def test_invalid_template_is_refused_at_load(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="chat template is not valid"):
            words(tmp_path, chat_template="{% if %}")

    def test_without_a_template(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="no chat template"):
            words(tmp_path).apply_chat_template([])
