"""Answers that are JSON: which tokens may come next, by a JSON schema.

The grammar is a stack of items. Each item says which characters it accepts next and what replaces it. Several stacks
are followed at the same time, because ``anyOf`` and ``enum`` are decided by later characters.
"""

import json
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import unquote

import torch
from torch import Tensor

from torchtune.generation._sampling import GenerationError

# Items that replace an item after a character.
_Items = tuple["_Item", ...]
# A stack as (first item, stack below it, size), and () when it is empty: stacks share their ends.
_Stack = tuple[Any, ...]

_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
# Supported keywords of a schema: of values, of their parts, and those that describe it only.
_VALUE_KEYWORDS = ("type", "enum", "const", "anyOf", "$ref")
_PART_KEYWORDS = ("properties", "required", "additionalProperties", "items", "minItems", "maxItems")
_ANNOTATIONS = ("title", "description", "default", "examples", "$schema", "$id", "$defs", "definitions", "$comment")
# Keywords that may stand beside one that decides the values; others would have to hold as well.
_KEYWORDS_BESIDE = {"$ref": (), "anyOf": (), "enum": ("type", "const"), "const": ("type",)}
_MAX_BLANKS = 32  # white space between two parts: a model could write it forever
_MAX_NODES = 10_000
_MAX_STATES = 512  # cached lists of allowed tokens
_MAX_STACK = 512  # items of a stack: some hundred nested brackets


class _Item:
    """Part of the text that is still to come."""

    is_optional = False

    def step(self, char: str) -> Iterator[_Items]:
        """Yield the items that replace this one after ``char``, for each way to read it; none if it cannot follow."""
        raise NotImplementedError


@dataclass(frozen=True)
class _Text(_Item):
    """A fixed text."""

    text: str

    def step(self, char: str) -> Iterator[_Items]:
        if char != self.text[0]:
            return
        if len(self.text) > 1:
            yield (_Text(self.text[1:]),)
        else:
            yield ()


@dataclass(frozen=True)
class _Blank(_Item):
    """White space, or none."""

    count: int = _MAX_BLANKS
    is_optional = True

    def step(self, char: str) -> Iterator[_Items]:
        if char in " \n\r\t" and self.count:
            yield (_Blank(self.count - 1),)


@dataclass(frozen=True)
class _String(_Item):
    """A string after its first quotation mark."""

    def step(self, char: str) -> Iterator[_Items]:
        if char == '"':
            yield ()
        elif char == "\\":
            yield (_Escape(), self)
        elif char >= " ":
            yield (self,)


@dataclass(frozen=True)
class _Escape(_Item):
    """The characters after a backslash; after a u, ``digits`` hexadecimal digits are still to come."""

    digits: int = 0

    def step(self, char: str) -> Iterator[_Items]:
        if self.digits:
            if char not in "0123456789abcdefABCDEF":
                return
            if self.digits > 1:
                yield (_Escape(self.digits - 1),)
            else:
                yield ()
        elif char == "u":
            yield (_Escape(4),)
        elif char in '"\\/bfnrt':
            yield ()


# State of a number -> (characters, next state) that may follow; "." and "e" only in numbers that need not be integers.
_NUMBER = {
    "start": [("-", "minus"), ("0", "zero"), ("123456789", "digits")],
    "minus": [("0", "zero"), ("123456789", "digits")],
    "zero": [(".", "point"), ("eE", "e")],
    "digits": [("0123456789", "digits"), (".", "point"), ("eE", "e")],
    "point": [("0123456789", "fraction")],
    "fraction": [("0123456789", "fraction"), ("eE", "e")],
    "e": [("+-", "sign"), ("0123456789", "exponent")],
    "sign": [("0123456789", "exponent")],
    "exponent": [("0123456789", "exponent")],
}


@dataclass(frozen=True)
class _Number(_Item):
    """The remainder of a number."""

    state: str
    is_integer: bool

    @property
    def is_optional(self) -> bool:
        return self.state in ("zero", "digits", "fraction", "exponent")

    def step(self, char: str) -> Iterator[_Items]:
        for chars, state in _NUMBER[self.state]:
            if char in chars and not (self.is_integer and state in ("point", "e")):
                yield (_Number(state, self.is_integer),)


class _Property(NamedTuple):
    """A property of an object by a schema; ``key`` is its name as JSON."""

    key: str
    is_required: bool
    node: "_Node"


