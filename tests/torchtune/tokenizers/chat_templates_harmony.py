# ruff: noqa: E501  (templates stand as checkpoints have them)
"""The layout of gpt-oss, whose turns have channels, with its truth.

Reasoning is written to the channel "analysis", answers to "final", calls of tools to "commentary". The last answer
ends with ``<|return|>``, earlier ones with ``<|end|>``, calls with ``<|call|>``. The reasoning before an answer that
is not the last is dropped, that before a call is kept until an answer follows.
"""

import json
from typing import Any

from tests.torchtune.tokenizers.chat_case import Pieces, Turns, assistant

CONTROL = [
    "<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>",
    "<|message|>", "<|call|>",
]  # fmt: skip
SYSTEM = (
    "You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06\n"
    "Current date: 2025-06-28\n\nReasoning: low\n\n"
    "# Valid channels: analysis, commentary, final. Channel must be included for every message."
)
CHANNEL_OF_TOOLS = "\nCalls to these tools must go to the commentary channel: 'functions'."

HARMONY = """{{- "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06\nCurrent date: " + current_date + "\n\nReasoning: " + (reasoning_effort or "medium") + "\n\n# Valid channels: analysis, commentary, final. Channel must be included for every message." }}
{%- if tools %}{{- "\nCalls to these tools must go to the commentary channel: 'functions'." }}{%- endif %}
{{- "<|end|>" }}
{%- if messages[0].role == "developer" or messages[0].role == "system" %}
{%- set developer_message = messages[0].content %}
{%- set loop_messages = messages[1:] %}
{%- else %}
{%- set developer_message = "" %}
{%- set loop_messages = messages %}
{%- endif %}
{%- if developer_message or tools %}
{{- "<|start|>developer<|message|>" }}
{%- if developer_message %}{{- "# Instructions\n\n" + developer_message + "\n\n" }}{%- endif %}
{%- if tools %}
{{- "# Tools\n\n## functions\n\nnamespace functions {\n\n" }}
{%- for tool in tools %}{{- "// " + tool.function.description + "\ntype " + tool.function.name + " = () => any;\n\n" }}{%- endfor %}
{{- "} // namespace functions" }}
{%- endif %}
{{- "<|end|>" }}
{%- endif %}
{%- set last_tool_call = namespace(name=none) %}
{%- for message in loop_messages -%}
{%- if message.role == "assistant" -%}
{%- if "tool_calls" in message %}
{%- set future_final_message = namespace(found=false) %}
{%- for later in loop_messages[loop.index:] %}
{%- if later.role == "assistant" and "tool_calls" not in later %}{%- set future_final_message.found = true %}{%- endif %}
{%- endfor %}
{%- set tool_call = message.tool_calls[0].function %}
{%- if message.content and message.thinking %}
{{- raise_exception("a call has content or thinking, not both") }}
{%- elif message.content and not future_final_message.found %}
{{- "<|start|>assistant<|channel|>analysis<|message|>" + message.content + "<|end|>" }}
{%- elif message.thinking and not future_final_message.found %}
{{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
{%- endif %}
{{- "<|start|>assistant to=functions." + tool_call.name + "<|channel|>commentary json<|message|>" + (tool_call.arguments | tojson) + "<|call|>" }}
{%- set last_tool_call.name = tool_call.name %}
{%- elif loop.last and not add_generation_prompt %}
{%- if message.thinking %}{{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}{%- endif %}
{{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|return|>" }}
{%- else %}
{{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
{%- set last_tool_call.name = none %}
{%- endif %}
{%- elif message.role == "tool" -%}
{%- if last_tool_call.name is none %}{{- raise_exception("a tool's answer follows a call") }}{%- endif %}
{{- "<|start|>functions." + last_tool_call.name + " to=assistant<|channel|>commentary<|message|>" + (message.content | tojson) + "<|end|>" }}
{%- elif message.role == "user" -%}
{{- "<|start|>user<|message|>" + message.content + "<|end|>" }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|start|>assistant" }}{%- endif -%}"""


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _developer(text: str, tools: list[Any] | None) -> str:
    parts = [f"# Instructions\n\n{text}\n\n"] if text else []
    if tools:
        types = [
            f"// {tool['function']['description']}\ntype {tool['function']['name']} = () => any;\n\n" for tool in tools
        ]
        parts += ["# Tools\n\n## functions\n\nnamespace functions {\n\n", *types, "} // namespace functions"]
    return f"<|start|>developer<|message|>{''.join(parts)}<|end|>" if parts else ""


def harmony(turns: Turns, tools: list[Any] | None = None) -> Pieces:
    pieces: Pieces = [(f"<|start|>system<|message|>{SYSTEM}{CHANNEL_OF_TOOLS if tools else ''}<|end|>", False)]
    system = turns[0]["content"] if turns[0]["role"] == "system" else ""
    pieces.append((_developer(system, tools), False))
    tool = ""
    for i, turn in enumerate(turns):
        reasoning = turn.get("thinking")
        analysis = f"<|channel|>analysis<|message|>{reasoning}<|end|><|start|>assistant" if reasoning else ""
        if turn["role"] == "user":
            pieces.append((f"<|start|>user<|message|>{turn['content']}<|end|>", False))
        elif turn["role"] == "tool":
            head = f"<|start|>functions.{tool} to=assistant<|channel|>commentary<|message|>"
            pieces.append((f"{head}{_json(turn['content'])}<|end|>", False))
        elif turn.get("tool_calls"):
            answered = any(assistant(later) and "tool_calls" not in later for later in turns[i + 1 :])
            function = turn["tool_calls"][0]["function"]
            tool = function["name"]
            text = f" to=functions.{tool}<|channel|>commentary json<|message|>{_json(function['arguments'])}<|call|>"
            pieces += [("<|start|>assistant", False), (("" if answered else analysis) + text, True)]
        elif assistant(turn):
            is_last = i == len(turns) - 1
            text = f"<|channel|>final<|message|>{turn['content']}{'<|return|>' if is_last else '<|end|>'}"
            pieces += [("<|start|>assistant", False), ((analysis if is_last else "") + text, True)]
    return pieces
