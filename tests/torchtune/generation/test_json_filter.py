"""JSON by a schema: what RFC 8259 and JSON Schema accept, and which tokens may come next."""

import json

import jsonschema
import pytest

from torchtune.generation import GenerationError, JSONGrammar, TokenTexts
from torchtune.generation._json_filter import _step


class Tokens:
    """A tokenizer of given texts; the last token ends an answer."""

    def __init__(self, texts):
        self.texts = [*map(chr, range(32, 127)), *texts, ""]
        self.vocab_size = len(self.texts)
        self.stop_tokens = [self.vocab_size - 1]

    def encode(self, text, add_bos=True, add_eos=True):
        return [self.texts.index(char) for char in text]

    def decode(self, ids, skip_special_tokens=True):
        return "".join(self.texts[token] for token in ids)


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        '{"a": 1}',
        ' {"a":1}'.strip(),
        '{"a":[1,2.5e-3,-0,{"b":null},[]],"c":"x\\u00e9\\n\\\\","":true}',
        '{\n  "é": "🙂"\n}',
        '{"a": 0.5E+10}',
    ],
)
def test_json_objects_are_accepted(text):
    assert isinstance(json.loads(text), dict)
    assert JSONGrammar().accepts(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "1",
        "{",
        '{"a":01}',
        '{"a":1,}',
        '{"a" 1}',
        "{a:1}",
        "{'a':1}",
        '{"a":"\n"}',
        '{"a":"\\x"}',
        '{"a":"\\u00g0"}',
        '{"a":1}x',
        '{"a":tru}',
        '{"a":1.}',
        '{"a":-}',
        '{"a":1e}',
        '{"a":NaN}',
        '{"a":[1,]}',
        '{"a":[,1]}',
        '{"a"::1}',
    ],
)
def test_texts_that_are_not_a_json_object_are_refused(text):
    assert not JSONGrammar().accepts(text)