class _Node(_Item):
    """A value by a checked schema; equal only to itself, so that states are compared fast.

    Attributes:
        texts: the values of ``enum`` and ``const`` as JSON.
        types: names of JSON types.
        alternatives: nodes of ``anyOf`` and ``$ref``.
        properties: properties of an object, in their order.
        additional: node of other properties, or ``None``.
        items: node of array elements.
        min_items, max_items: limits of the number of array elements.
    """

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.types: list[str] = []
        self.alternatives: list[_Node] = []
        self.properties: list[_Property] = []
        self.additional: _Node | None = None
        self.items: _Node | None = None
        self.min_items = 0
        self.max_items: int | None = None

    def step(self, char: str) -> Iterator[_Items]:
        for text in self.texts:
            yield from _Text(text).step(char)
        for node in self.alternatives:
            yield from node.step(char)
        for name in self.types:
            if name == "object" and char == "{":
                yield (_Blank(), _Members(self, 0, True))  # the first member follows no comma
            elif name == "array" and char == "[":
                yield (_Blank(), _Elements(self, 0))
            elif name == "string" and char == '"':
                yield (_String(),)
            elif name in ("number", "integer"):
                yield from _Number("start", name == "integer").step(char)
            elif name == "boolean":
                yield from _Text("true").step(char)
                yield from _Text("false").step(char)
            elif name == "null":
                yield from _Text("null").step(char)


@dataclass(frozen=True)
class _Members(_Item):
    """An object after its brace, or after a member; ``start`` is the number of the next property."""

    node: _Node
    start: int
    is_first: bool

    def step(self, char: str) -> Iterator[_Items]:
        if char == "}":
            if not any(later.is_required for later in self.node.properties[self.start :]):
                yield ()
        elif self.is_first:
            yield from self.step_key(char)
        elif char == ",":
            yield (_Blank(), _Key(self))

    def step_key(self, char: str) -> Iterator[_Items]:
        """Yield the items after the quotation mark of a member's name, for each name that may come."""
        if char != '"':
            return
        for index in range(self.start, len(self.node.properties)):
            key, is_required, node = self.node.properties[index]
            after = _Members(self.node, index + 1, False)
            yield (_Text(key[1:]), _Blank(), _Text(":"), _Blank(), node, _Blank(), after)
            if is_required:  # later names would leave it out, because properties keep their order
                return
        if self.node.additional is not None:
            after = _Members(self.node, self.start, False)
            yield (_String(), _Blank(), _Text(":"), _Blank(), self.node.additional, _Blank(), after)


@dataclass(frozen=True)
class _Key(_Item):
    """A member after a comma."""

    members: _Members

    def step(self, char: str) -> Iterator[_Items]:
        yield from self.members.step_key(char)


@dataclass(frozen=True)
class _Elements(_Item):
    """An array after its bracket, or after an element."""

    node: _Node
    count: int

    def step(self, char: str) -> Iterator[_Items]:
        if char == "]":
            if self.count >= self.node.min_items:
                yield ()
        elif self.node.max_items is not None and self.count >= self.node.max_items:
            return
        elif self.count == 0:
            for items in self.node.items.step(char):
                yield (*items, _Blank(), self._next())
        elif char == ",":
            yield (_Blank(), self.node.items, _Blank(), self._next())

    def _next(self) -> "_Elements":
        # Beyond both bounds the number does not matter, and equal states share their allowed tokens.
        bound = max(self.node.min_items, self.node.max_items or 1)
        return _Elements(self.node, min(self.count + 1, bound))


def _push(item: _Item, stack: _Stack) -> _Stack:
    """Return the stack with an item on top."""
    size = 0
    if stack:
        _, _, size = stack
    return item, stack, size + 1


def _step(stacks: Iterable[_Stack], char: str) -> frozenset[_Stack]:
    """Return the stacks after ``char``; none if it cannot follow."""
    next_stacks = set()
    for stack in stacks:
        while stack:
            first, below, size = stack
            for items in first.step(char):
                if size + len(items) > _MAX_STACK:
                    continue
                next_stack = below
                for item in reversed(items):
                    next_stack = _push(item, next_stack)
                next_stacks.add(next_stack)
            if not first.is_optional:
                break
            stack = below  # the item may be empty, so that the character may belong to the next one
    return frozenset(next_stacks)


def _is_complete(stacks: Iterable[_Stack]) -> bool:
    """Return whether the text may end here."""
    for stack in stacks:
        while stack and stack[0].is_optional:
            stack = stack[1]
        if not stack:
            return True
    return False


