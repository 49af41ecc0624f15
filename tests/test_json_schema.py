"""P6 for formats: what the compiler would pass over is refused by name, all else is fulfilled.

The texts are random walks through the compiled grammar over single bytes: a grammar that allows
a text that is not wanted shows it within a few hundred walks, with no model in the way.
"""

import json
import math
import random
import re

import pytest

xgrammar = pytest.importorskip("xgrammar")

from specdec.json_schema import enforced_schema  # noqa: E402
from specdec.regex_syntax import check_regex, json_pattern  # noqa: E402

END = 256
# Bytes that a random walk would otherwise hardly take, and those that break JSON.
FAVOURED = frozenset(b'"\\\n\x01 ,:{}[]0aA-.')


@pytest.fixture(scope="module")
def compiler():
    vocabulary = [bytes([byte]) for byte in range(256)] + [b""]
    info = xgrammar.TokenizerInfo(
        vocabulary, vocab_type=xgrammar.VocabType.RAW, vocab_size=257, stop_token_ids=[END]
    )
    return xgrammar.GrammarCompiler(info, max_threads=1)


def walk(compiled, chance, longest=80):
    """A random text of the grammar; None where it got too long."""
    matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=[END])
    mask = xgrammar.allocate_token_bitmask(1, 257)
    text = b""
    while len(text) < longest:
        matcher.fill_next_token_bitmask(mask)
        words = mask[0].tolist()
        allowed = [i for i in range(257) if words[i // 32] >> (i % 32) & 1]
        assert allowed, text
        favoured = [token for token in allowed if token in FAVOURED or token == END]
        token = chance.choice(favoured if favoured and chance.random() < 0.5 else allowed)
        if token == END:
            # The compiler's own strings may hold halves of surrogate pairs, which are no UTF-8.
            return text.decode(errors="replace")
        assert matcher.accept_token(token)
        text += bytes([token])
    return None


def values_of(compiler, schema, walks=60):
    """What random texts of the schema parse to."""
    compiled = compiler.compile_json_schema(enforced_schema(schema), any_whitespace=False)
    chance = random.Random(str(schema))
    texts = [walk(compiled, chance) for _ in range(walks)]
    return [json.loads(text) for text in texts if text is not None]


def is_of(value, kind):
    if kind in ("number", "integer"):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and (kind == "number" or value % 1 == 0)
    kinds = {"string": str, "boolean": bool, "array": list, "object": dict, "null": type(None)}
    return isinstance(value, kinds[kind])


def same(a, b):
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True) or (
        is_of(a, "number") and is_of(b, "number") and a == b
    )


def fits(value, schema, root=None):
    """A validator by the book, of the keywords that these tests use."""
    root = schema if root is None else root
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema:
        target = root
        for part in schema["$ref"].split("/")[1:]:
            target = target[part.replace("~1", "/").replace("~0", "~")]
        return fits(value, target, root)
    types = schema.get("type", [])
    types = types if isinstance(types, list) else [types]
    checks = [
        not types or any(is_of(value, kind) for kind in types),
        "enum" not in schema or any(same(value, each) for each in schema["enum"]),
        "const" not in schema or same(value, schema["const"]),
        "anyOf" not in schema or any(fits(value, each, root) for each in schema["anyOf"]),
        "oneOf" not in schema or sum(fits(value, each, root) for each in schema["oneOf"]) == 1,
        "allOf" not in schema or all(fits(value, each, root) for each in schema["allOf"]),
    ]
    if is_of(value, "number"):
        checks += [
            value >= schema.get("minimum", -math.inf) and value <= schema.get("maximum", math.inf),
            value > schema.get("exclusiveMinimum", -math.inf),
            value < schema.get("exclusiveMaximum", math.inf),
        ]
    if isinstance(value, str):
        checks += [
            schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", math.inf),
            re.search(schema.get("pattern", ""), value) is not None,
        ]
    if isinstance(value, list):
        first = schema.get("prefixItems", [])
        checks += [schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", math.inf)]
        checks += [fits(each, sub, root) for each, sub in zip(value, first, strict=False)]
        checks += [fits(each, schema.get("items", True), root) for each in value[len(first) :]]
    if isinstance(value, dict):
        named, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
        checks += [
            schema.get("minProperties", 0) <= len(value) <= schema.get("maxProperties", math.inf),
            set(schema.get("required", [])) <= set(value),
            all(fits(name, schema.get("propertyNames", True), root) for name in value),
        ]
        for name, each in value.items():
            matching = [sub for pattern, sub in patterns.items() if re.search(pattern, name)]
            known = [named[name]] if name in named else []
            rest = [] if known or matching else [schema.get("additionalProperties", True)]
            checks += [fits(each, sub, root) for sub in known + matching + rest]
    return all(checks)


BOOLEAN, NULL = {"type": "boolean"}, {"type": "null"}
SERVED = {
    "short string": {"type": "string", "minLength": 3, "maxLength": 4},
    "long string": {"minLength": 2},
    "empty string": {"type": "string", "maxLength": 0},
    "string in object": {
        "type": "object",
        "properties": {"s": {"type": "string", "maxLength": 6}},
        "required": ["s"],
    },
    "any character": {"type": "string", "pattern": "^.{3}$"},
    "not a": {"type": "string", "pattern": "^[^a]{1,3}$"},
    "not a, beyond ASCII": {"type": "string", "pattern": "^é[^a].$"},
    "space": {"type": "string", "pattern": "^é\\s\\S$"},
    "kinds": {"type": "string", "pattern": "\\D\\W[^\\w\\s]"},
    "alternatives": {"type": "string", "pattern": "^(?:ab|c)+$|^\\u00e9?x$"},
    "any": True,
    "type list": {"type": ["string", "null", "integer"], "minLength": 2, "maximum": 3},
    "integers": {"type": "integer", "exclusiveMinimum": 3, "maximum": 12.5, "minimum": 1},
    "numbers": {"type": "number", "exclusiveMinimum": -0.5, "minimum": -2, "maximum": 0.25},
    "values": {"enum": ["a", 1.5, None, {"b": [True]}, '"\\\n']},
    "values of a type": {"type": "string", "enum": ["a", 1]},
    "constant": {"type": "object", "const": {"a": 1}},
    "tuple": {"type": "array", "prefixItems": [BOOLEAN, NULL], "items": False},
    "tuple and more": {"prefixItems": [BOOLEAN], "items": NULL, "minItems": 2, "maxItems": 3},
    "cut tuple": {"prefixItems": [BOOLEAN, NULL], "maxItems": 1},
    "open tuple": {"prefixItems": [BOOLEAN], "minItems": 2, "maxItems": 2},
    "counted": {"type": "array", "items": BOOLEAN, "minItems": 2, "maxItems": 3},
    "counted, of anything": {"type": "array", "minItems": 1},
    "named": {
        "type": "object",
        "properties": {"a": BOOLEAN, "b": NULL, 'c"\n': NULL},
        "required": ["b"],
        "minProperties": 2,
        "maxProperties": 2,
    },
    "named, open": {"properties": {"a": BOOLEAN}, "additionalProperties": True, "required": ["a"]},
    "map": {"type": "object", "additionalProperties": BOOLEAN, "maxProperties": 2},
    "map of names": {
        "type": "object",
        "propertyNames": {"pattern": "^[a-c]+$"},
        "additionalProperties": BOOLEAN,
        "minProperties": 1,
    },
    "short names": {"propertyNames": {"maxLength": 2}, "additionalProperties": NULL},
    "pattern of names": {"patternProperties": {"^[a-c]+$": BOOLEAN}, "minProperties": 1},
    "reference": {"$ref": "#/$defs/a~1b", "$defs": {"a/b": BOOLEAN}},
    "recursion": {
        "$ref": "#/$defs/n",
        "$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}}},
    },
    "any of": {"anyOf": [BOOLEAN, {"type": "integer", "minimum": 9}, {"type": "integer"}]},
    "one of types": {"oneOf": [BOOLEAN, NULL, {"enum": ["a"]}, {"type": "integer"}]},
    "one of kinds": {
        "oneOf": [
            {"properties": {"k": {"const": "a"}, "x": NULL}, "required": ["k", "x"]},
            {"properties": {"k": {"const": "b"}, "x": BOOLEAN}, "required": ["k"]},
        ],
        "discriminator": {"propertyName": "k"},
    },
    "all of one": {"allOf": [BOOLEAN], "title": "t", "description": "d", "default": True},
}
# An object without a type has one here; a value of another type would fit it too.
SERVED["one of kinds"]["oneOf"] = [{"type": "object"} | s for s in SERVED["one of kinds"]["oneOf"]]


@pytest.mark.parametrize("name", SERVED)
def test_every_text_of_a_schema_is_json_that_fulfils_it(compiler, name):
    """Faults: raw control characters in strings of limited length and in patterns, quotes in
    patterns beyond ASCII, siblings of enum left aside, arrays and objects of a wrong size.
    """
    values = values_of(compiler, SERVED[name])
    assert values
    for value in values:
        assert fits(value, SERVED[name]), value


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "object", "required": ["z"]}, "required.*'z'"),
        ({"properties": {"a": BOOLEAN}, "required": ["a", "z"]}, "required.*'z'"),
        ({"properties": {"a": BOOLEAN}, "anyOf": [{"required": ["a"]}]}, "'properties'.*anyOf"),
        ({"type": "integer", "oneOf": [{"minimum": 3}]}, "'type'.*oneOf"),
        ({"$ref": "#/$defs/a", "enum": [True], "$defs": {"a": BOOLEAN}}, "'enum'.*ref"),
        ({"enum": ["abc"], "maxLength": 2}, "'maxLength'.*enum"),
        ({"const": 3, "enum": [3]}, "'const'.*enum"),
        ({"$ref": "https://example.com/s.json"}, "ref.*inside"),
        ({"properties": {"a": {"$ref": "other.json#/x"}}}, "ref.*inside"),
        ({"$ref": "#foo", "$defs": {"a": {"$anchor": "foo"}}}, "ref.*inside"),
        ({"$ref": "#/$defs/nope"}, "nope"),
        ({"$dynamicRef": "#x"}, "dynamicRef"),
        ({"$id": "http://x", "properties": {"a": {"$id": "http://y"}}}, "'\\$id'"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"oneOf": [{"enum": [1, 2]}, {"enum": [2.0]}]}, "oneOf"),
        ({"oneOf": [{"type": "object"}, {"type": "object"}]}, "oneOf"),
        ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, "allOf"),
        ({"allOf": 3}, "allOf"),
        ({"anyOf": []}, "anyOf"),
        (False, "false"),
        ({"properties": {"a": False}}, "properties.a is false"),
        ({"minLength": 3, "minimum": 3}, "type.*minLength"),
        ({"type": "string", "minimum": 3}, "'minimum'"),
        ({"type": "string", "pattern": "a+", "maxLength": 3}, "pattern.*maxLength"),
        ({"type": "string", "format": "zzz"}, "format.*'zzz'"),
        ({"type": "string", "format": "date", "minLength": 3}, "format.*minLength"),
        ({"type": "string", "contentEncoding": "base64"}, "contentEncoding"),
        ({"type": "string", "nullable": True}, "nullable"),
        ({"type": "string", "zzz": 1}, "zzz"),
        ({"type": "nope"}, "type"),
        ({"type": []}, "type"),
        ({"type": "string", "minLength": -1}, "minLength"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "minLength 3.*maxLength 2"),
        ({"type": "integer", "minimum": 3.2, "maximum": 3.9}, "no integer"),
        ({"type": "number", "minimum": 3, "exclusiveMaximum": 3}, "no number"),
        ({"type": "number", "minimum": 1e-9}, "minimum.*decimals"),
        ({"type": "integer", "minimum": True}, "minimum"),
        ({"type": "integer", "multipleOf": 5}, "multipleOf"),
        ({"enum": [2**70]}, "enum"),
        ({"enum": []}, "enum"),
        ({"type": "null", "enum": [1]}, "enum"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "items": [BOOLEAN]}, "items.*prefixItems"),
        ({"prefixItems": [NULL], "items": False, "minItems": 2}, "minItems"),
        ({"properties": {"a": NULL}, "additionalProperties": BOOLEAN}, "additionalProperties"),
        ({"properties": {"a": NULL}, "patternProperties": {"^a": BOOLEAN}}, "patternProperties"),
        ({"patternProperties": {"^a": BOOLEAN, "a$": NULL}}, "patternProperties"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
        ({"properties": {"a": NULL}, "minProperties": 2}, "minProperties"),
        ({"properties": {"a": NULL}, "required": ["a"], "maxProperties": 0}, "maxProperties"),
        ({"propertyNames": {"format": "date"}}, "propertyNames"),
        ({"properties": [1]}, "properties"),
        ({"not": {}}, "not"),
        ({"properties": {"a": 3}}, "properties.a"),
        ({"enum": list(range(30_000))}, "too large"),
    ],
    ids=str,
)
def test_what_would_be_passed_over_is_refused_by_name(schema, named):
    with pytest.raises((ValueError, TypeError), match=named):
        enforced_schema(schema)