ORDER = {
    "type": "object",
    "title": "an order",
    "properties": {
        "count": {"type": "integer"},
        "drinks": {"type": "array", "items": {"enum": ["tea", "coffee"]}, "minItems": 1, "maxItems": 2},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "next": {"$ref": "#"},
    },
    "required": ["count", "drinks"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("text", "is_valid"),
    [
        ('{"count": 2, "drinks": ["tea"]}', True),
        ('{"count": -2, "drinks": ["tea", "coffee"], "note": null}', True),
        ('{"count": 2, "drinks": ["tea"], "note": "hot", "next": {"count": 0, "drinks": ["tea"]}}', True),
        ('{"count": 2.5, "drinks": ["tea"]}', False),
        ('{"count": 2e3, "drinks": ["tea"]}', False),
        ('{"count": 2}', False),
        ('{"count": 2, "drinks": []}', False),
        ('{"count": 2, "drinks": ["tea", "tea", "tea"]}', False),
        ('{"count": 2, "drinks": ["milk"]}', False),
        ('{"count": 2, "drinks": ["tea"], "note": 5}', False),
        ('{"count": 2, "drinks": ["tea"], "size": 5}', False),
        ('{"count": 2, "count": 2, "drinks": ["tea"]}', False),
        ('{"drinks": ["tea"], "count": 2}', False),  # the order of the schema
        ("{}", False),
    ],
)
def test_texts_are_accepted_as_the_schema_says(text, is_valid):
    assert JSONGrammar(ORDER).accepts(text) is is_valid


def test_const_enum_union_and_recursive_schemas_are_understood():
    assert JSONGrammar({"const": {"a": 1}}).accepts('{"a": 1}')
    assert JSONGrammar({"enum": ["ß", 1]}).accepts('"\\u00df"')
    assert JSONGrammar({"enum": ["ß", 1]}).accepts('"ß"')
    assert JSONGrammar({"type": ["number", "null"]}).accepts("-1.5e3")
    assert JSONGrammar({"type": "object", "additionalProperties": {"type": "integer"}}).accepts('{"a": 1, "b": 2}')
    assert not JSONGrammar({"type": "object", "additionalProperties": {"type": "integer"}}).accepts('{"a": "b"}')
    tree = {"$ref": "#/$defs/tree", "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}}
    assert JSONGrammar(tree).accepts("[[], [[]]]")
    assert not JSONGrammar(tree).accepts("[1]")
    assert JSONGrammar({}).accepts('["anything", 1]')


def test_properties_whose_names_look_like_paths_keep_their_schemas():
    nested = {"type": "object", "properties": {"b": {"type": "integer"}, "c/d": {"type": "null"}}}
    reference = {"$ref": "#/properties/a/properties/c~1d"}
    schema = {"properties": {"a": nested, "a/properties/b": {"type": "string"}, "a~1": reference, "a/": {"const": 1}}}
    grammar = JSONGrammar(schema)
    assert grammar.accepts('{"a": {"b": 1}, "a/properties/b": "x", "a~1": null, "a/": 1}')
    assert not grammar.accepts('{"a/properties/b": 1}')
    assert not grammar.accepts('{"a/": null}')


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#/anyOf/0"}}]},
        {"type": "array", "items": {"$ref": "#/$defs/no%20%C3%A4"}, "$defs": {"no ä": {"type": "null"}}},
    ],
)
def test_references_point_into_lists_and_to_escaped_names(schema):
    for text in ("[null]", "[1]"):
        is_valid = jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
        assert JSONGrammar(schema).accepts(text) is is_valid
    assert JSONGrammar(schema).accepts("[null]")


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"type": "integer", "enum": [1, "a", True, 2.0]}, ["1", "2.0"], ['"a"', "true"]),
        ({"type": "number", "enum": [1, 1.5, False]}, ["1", "1.5"], ["false"]),
        ({"type": ["string", "null"], "enum": ["a", None, []], "default": None}, ['"a"', "null"], ["[]"]),
        ({"type": "string", "enum": ["celsius", "kelvin"], "description": "unit"}, ['"kelvin"'], ['"a"']),
        ({"const": "a", "enum": ["a"], "type": "string", "title": "Kind"}, ['"a"'], ['"b"']),
        ({"const": 1, "enum": [True, 1]}, ["1"], ["true"]),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None, "title": "X"}, ["1", "null"], ['"a"']),
        ({"$ref": "#/$defs/X", "description": "an x", "$defs": {"X": {"type": "boolean"}}}, ["true"], ["1"]),
    ],
)
def test_all_keywords_of_a_value_hold(schema, valid, invalid):
    grammar = JSONGrammar(schema)
    assert [grammar.accepts(text) for text in valid] == [True] * len(valid)
    assert [grammar.accepts(text) for text in invalid] == [False] * len(invalid)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (
            {"$ref": "#/$defs/X", "type": "string", "$defs": {"X": {}}},
            r"# has 'type' beside '\$ref', which is not supp",
        ),
        ({"anyOf": [{"type": "null"}], "properties": {"a": {}}}, "# has 'properties' beside 'anyOf'"),
        ({"items": {"anyOf": [{}], "enum": [1]}}, "#/items has 'enum' beside 'anyOf'"),
        ({"enum": [{}], "required": ["a"]}, "# has 'required' beside 'enum'"),
        ({"type": "integer", "const": "a"}, "# allows no value"),
        ({"type": "string", "pattern": "a+"}, "# has 'pattern', which is not supported"),
        ({"properties": {"a": {"minimum": 0}}}, "#/properties/a has 'minimum'"),
        ({"type": "text"}, '#/type is "text": use one of object, array'),
        ({"type": "object", "properties": 5}, "#/properties is 5: it must be an object"),
        ({"required": ["a"]}, '#/required has "a": it must be among properties'),
        ({"properties": {"a": {}}, "additionalProperties": True}, "set it to false"),
        ({"$ref": "#/$defs/a"}, "the schema has no #/\\$defs/a"),
        ({"anyOf": [{"type": "null"}, {"$ref": "#/anyOf/-1"}]}, "the schema has no #/anyOf/-1"),
        ({"$ref": "https://example.com"}, "it must begin with #"),
        (
            {"items": {"$ref": "#name"}, "$defs": {"X": {"$anchor": "name", "type": "null"}}},
            r'#/items/\$ref is "#name": it names an anchor, which is not supported',
        ),
        ({"$ref": "#name/$defs/X", "$defs": {"X": {"type": "null"}}}, "names an anchor, which is not supported"),
        ({"$ref": "#"}, "refers to itself without a value between"),
        ({"anyOf": [{"type": "null"}, {"$ref": "#"}]}, "refers to itself without a value between"),
        ({"enum": []}, "# allows no value"),
        ({"type": "array", "minItems": 3, "maxItems": 2}, "maxItems is 2, below minItems 3"),
        ({"items": 3}, "#/items is 3: a schema is an object"),
    ],
)
def test_unsupported_keyword_of_a_schema_is_named(schema, message):
    with pytest.raises(GenerationError, match=message):
        JSONGrammar(schema)


def test_allowed_tokens_are_those_whose_text_may_follow():
    texts = ['{"', '":', '"}', "}}", " {", "tea", "t\ufffd", "\n", '", "', "ab", "12", "1a"]
    tokenizer = Tokens(texts)
    vocabulary = TokenTexts(tokenizer)
    end = tokenizer.stop_tokens[0]
    for beginning in (
        "",
        "{",
        '{"',
        '{"a',
        '{"a\\',
        '{"a"',
        '{"a":',
        '{"a": 1',
        '{"a": {"b": "',
        '{"a": {}',
        '{"a": {}}',
    ):
        stacks = JSONGrammar().start
        for char in beginning:
            stacks = _step(stacks, char)
        expected = set()
        for token, text in enumerate(tokenizer.texts[:-1]):
            after = stacks
            for char in text:
                after = _step(after, char)
            if after:
                expected.add(token)
        if beginning == '{"a": {}}':
            expected = {end}
        assert set(vocabulary.allowed(stacks).tolist()) == expected, beginning
        assert expected


def test_a_vocabulary_that_cannot_write_json_is_refused():
    tokenizer = Tokens([])
    tokenizer.texts[tokenizer.texts.index("{")] = "x"
    with pytest.raises(GenerationError, match=r"no token for '\{' alone"):
        TokenTexts(tokenizer)


def test_nesting_has_a_limit():
    grammar = JSONGrammar({})
    assert grammar.accepts("[" * 100 + "]" * 100)
    assert not grammar.accepts("[" * 100_000 + "]" * 100_000)