class JSONGrammar:
    """The JSON texts that fit a schema.

    Objects have their properties in the order of the schema, and no others unless ``properties`` is missing. Supported
    are ``type``, ``enum``, ``const``, ``anyOf``, ``$ref`` to a path of the schema, ``properties``, ``required``,
    ``additionalProperties``, ``items``, ``minItems`` and ``maxItems``; notes such as ``title`` have no effect.

    Args:
        schema: JSON schema; by default any object.

    Raises:
        GenerationError: the schema is invalid or has something else, such as ``pattern``; the message says where.

    Example:
        >>> grammar = torchtune.generation.JSONGrammar({"enum": ["red", "blue"]})
        >>> grammar.accepts('"red"'), grammar.accepts('"green"')
        (True, False)
    """

    def __init__(self, schema: Any = None) -> None:
        if schema is None:
            schema = {"type": "object"}
        self._schema = schema
        self._nodes: dict[str, _Node] = {}  # by path in the schema, so that references may be recursive
        self._any_value = _Node()
        self._any_value.types = ["object", "array", "string", "number", "boolean", "null"]
        self._any_value.additional = self._any_value
        self._any_value.items = self._any_value
        root = self._node(self._schema, "#")
        self.start: frozenset[_Stack] = frozenset([_push(root, ())])
        self._check_references()

    def accepts(self, text: str) -> bool:
        """Return whether a text is JSON of the schema."""
        stacks = self.start
        for char in text:
            stacks = _step(stacks, char)
        return _is_complete(stacks)

    def _node(self, schema: Any, path: str) -> _Node:
        """Return the node of a schema at a path such as ``#/properties/name``."""
        if schema is True or schema == {}:  # JSON schema's ways to allow every value
            return self._any_value
        if path in self._nodes:
            return self._nodes[path]
        if not isinstance(schema, Mapping):
            raise GenerationError(f"{path} is {json.dumps(schema)[:40]}: a schema is an object.")
        if len(self._nodes) >= _MAX_NODES:
            raise GenerationError(f"the schema has more than {_MAX_NODES:,} parts: shorten it.")
        for name in schema:
            if name not in _VALUE_KEYWORDS + _PART_KEYWORDS + _ANNOTATIONS:
                raise GenerationError(f"{path} has '{name}', which is not supported: leave it out.")
        for keyword, keywords_beside in _KEYWORDS_BESIDE.items():
            if keyword in schema:
                for name in schema:
                    if name not in (keyword, *keywords_beside, *_ANNOTATIONS):
                        raise GenerationError(
                            f"{path} has '{name}' beside '{keyword}', which is not supported: leave it out."
                        )
                break  # a later one of these keywords is allowed here only as one beside the first
        node = _Node()
        self._nodes[path] = node  # before the nodes in it, which may refer to it
        if "$ref" in schema:
            node.alternatives = [self._referenced_node(schema["$ref"], path)]
        elif "anyOf" in schema:
            options = _checked(schema["anyOf"], list, f"{path}/anyOf")
            for index, option in enumerate(options):
                node.alternatives.append(self._node(option, f"{path}/anyOf/{index}"))
        elif "enum" in schema or "const" in schema:
            for value in _values(schema, path):
                node.texts.append(json.dumps(value, ensure_ascii=False))
                node.texts.append(json.dumps(value))  # for characters that no token has
        else:
            self._add_types(node, schema, path)
        if not (node.texts or node.types or node.alternatives):
            raise GenerationError(f"{path} allows no value: add one.")
        return node

    def _referenced_node(self, reference: Any, path: str) -> _Node:
        """Return the node that the ``$ref`` of the schema at a path points to."""
        schema: Any = self._schema
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise GenerationError(f"{path}/$ref is {json.dumps(reference)[:80]}: it must begin with #.")
        if reference != "#" and not reference.startswith("#/"):
            raise GenerationError(
                f"{path}/$ref is {json.dumps(reference)[:80]}: it names an anchor, which is not supported: give the "
                "path from the root, such as #/$defs/name."
            )
        for part in unquote(reference[1:]).split("/")[1:]:  # the part after # of a URI has percent-escapes
            key = part.replace("~1", "/").replace("~0", "~")  # the escapes of JSON pointers (RFC 6901)
            if isinstance(schema, Mapping) and key in schema:
                schema = schema[key]
            elif isinstance(schema, list) and key in map(str, range(len(schema))):  # of anyOf
                schema = schema[int(key)]
            else:
                raise GenerationError(f"{path}/$ref: the schema has no {reference[:80]}.")
        return self._node(schema, reference)

    def _check_references(self) -> None:
        """Raise if references and alternatives lead back to their node before any character.

        A depth-first search without recursion, because a schema may be deeper than Python's stack.
        """
        checked: set[int] = set()
        for path, start in self._nodes.items():
            ancestors: set[int] = set()
            waiting = [(start, False)]
            while waiting:
                node, is_left = waiting.pop()
                if is_left:
                    ancestors.discard(id(node))
                    checked.add(id(node))
                elif id(node) in ancestors:
                    raise GenerationError(f"{path} refers to itself without a value between: give it one.")
                elif id(node) not in checked:
                    ancestors.add(id(node))
                    waiting.append((node, True))
                    waiting += [(alternative, False) for alternative in node.alternatives]

    def _add_types(self, node: _Node, schema: Mapping[str, Any], path: str) -> None:
        """Set the types of a node and what they need: properties, elements, and the number of elements."""
        node.types = _types(schema, path)
        properties = _checked(schema.get("properties", {}), Mapping, f"{path}/properties")
        required = _checked(schema.get("required", []), list, f"{path}/required")
        for name in required:
            if name not in properties:
                raise GenerationError(f"{path}/required has {json.dumps(name)[:40]}: it must be among properties.")
        for name, property_schema in properties.items():
            key = json.dumps(name, ensure_ascii=False)
            # The escapes of JSON pointers, so that no two parts of a schema have one path.
            escaped = name.replace("~", "~0").replace("/", "~1")
            property_node = self._node(property_schema, f"{path}/properties/{escaped}")
            node.properties.append(_Property(key, name in required, property_node))
        # Without properties, a schema allows any; with properties, only these.
        additional = schema.get("additionalProperties", not properties)
        if additional is not False:
            if properties:
                raise GenerationError(
                    f"{path}/additionalProperties beside properties is not supported: set it to false."
                )
            node.additional = self._node(additional, f"{path}/additionalProperties")
        node.items = self._node(schema.get("items", True), f"{path}/items")
        node.min_items = _checked(schema.get("minItems", 0), int, f"{path}/minItems")
        if "maxItems" in schema:
            node.max_items = _checked(schema["maxItems"], int, f"{path}/maxItems")
        if node.max_items is not None and node.max_items < node.min_items:
            raise GenerationError(f"{path}/maxItems is {node.max_items}, below minItems {node.min_items}: raise it.")