def test_a_deep_schema_is_refused_clearly():
    """Fault: a few hundred levels ended in a crash or an error about something else."""
    schema = {}
    for _ in range(5000):
        schema = {"type": "object", "properties": {"a": schema}}
    with pytest.raises(ValueError, match="deeper than 64 levels"):
        enforced_schema(schema)


@pytest.mark.parametrize(
    "pattern",
    [
        *(
            "a(?=b)",
            "(?!a)b",
            "(?<=a)b",
            "(?i)a",
            "a^b",
            "a$b",
            "(^a$)",
            "\\bx",
            "(a)\\1",
            "\\p{L}",
        ),
        *("(", "a)", "[a", "a**", "a{3,1}", "[z-a]", "x{", "(?<n", "\\", "*"),
    ],
)
def test_a_pattern_with_a_part_that_would_be_ignored_is_refused(pattern):
    """Look-arounds, flags and inner anchors: the compiler warned on standard error and went on."""
    for check in (check_regex, json_pattern):
        with pytest.raises(ValueError, match="pattern"):
            check(pattern)


@pytest.mark.parametrize("pattern", ['a"b', "a\\\\b", "\\n", "[\n]", "\\x22", "\\u0001"])
def test_a_pattern_that_needs_escapes_is_for_plain_text_alone(pattern):
    check_regex(pattern)
    with pytest.raises(ValueError, match="escape"):
        json_pattern(pattern)


def test_the_size_of_a_pattern_is_limited():
    with pytest.raises(ValueError, match="27090300 characters"):
        check_regex("((a{1,300}b){1,300}c){1,300}")
    with pytest.raises(ValueError, match="too large"):
        properties = {f"p{i}": {"type": "string", "pattern": "[a-z]{900}"} for i in range(60)}
        enforced_schema({"type": "object", "properties": properties})
