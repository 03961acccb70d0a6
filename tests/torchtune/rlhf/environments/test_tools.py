"""Tools: their definitions, and calls that models write: right ones, broken ones, and the reply to these."""

import re
from typing import Any, Literal

import pytest

from torchtune.rlhf import RolloutError
from torchtune.rlhf.environments import CallError, ToolCall, check_call, parameters_of, parse_calls, tools_of


class Shop:
    """An environment with all kinds of arguments."""

    def reset(self, **row: Any) -> None:
        """Begin."""

    def get_reward(self) -> float:
        """No tool."""
        return 0.0

    def _hidden(self) -> None:
        """No tool either."""

    def buy(self, item: str, count: int = 1, size: Literal["s", "m"] = "s", gift: bool | None = None) -> str:
        """Buy an item of the shop,
        which is delivered.

        Args:
            item: name of the item,
                as it is listed.
            count: how many.

        Returns:
            The bill.
        """

    def rate(self, items: list[str], stars: float, more: dict) -> str:
        """Rate items."""


TOOLS = tools_of(Shop())
SCHEMAS = parameters_of(TOOLS)


def test_methods_are_described_by_hints_and_docstrings():
    assert [tool["function"]["name"] for tool in TOOLS] == ["buy", "rate"]
    assert TOOLS[0]["function"]["description"] == "Buy an item of the shop, which is delivered."
    assert SCHEMAS["buy"] == {
        "type": "object",
        "properties": {
            "item": {"type": "string", "description": "name of the item, as it is listed."},
            "count": {"type": "integer", "description": "how many."},
            "size": {"type": "string", "enum": ["s", "m"]},
            "gift": {"type": "boolean", "nullable": True},
        },
        "required": ["item"],
    }
    assert SCHEMAS["rate"]["properties"]["items"] == {"type": "array", "items": {"type": "string"}}


def test_schemas_are_those_of_transformers():
    from transformers.utils import get_json_schema

    expected = get_json_schema(Described().look)["function"]
    expected.pop("return", None)
    assert tools_of(Described())[0]["function"] == expected


class Described:
    def look(self, city: str, days: int, scale: float = 1.0, names: list[str] | None = None) -> str:
        """Look up the weather.

        Args:
            city: The city.
            days: How many days.
            scale: A factor.
            names: More names.
        """


def test_explicit_tools_are_used_and_methods_without_description_refused():
    class Explicit:
        def tools(self) -> list[dict]:
            return TOOLS

    class Bare:
        def look(self, city): ...

    class Unhinted:
        def look(self, city):
            """Look."""

    assert tools_of(Explicit()) == TOOLS
    with pytest.raises(RolloutError, match=r"Bare.look has no docstring"):
        tools_of(Bare())
    with pytest.raises(RolloutError, match=r"Unhinted.look has no type hint for 'city'"):
        tools_of(Unhinted())


BUY = ToolCall("buy", {"item": 'a "b"', "count": 2})
JSON = '{"name": "buy", "arguments": {"item": "a \\"b\\"", "count": 2}}'