def _types(schema: Mapping[str, Any], path: str) -> list[str]:
    """Return the names of the types that a schema at a path allows."""
    types = schema.get("type")
    if types is None:
        if "properties" in schema:
            types = "object"
        elif "items" in schema:
            types = "array"
        else:
            types = list(_TYPES)
    if isinstance(types, str):
        types = [types]
    for name in _checked(types, list, f"{path}/type"):
        if name not in _TYPES:
            raise GenerationError(f"{path}/type is {json.dumps(name)[:40]}: use one of {', '.join(_TYPES)}.")
    return types


def _values(schema: Mapping[str, Any], path: str) -> list[Any]:
    """Return the values of ``enum`` and ``const`` that have the type of the schema at a path."""
    if "enum" in schema:
        values = _checked(schema["enum"], list, f"{path}/enum")
        if "const" in schema:  # as JSON, because in Python 1 equals true
            const = json.dumps(schema["const"], sort_keys=True)
            values = [value for value in values if json.dumps(value, sort_keys=True) == const]
    else:
        values = [schema["const"]]
    types = _types(schema, path)
    values_of_types = []
    for value in values:
        if any(_has_type(value, name) for name in types):
            values_of_types.append(value)
    return values_of_types


def _has_type(value: Any, name: str) -> bool:
    """Return whether a value is of the JSON type ``name``."""
    if isinstance(value, bool):  # before numbers, which bools are in Python
        return name == "boolean"
    if isinstance(value, float):
        return name == "number" or (name == "integer" and value.is_integer())
    if isinstance(value, int):
        return name in ("number", "integer")
    classes = {"object": Mapping, "array": (list, tuple), "string": str, "null": type(None)}
    return name in classes and isinstance(value, classes[name])


def _checked(value: Any, kind: type, path: str) -> Any:
    """Return a value of the schema at a path; raise if it is of another kind."""
    if not isinstance(value, kind) or isinstance(value, bool):
        names = {list: "a list", Mapping: "an object", int: "an integer"}
        raise GenerationError(f"{path} is {json.dumps(value)[:40]}: it must be {names[kind]}.")
    return value


