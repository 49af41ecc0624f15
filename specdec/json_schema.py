"""JSON schemas as xgrammar enforces them: what it would pass over is refused by name.

Every text that the rewritten schema allows fulfils the one that was given; where a schema leaves
room that costs nothing to give up (properties it does not name), the texts use less of it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from specdec.regex_syntax import json_characters, json_pattern
from specdec.schema_values import (
    Schema,
    bounds_of,
    check_value,
    is_of,
    known_values,
    list_of,
    number_bounds,
    short,
)

MAX_DEPTH = 64
MAX_SIZE = 20_000  # schemas, names and values in one schema, repeats of its patterns included
# What says nothing about which values fit.
_ANNOTATIONS = frozenset(
    [
        *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
        *("$schema", "$comment", "$anchor", "$dynamicAnchor", "$defs", "definitions"),
        "discriminator",
    ]
)
_RANGE = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_OF_TYPE: dict[str, tuple[str, ...]] = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "integer": _RANGE,
    "number": _RANGE,
    "boolean": (),
    "null": (),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "object": (
        *("properties", "required", "additionalProperties", "patternProperties"),
        *("propertyNames", "minProperties", "maxProperties"),
    ),
}
_APPLIED = ("$ref", "enum", "const", "anyOf", "oneOf", "allOf")
FORMATS = frozenset(
    [
        *("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"),
        *("uri", "uri-reference", "uri-template", "json-pointer", "relative-json-pointer"),
    ]
)


def enforced_schema(schema: object) -> dict[str, Any]:
    """The schema to compile. Raises ValueError or TypeError naming the keyword and its place."""
    reader = _Reader(schema)
    result = reader.read(schema, "schema", 0)
    definitions: dict[str, Any] = {}
    while reader.pending:
        name, place, target = reader.pending.pop()
        definitions[name] = reader.read(target, place, 0)
    return result | {"$defs": definitions} if definitions else result


class _Reader:
    """One pass over a schema. ``pending``: what references point to and is still to be read."""

    def __init__(self, root: object) -> None:
        self._root = root
        self._names: dict[str, str] = {}
        self._size = 0
        self.pending: list[tuple[str, str, object]] = []

    def read(self, schema: object, at: str, depth: int) -> dict[str, Any]:
        self._count(1, at)
        if depth > MAX_DEPTH:
            raise ValueError(f"{at} lies deeper than {MAX_DEPTH} levels")
        if schema is True:
            return {}
        if schema is False:
            raise ValueError(f"{at} is false: no value fits it")
        if not isinstance(schema, Mapping):
            raise TypeError(f"{at} must be a schema (an object or true), got {short(schema)}")
        for name in ("$defs", "definitions"):
            for key, definition in _mapping(schema.get(name, {}), f"{at}.{name}").items():
                self.read(definition, f"{at}.{name}.{key}", depth + 1)
        given = {name: value for name, value in schema.items() if name not in _ANNOTATIONS}
        if schema is self._root:
            given.pop("$id", None)
        if given.get("uniqueItems") is False:
            del given["uniqueItems"]
        applied = [name for name in _APPLIED if name in given]
        if applied:
            name = applied[0]
            beside = ["type"] if name in ("enum", "const") else []
            self._only(given, [name, *beside], at, f" beside {name}")
            return self._applied(name, given, at, depth)
        types = self._types(given, at)
        if not types:
            return {}
        if len(types) > 1:
            return {"anyOf": [self._typed(each, given, at, depth) for each in types]}
        return self._typed(types[0], given, at, depth)

    # -- references, values and alternatives ------------------------------------------------------

    def _applied(self, name: str, given: Schema, at: str, depth: int) -> dict[str, Any]:
        value = given[name]
        if name == "$ref":
            return {"$ref": f"#/$defs/{self._name_of(value, at)}"}
        if name in ("enum", "const"):
            return {"enum": self._values(name, given, at)}
        branches = list_of(value, f"{at}.{name}")
        if name == "allOf" and len(branches) > 1:
            raise ValueError(f"{at}.allOf: only one schema is supported in it")
        if name == "oneOf":
            self._check_exclusive(branches, f"{at}.oneOf")
        read = [
            self.read(branch, f"{at}.{name}[{number}]", depth + 1)
            for number, branch in enumerate(branches)
        ]
        return read[0] if len(read) == 1 else {"anyOf": read}

    def _name_of(self, pointer: object, at: str) -> str:
        target = self._target(pointer, at)
        place = str(pointer)
        if place not in self._names:
            self._names[place] = f"r{len(self._names)}"
            self.pending.append((self._names[place], place, target))
        return self._names[place]

    def _target(self, pointer: object, at: str) -> object:
        if not isinstance(pointer, str) or (pointer != "#" and not pointer.startswith("#/")):
            raise ValueError(
                f"{at}.$ref: only references inside the schema ('#/...') are supported, got "
                f"{short(pointer)}"
            )
        target = self._root
        for part in pointer.split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(target, Mapping) and name in target:
                target = target[name]
            elif isinstance(target, list) and name.isdecimal() and int(name) < len(target):
                target = target[int(name)]
            else:
                raise ValueError(f"{at}.$ref: there is no {pointer!r} in the schema")
        return target

    def _values(self, name: str, given: Schema, at: str) -> list[Any]:
        values = list_of(given[name], f"{at}.{name}") if name == "enum" else [given[name]]
        self._count(len(values), at)
        for value in values:
            check_value(value, f"{at}.{name}")
        if "type" in given:
            types = self._types({"type": given["type"]}, at)
            values = [value for value in values if any(is_of(value, each) for each in types)]
            if not values:
                raise ValueError(f"{at}.{name}: none of its values is of type {given['type']!r}")
        return list(values)

    def _check_exclusive(self, branches: Sequence[object], at: str) -> None:
        for number, first in enumerate(branches):
            for second in branches[number + 1 :]:
                if not self._are_exclusive(first, second, at):
                    raise ValueError(
                        f"{at}: a value may fit two of its schemas; supported are those of "
                        "different types or values, or with different values of a required "
                        "property (anyOf has no such limit)"
                    )

    def _are_exclusive(self, first: object, second: object, at: str) -> bool:
        first, second = self._resolved(first, at), self._resolved(second, at)
        known = known_values(first), known_values(second)
        if known[0] is not None and known[1] is not None:
            return not known[0] & known[1]
        kinds = self._kinds(first, at), self._kinds(second, at)
        if not kinds[0] & kinds[1]:
            return True
        if kinds[0] != {"object"} or kinds[1] != {"object"}:
            return False
        shared = set(first.get("required", ())) & set(second.get("required", ()))
        for name in shared:
            one, other = (each.get("properties", {}).get(name) for each in (first, second))
            if one is not None and other is not None and self._are_exclusive(one, other, at):
                return True
        return False

    def _resolved(self, schema: object, at: str) -> Schema:
        for _ in range(MAX_DEPTH):
            if not isinstance(schema, Mapping) or "$ref" not in schema:
                break
            schema = self._target(schema["$ref"], at)
        return schema if isinstance(schema, Mapping) else {}

    def _kinds(self, schema: Schema, at: str) -> set[str]:
        """Types of the values that may fit; an integer is a number."""
        if "enum" in schema or "const" in schema:
            values = schema.get("enum", [schema.get("const")])
            return {kind for kind in _OF_TYPE for each in values if is_of(each, kind)} - {"integer"}
        if "type" in schema:
            types = self._types({"type": schema["type"]}, at)
            return {"number" if each == "integer" else each for each in types}
        return set(_OF_TYPE) - {"integer"}

    # -- types ------------------------------------------------------------------------------------

    def _types(self, given: Schema, at: str) -> list[str]:
        """Those that are named, or the one that the other keywords are for."""
        if "type" in given:
            types = given["type"] if isinstance(given["type"], list) else [given["type"]]
            for each in types:
                if not isinstance(each, str) or each not in _OF_TYPE:
                    raise ValueError(
                        f"{at}.type must be one or some of {', '.join(_OF_TYPE)}, got "
                        f"{short(given['type'])}"
                    )
            types = list(dict.fromkeys(types))
            if not types:
                raise ValueError(f"{at}.type is empty")
            if "number" in types and "integer" in types:
                types.remove("integer")
            self._only(given, ["type", *(k for each in types for k in _OF_TYPE[each])], at)
            return types
        self._only(given, [keyword for each in _OF_TYPE.values() for keyword in each], at)
        types = [kind for kind, keywords in _OF_TYPE.items() if set(given) & set(keywords)]
        types = [kind for kind in types if kind != "integer"]
        if len(types) > 1:
            raise ValueError(f"{at}: a type is needed beside {', '.join(sorted(given))}")
        return types

    def _typed(self, kind: str, given: Schema, at: str, depth: int) -> dict[str, Any]:
        own = {name: given[name] for name in _OF_TYPE[kind] if name in given}
        match kind:
            case "string":
                return self._string(own, at)
            case "integer" | "number":
                return {"type": kind} | number_bounds(kind, own, at)
            case "array":
                return self._array(own, at, depth)
            case "object":
                return self._object(own, at, depth)
        return {"type": kind}

    def _string(self, own: Schema, at: str) -> dict[str, Any]:
        low, high = bounds_of(own, "minLength", "maxLength", at)
        groups = [name for name in ("pattern", "format") if name in own]
        if "minLength" in own or "maxLength" in own:
            groups.append("minLength or maxLength")
        if len(groups) > 1:
            raise ValueError(f"{at}: {groups[0]} is not supported together with {groups[1]}")
        if "format" in own:
            if own["format"] not in FORMATS:
                known = ", ".join(sorted(FORMATS))
                raise ValueError(
                    f"{at}.format: {short(own['format'])} is not supported, only {known}"
                )
            return {"type": "string", "format": own["format"]}
        if "pattern" in own:
            return {"type": "string", "pattern": self._pattern(own["pattern"], f"{at}.pattern")}
        if high == 0:
            return {"enum": [""]}
        if groups:
            return {"type": "string", "pattern": json_characters(low, high)}
        return {"type": "string"}

    def _pattern(self, pattern: object, at: str) -> str:
        if not isinstance(pattern, str):
            raise TypeError(f"{at} must be a string, got {short(pattern)}")
        try:
            translated, size = json_pattern(pattern)
        except ValueError as error:
            raise ValueError(f"{at}: {error}") from error
        self._count(size, at)
        return translated

    def _array(self, own: Schema, at: str, depth: int) -> dict[str, Any]:
        low, high = bounds_of(own, "minItems", "maxItems", at)
        first = list_of(own["prefixItems"], f"{at}.prefixItems") if "prefixItems" in own else []
        rest = own.get("items", not first or low > len(first))
        if isinstance(rest, list):
            raise TypeError(f"{at}.items must be a schema; for one per place use prefixItems")
        if high is not None and high <= len(first):
            first, rest = first[:high], False
        if rest is False and low > len(first):
            raise ValueError(f"{at}.minItems is {low}, and at most {len(first)} items may stand")
        result: dict[str, Any] = {"type": "array"}
        if first:
            result["prefixItems"] = [
                self.read(each, f"{at}.prefixItems[{number}]", depth + 1)
                for number, each in enumerate(first)
            ]
        result["items"] = (
            False if rest is False else self.read(rest, f"{at}.items", depth + 1) or True
        )
        if low:
            result["minItems"] = low
        if high is not None and rest is not False:
            result["maxItems"] = high
        self._count(low, at)
        return result

    def _object(self, own: Schema, at: str, depth: int) -> dict[str, Any]:
        low, high = bounds_of(own, "minProperties", "maxProperties", at)
        named = _mapping(own.get("properties", {}), f"{at}.properties")
        required = list_of(own["required"], f"{at}.required", True) if "required" in own else []
        for name in required:
            if name not in named:
                raise ValueError(f"{at}.required: {short(name)} is not among its properties")
        result: dict[str, Any] = {"type": "object"}
        further = own.get("additionalProperties", "properties" not in own)
        if "properties" in own:
            self._only(
                own,
                [*_OF_TYPE["object"][:3], "minProperties", "maxProperties"],
                at,
                " beside properties",
            )
            if isinstance(further, Mapping) and further:
                raise ValueError(
                    f"{at}.additionalProperties: a schema is not supported beside properties, "
                    "only true or false"
                )
            result["properties"] = {
                name: self.read(each, f"{at}.properties.{name}", depth + 1)
                for name, each in named.items()
            }
            result |= {"required": list(required), "additionalProperties": False}
            if low > len(named):
                raise ValueError(f"{at}.minProperties is {low}, and it has {len(named)} properties")
        else:
            result |= self._open_object(own, further, at, depth)
            if low > 1:
                # A name that comes twice is one property of the value.
                raise ValueError(f"{at}.minProperties above 1 needs properties that are named")
        if low:
            result["minProperties"] = low
        if high is not None:
            if high < len(required):
                raise ValueError(f"{at}.maxProperties is {high}, and {len(required)} are required")
            result["maxProperties"] = high
        return result

    def _open_object(self, own: Schema, further: object, at: str, depth: int) -> dict[str, Any]:
        """Names that the schema does not list."""
        if "patternProperties" in own:
            patterns = own["patternProperties"]
            others = {"propertyNames"} & set(own) or (further not in (True, False))
            if not isinstance(patterns, Mapping) or len(patterns) != 1 or others:
                raise ValueError(
                    f"{at}.patternProperties: one pattern is supported, without propertyNames or a "
                    "schema in additionalProperties"
                )
            ((pattern, each),) = patterns.items()
            place = f"{at}.patternProperties"
            values = self.read(each, place, depth + 1)
            return {
                "patternProperties": {self._pattern(pattern, place): values or True},
                "additionalProperties": False,
            }
        if further is False:
            return {"properties": {}, "additionalProperties": False}
        read_further = self.read(further, f"{at}.additionalProperties", depth + 1)
        result: dict[str, Any] = {"additionalProperties": read_further or True}
        if "propertyNames" in own:
            place = f"{at}.propertyNames"
            names = own["propertyNames"]
            if not isinstance(names, Mapping) or names.get("type", "string") != "string":
                raise ValueError(f"{place} must be a schema of strings, got {short(names)}")
            read = self.read({**names, "type": "string"}, place, depth + 1)
            if set(read) - {"type", "pattern"}:
                raise ValueError(f"{place}: only pattern, minLength and maxLength are supported")
            if "pattern" in read:
                result["propertyNames"] = {"pattern": read["pattern"]}
        return result

    def _only(self, given: Schema, known: Sequence[str], at: str, where: str = "") -> None:
        for keyword in given:
            if keyword not in known:
                raise ValueError(f"{at}: the schema keyword {keyword!r} is not supported{where}")

    def _count(self, number: int, at: str) -> None:
        self._size += number
        if self._size > MAX_SIZE:
            raise ValueError(f"{at}: the schema is too large, {MAX_SIZE} parts are supported")


def _mapping(value: object, at: str) -> Schema:
    if not isinstance(value, Mapping):
        raise TypeError(f"{at} must be an object, got {short(value)}")
    return value
