# ruff: noqa: E501  (templates stand as checkpoints have them)
"""Mistral's layouts with control tokens for turns and tools, each with its truth.

The third version writes the system's text into the last user turn, the seventh as a turn of its own. Files of
SentencePiece put a space behind control tokens, Tekken files do not.
"""

import json
from collections.abc import Callable
from typing import Any

from tests.torchtune.tokenizers.chat_case import Pieces, Turns, assistant

CONTROL = [
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
]  # fmt: skip

_HEAD = """{%- set ns = namespace(last_user=-1) %}
{%- if messages[0]["role"] == "system" %}{%- set system_message = messages[0]["content"] %}{%- set loop_messages = messages[1:] %}{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- for message in loop_messages %}{%- if message["role"] == "user" %}{%- set ns.last_user = loop.index0 %}{%- endif %}{%- endfor %}
{{- bos_token }}
"""
_CALLS = """{%- elif message["role"] == "assistant" and message["tool_calls"] %}
{{- "[TOOL_CALLS]SPACE[" }}
{%- for tool_call in message["tool_calls"] %}
{{- '{"name": ' + (tool_call["function"]["name"] | tojson) + ', "arguments": ' + (tool_call["function"]["arguments"] | tojson) + ', "id": ' + (tool_call["id"] | tojson) + "}" }}
{%- if not loop.last %}{{- ", " }}{%- endif %}
{%- endfor %}
{{- "]" + eos_token }}
{%- elif message["role"] == "assistant" %}
{{- "SPACE" + message["content"] + eos_token }}
"""
_V3 = (
    _HEAD
    + """{%- for message in loop_messages %}
{%- if message["role"] == "user" %}
{%- if tools and loop.index0 == ns.last_user %}{{- "[AVAILABLE_TOOLS]SPACE" + (tools | tojson) + "[/AVAILABLE_TOOLS]" }}{%- endif %}
{{- "[INST]SPACE" }}
{%- if system_message is defined and loop.index0 == ns.last_user %}{{- system_message + "\n\n" }}{%- endif %}
{{- message["content"] + "[/INST]" }}
"""
    + _CALLS
    + """{%- elif message["role"] == "tool" %}
{{- '[TOOL_RESULTS]SPACE{"content": ' + CONTENT + ', "call_id": ' + (message["tool_call_id"] | tojson) + "}[/TOOL_RESULTS]" }}
{%- endif %}
{%- endfor %}"""
)
_TEXT = '(message["content"] | tojson)'
_PARSED = f"""(message["content"] if message["content"] == '{{"sun": true}}' else {_TEXT})"""  # JSON is no text
V3_TEKKEN = _V3.replace("SPACE", "").replace("CONTENT", _TEXT)
V3_PARSED, V3_TEKKEN_PARSED = (_V3.replace("SPACE", space).replace("CONTENT", _PARSED) for space in (" ", ""))
V7_TEKKEN = (
    _HEAD
    + """{%- if system_message is defined %}{{- "[SYSTEM_PROMPT]" + system_message + "[/SYSTEM_PROMPT]" }}{%- endif %}
{%- for message in loop_messages %}
{%- if message["role"] == "user" %}
{%- if tools and loop.index0 == ns.last_user %}{{- "[AVAILABLE_TOOLS]" + (tools | tojson) + "[/AVAILABLE_TOOLS]" }}{%- endif %}
{{- "[INST]" + message["content"] + "[/INST]" }}
"""
    + _CALLS.replace("SPACE", "")
    + """{%- elif message["role"] == "tool" %}
{{- "[TOOL_RESULTS]" + message["tool_call_id"] + "[TOOL_CONTENT]" + message["content"] + "[/TOOL_RESULTS]" }}
{%- endif %}
{%- endfor %}"""
)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _called(turn: dict[str, Any], space: str) -> str:
    calls = [
        {"name": call["function"]["name"], "arguments": call["function"]["arguments"], "id": call["id"]}
        for call in turn["tool_calls"]
    ]
    return f"[TOOL_CALLS]{space}{_json(calls)}</s>"


def _shown(tools: list[Any] | None, space: str) -> str:
    return f"[AVAILABLE_TOOLS]{space}{_json(tools)}[/AVAILABLE_TOOLS]" if tools else ""


def v3(space: str, *, parsed: bool = False) -> Callable[..., Pieces]:
    def truth(turns: Turns, tools: list[Any] | None = None) -> Pieces:
        pieces: Pieces = [("<s>", False)]
        system = turns[0]["content"] + "\n\n" if turns[0]["role"] == "system" else ""
        last = max(i for i, turn in enumerate(turns) if turn["role"] == "user")
        for i, turn in enumerate(turns):
            if turn["role"] == "user":
                before = _shown(tools, space) if i == last else ""
                pieces.append((f"{before}[INST]{space}{system if i == last else ''}{turn['content']}[/INST]", False))
            elif turn.get("tool_calls"):
                pieces.append((_called(turn, space), True))
            elif assistant(turn):
                pieces.append((f"{space}{turn['content']}</s>", True))
            elif turn["role"] == "tool":
                content = turn["content"]
                content = json.loads(content) if parsed and content == '{"sun": true}' else content
                result = _json({"content": content, "call_id": turn["tool_call_id"]})
                pieces.append((f"[TOOL_RESULTS]{space}{result}[/TOOL_RESULTS]", False))
        return pieces

    return truth


def v7_tekken(turns: Turns, tools: list[Any] | None = None) -> Pieces:
    pieces: Pieces = [("<s>", False)]
    last = max(i for i, turn in enumerate(turns) if turn["role"] == "user")
    for i, turn in enumerate(turns):
        text = turn["content"]
        if turn["role"] == "system":
            pieces.append((f"[SYSTEM_PROMPT]{text}[/SYSTEM_PROMPT]", False))
        elif turn["role"] == "user":
            pieces.append((f"{_shown(tools, '') if i == last else ''}[INST]{text}[/INST]", False))
        elif turn["role"] == "tool":
            pieces.append((f"[TOOL_RESULTS]{turn['tool_call_id']}[TOOL_CONTENT]{text}[/TOOL_RESULTS]", False))
        else:
            pieces.append((_called(turn, "") if turn.get("tool_calls") else f"{text}</s>", True))
    return pieces