class TokenDecoder:
    """Decodes single tokens as they are inside of a text: alone, some tokenizers drop a token's space.

    Args:
        tokenizer: has ``encode`` and ``decode``.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._prefix = tokenizer.encode("a", add_bos=False, add_eos=False)
        self._prefix_length = len(tokenizer.decode(self._prefix))

    def __call__(self, token: int) -> str:
        """Return the text of a token; empty for a special token."""
        return self._tokenizer.decode([*self._prefix, token])[self._prefix_length :]


class TokenTexts:
    """The texts of a tokenizer's tokens, sorted, so that those with an impossible beginning are skipped together.

    Args:
        tokenizer: has ``encode``, ``decode``, ``vocab_size`` and ``stop_tokens``.

    Raises:
        GenerationError: a printable ASCII character is not a token, so that some JSON cannot be written.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.stop_tokens = list(tokenizer.stop_tokens)
        decode = TokenDecoder(tokenizer)
        self.texts = [decode(token) for token in range(tokenizer.vocab_size)]
        all_texts = set(self.texts)
        for char in map(chr, range(32, 127)):
            if char not in all_texts:
                raise GenerationError(f"The tokenizer has no token for {char!r} alone: JSON cannot be ensured.")
        order = sorted(range(len(self.texts)), key=self.texts.__getitem__)
        self._tokens = [token for token in order if self.texts[token]]  # special tokens have no text
        self._token_texts = [self.texts[token] for token in self._tokens]
        # Within a string, most tokens are allowed without asking the grammar; only those with a quotation mark, a
        # backslash or a control character may end or break it.
        self._string_tokens: list[int] = []
        self._mark_tokens: list[int] = []
        for token, text in zip(self._tokens, self._token_texts, strict=True):
            is_plain = all(char >= " " and char not in '"\\' for char in text)
            if is_plain:
                self._string_tokens.append(token)
            else:
                self._mark_tokens.append(token)
        self._mark_texts = [self.texts[token] for token in self._mark_tokens]
        self._allowed: dict[frozenset[_Stack], Tensor] = {}

    def allowed(self, stacks: frozenset[_Stack]) -> Tensor:
        """Return the tokens that may follow, int64 ``[n]``."""
        if stacks in self._allowed:
            return self._allowed[stacks]
        tokens: list[int] = []
        if _is_complete(stacks):
            tokens += self.stop_tokens
        if any(stack and isinstance(stack[0], _String) for stack in stacks):
            tokens += self._string_tokens
            tokens += _accepted(stacks, self._mark_tokens, self._mark_texts)
        else:
            tokens += _accepted(stacks, self._tokens, self._token_texts)
        if len(self._allowed) >= _MAX_STATES:
            self._allowed.clear()
        self._allowed[stacks] = torch.tensor(tokens, dtype=torch.int64)
        return self._allowed[stacks]


def _accepted(stacks: frozenset[_Stack], tokens: Sequence[int], texts: Sequence[str]) -> Iterator[int]:
    """Yield the tokens whose texts the grammar accepts; ``texts`` are sorted."""
    states = [stacks]  # stacks after each character of the previous text, as far as the grammar accepts it
    previous = ""
    index = 0
    while index < len(texts):
        text = texts[index]
        # Sorted texts share beginnings: only the characters after the common one are new.
        shared = 0
        longest = min(len(states) - 1, len(text))
        while shared < longest and text[shared] == previous[shared]:
            shared += 1
        del states[shared + 1 :]
        while len(states) <= len(text):
            next_stacks = _step(states[-1], text[len(states) - 1])
            if not next_stacks:
                break
            states.append(next_stacks)
        previous = text
        if len(states) > len(text):
            yield tokens[index]
            index += 1
        else:  # all texts with this beginning are impossible: skip to the first text that sorts after them
            impossible = text[: len(states)]
            next_char = chr(min(ord(impossible[-1]) + 1, 0x10FFFF))  # the last code point has no successor
            successor = impossible[:-1] + next_char
            index = max(bisect_left(texts, successor, index), index + 1)


class JSONFilter:
    """Logits processor of one sequence: only tokens that keep its answer valid JSON of a grammar.

    An answer that reaches its maximum length is cut, and then incomplete.

    Args:
        texts: texts of the tokens.
        grammar: grammar of the answer.
        prompt_length: number of tokens before the answer.
    """

    def __init__(self, texts: TokenTexts, grammar: JSONGrammar, prompt_length: int) -> None:
        self._texts = texts
        self._stacks = grammar.start
        self._length = prompt_length  # number of tokens that need not be read any more

    def __call__(self, tokens: Tensor, logits: Tensor) -> Tensor:
        """Return the logits ``[1, v]`` after ``tokens`` ``[1, s]``, -inf for tokens that are not allowed."""
        for token in tokens[0, self._length :].tolist():
            for char in self._texts.texts[token]:
                self._stacks = _step(self._stacks, char)
        self._length = tokens.shape[1]
        allowed = self._texts.allowed(self._stacks).to(logits.device)  # [n]
        filtered = torch.full_like(logits, float("-inf"))
        return filtered.index_copy_(1, allowed, logits[:, allowed])