@pytest.mark.parametrize(
    ("tool_format", "text", "expected"),
    [
        ("hermes", f"<think>I <tool_call>{{</tool_call></think>\n<tool_call>\n{JSON}\n</tool_call><|im_end|>", [BUY]),
        ("hermes", f"So: <tool_call>{JSON}</tool_call>\n<tool_call>{JSON}</tool_call>", [BUY, BUY]),
        ("hermes", "It is 7.<|im_end|>", []),
        (
            "hermes",
            '<tool_call>{"name": "buy", "arguments": "{\\"item\\": \\"x\\"}"}</tool_call>',
            [ToolCall("buy", {"item": "x"})],
        ),
        (
            "qwen_xml",
            '<tool_call>\n<function=buy>\n<parameter=item>\na "b"\n</parameter>\n<parameter=count>\n2\n</parameter>\n'
            "</function>\n</tool_call>",
            [BUY],
        ),
        (
            "qwen_xml",
            '<tool_call><function=rate><parameter=items>["a"]</parameter><parameter=stars>1.5</parameter>'
            "<parameter=more>{}</parameter></function></tool_call>",
            [ToolCall("rate", {"items": ["a"], "stars": 1.5, "more": {}})],
        ),
        ("llama3", JSON.replace("arguments", "parameters") + "<|eot_id|>", [BUY]),
        ("llama3", f"<|python_tag|>{JSON}; {JSON}<|eom_id|>", [BUY, BUY]),
        ("llama3", '{"answer": 3}', []),
        ("mistral", f"[TOOL_CALLS] [{JSON}, {JSON}]</s>", [BUY, BUY]),
        ("mistral", '[TOOL_CALLS]buy[CALL_ID]abc[ARGS]{"item": "a \\"b\\"", "count": 2}</s>', [BUY]),
        (
            "harmony",
            "<|channel|>analysis<|message|>Ask to=functions.sell<|end|><|start|>assistant<|channel|>commentary "
            'to=functions.buy <|constrain|>json<|message|>{"item": "a \\"b\\"", "count": 2}<|call|>',
            [BUY],
        ),
        ("harmony", "<|channel|>final<|message|>It is 7.<|return|>", []),
        ("gemma4", '<|tool_call>call:buy{item:<|"|>a "b"<|"|>,count:2}<tool_call|>', [BUY]),
        (
            "gemma4",
            '<|tool_call>call:rate{items:[<|"|>a, b: {<|"|>],stars:1.5,more:{x:true}}<tool_call|>',
            [ToolCall("rate", {"items": ["a, b: {"], "stars": 1.5, "more": {"x": True}})],
        ),
    ],
)
def test_calls_are_parsed_in_every_format(tool_format, text, expected):
    assert parse_calls(text, tool_format, SCHEMAS) == expected


@pytest.mark.parametrize(
    ("tool_format", "text", "said"),
    [
        ("hermes", "<tool_call>{", "has no </tool_call>"),
        ("hermes", "<tool_call>{'name': 1}</tool_call>", "is not valid JSON"),
        ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>", "is not valid JSON"),
        ("hermes", "<tool_call>[]</tool_call>", "must be a JSON object with 'name'"),
        ("hermes", '<tool_call>{"name": "buy", "arguments": [1]}</tool_call>', "'arguments' of the tool call must be"),
        ("hermes", '<tool_call>{"name": "buy", "arguments": {"n": NaN}}</tool_call>', "is not valid JSON: it has NaN"),
        ("qwen_xml", "<tool_call>buy(1)</tool_call>", "must be <function=NAME>"),
        ("qwen_xml", "<tool_call><function=buy>item=x</function></tool_call>", "must be <parameter=NAME>"),
        ("llama3", '{"name": "buy", ', "is not valid JSON"),
        ("llama3", '{"name": "buy", "parameters": 3}', "'parameters' of the tool call must be"),
        ("mistral", "[TOOL_CALLS] buy", "is not valid JSON"),
        ("harmony", "<|channel|>commentary to=functions.buy<|message|>{<|call|>", "is not valid JSON"),
        ("gemma4", "<|tool_call>buy{}<tool_call|>", "must be call:NAME"),
        ("gemma4", "<|tool_call>call:buy{item:bare word}<tool_call|>", "is not valid JSON"),
    ],
)
def test_an_invalid_call_is_explained_to_the_model(tool_format, text, said):
    with pytest.raises(CallError, match=said):
        parse_calls(text, tool_format, SCHEMAS)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (ToolCall("buy", {"item": "x", "gift": None}), None),
        (ToolCall("rate", {"items": [], "stars": 2, "more": {}}), None),
        (ToolCall("sell", {}), "there is no tool 'sell', the tools are buy, rate"),
        (ToolCall("buy", {}), "needs the argument 'item'"),
        (ToolCall("buy", {"item": "x", "price": 1}), "has no argument 'price', its arguments are item, count"),
        (ToolCall("buy", {"item": 3}), "'item' of the tool 'buy' must be string, not 3"),
        (ToolCall("buy", {"item": "x", "count": True}), "'count' of the tool 'buy' must be integer, not true"),
        (ToolCall("buy", {"item": "x", "size": "l"}), r"must be \['s', 'm'\]"),
        (ToolCall("buy", {"item": "x", "count": None}), "must be integer, not null"),
    ],
)
def test_arguments_are_checked_before_a_tool_runs(call, said):
    error = check_call(call, SCHEMAS)
    if said is None:
        assert error is None
    else:
        assert re.search(said, error)
