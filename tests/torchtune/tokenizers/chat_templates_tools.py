# ruff: noqa: E501  (templates stand as checkpoints have them)
"""Chat templates with tools or reasoning, in the layouts that released checkpoints have, each with its truth."""

import json
from collections.abc import Callable
from typing import Any

from tests.torchtune.tokenizers.chat_case import Pieces, Turns, assistant

QWEN2_5 = """{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
{%- else %}
    {{- '<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\n' + message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\n<tool_call>\n{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' }}
        {{- message.content }}
        {{- '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""

# The reasoning of turns before the last question is dropped; later turns get a reasoning block, empty or not.
QWEN3 = """{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\n<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}
                    {{- '\n' }}
                {%- endif %}
                {%- if tool_call.function %}
                    {%- set tool_call = tool_call.function %}
                {%- endif %}
                {{- '<tool_call>\n{"name": "' }}
                {{- tool_call.name }}
                {{- '", "arguments": ' }}
                {{- tool_call.arguments | tojson }}
                {{- '}\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' }}
        {{- content }}
        {{- '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}"""


def tool_response(turns: Turns, index: int) -> Pieces:
    """Answers of tools in a row share a user's turn."""
    before = "" if index and turns[index - 1]["role"] == "tool" else "<|im_start|>user"
    after = "" if index + 1 < len(turns) and turns[index + 1]["role"] == "tool" else "<|im_end|>\n"
    return [(f"{before}\n<tool_response>\n{turns[index]['content']}\n</tool_response>{after}", False)]


def calls(turn: dict[str, Any]) -> str:
    text = ""
    for call in turn.get("tool_calls", []):
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        text += f'\n<tool_call>\n{{"name": "{call["function"]["name"]}", "arguments": {arguments}}}\n</tool_call>'
    return text


def qwen2_5(turns: Turns) -> Pieces:
    pieces: Pieces = []
    for i, turn in enumerate(turns):
        if turn["role"] == "tool":
            pieces += tool_response(turns, i)
            continue
        text = turn["content"]
        if turn.get("tool_calls"):
            start = "<|im_start|>assistant"
            text = (f"\n{text}" if text else "") + calls(turn)
            pieces += [(start + "\n", False), (f"{text[1:]}<|im_end|>", True), ("\n", False)]
            continue
        pieces += [(f"<|im_start|>{turn['role']}\n", False), (f"{text}<|im_end|>", assistant(turn)), ("\n", False)]
    return pieces


def qwen3_reasoning(turn: dict[str, Any]) -> tuple[str, str]:
    """The reasoning of a turn, from its field or its text, and the rest of its text."""
    text = turn["content"]
    if "reasoning_content" in turn:
        return turn["reasoning_content"], text
    if "</think>" not in text:
        return "", text
    reasoning = text.split("</think>")[0].rstrip("\n").split("<think>")[-1].lstrip("\n")
    return reasoning, text.split("</think>")[-1].lstrip("\n")


def shared(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    same = [a == b for a, b in zip(one, other, strict=False)]
    return same.index(False) if False in same else len(same)


def qwen3(*, thinks: bool) -> Callable[..., Pieces]:
    def truth(turns: Turns) -> Pieces:
        users = [
            i
            for i, turn in enumerate(turns)
            if turn["role"] == "user"
            and not (turn["content"].startswith("<tool_response>") and turn["content"].endswith("</tool_response>"))
        ]
        pieces: Pieces = []
        for i, turn in enumerate(turns):
            if turn["role"] == "tool":
                pieces += tool_response(turns, i)
                continue
            text = turn["content"]
            block = ""
            if assistant(turn):
                reasoning, text = qwen3_reasoning(turn)
                called = calls(turn) if text else calls(turn)[1:]
                if i > users[-1] and (i == len(turns) - 1 or reasoning):
                    stripped = reasoning.strip("\n")
                    block = f"<think>\n{stripped}\n</think>\n\n"
                    text = text.lstrip("\n")
                text += called
            # What is the same as the empty block that the generation prompt writes is not the model's.
            begun = 0 if thinks or not block else shared(block, "<think>\n\n</think>\n\n")
            header = f"<|im_start|>{turn['role']}\n{block[:begun]}"
            text = f"{block[begun:]}{text}<|im_end|>"
            pieces += [(header, False), (text, assistant(turn)), ("\n", False)]
        return pieces

    return truth


PHI4_MINI = """{% for message in messages %}{% if message['role'] == 'system' and tools %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|tool|>' + (tools | tojson) + '<|/tool|>' + '<|end|>' }}{% else %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"""


def phi4_mini(turns: Turns, tools: list[Any] | None = None) -> Pieces:
    pieces: Pieces = []
    for turn in turns:
        tool_text = f"<|tool|>{_json(tools)}<|/tool|>" if tools and turn["role"] == "system" else ""
        pieces += [(f"<|{turn['role']}|>", False), (f"{turn['content']}{tool_text}<|end|>", assistant(turn))]
    return [*pieces, ("<|endoftext|>", False)]


# Tools and the user's question share a turn; a call is the whole of its turn.
LLAMA3_1 = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{%- if tools is not none %}{{- "Environment: ipython\n" }}{%- endif %}
{{- "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n" + system_message + "<|eot_id|>" }}
{%- if tools is not none %}
{%- set first_user_message = messages[0]['content'] | trim %}
{%- set messages = messages[1:] %}
{{- '<|start_header_id|>user<|end_header_id|>\n\nGiven the following functions, please respond with a JSON for a function call.\n\n' }}
{%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\n\n" }}{%- endfor %}
{{- first_user_message + "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
{%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}
{%- elif 'tool_calls' in message %}
{%- set tool_call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + tool_call.name + '", "parameters": ' }}{{- tool_call.arguments | tojson }}{{- "}<|eot_id|>" }}
{%- else %}
{{- "<|start_header_id|>ipython<|end_header_id|>\n\n" }}{{- message.content | tojson }}{{- "<|eot_id|>" }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def llama3_1(turns: Turns, tools: list[Any] | None = None) -> Pieces:
    system = turns[0]["content"].strip() if turns[0]["role"] == "system" else ""
    turns = turns[1:] if turns[0]["role"] == "system" else turns
    dates = "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
    environment = "Environment: ipython\n" if tools else ""
    head = "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
    pieces: Pieces = [(f"{head}{environment}{dates}{system}<|eot_id|>", False)]
    tool_text = ""
    if tools:
        tool_text = "Given the following functions, please respond with a JSON for a function call.\n\n"
        tool_text += "".join(f"{_json(tool, 4)}\n\n" for tool in tools)
    for i, turn in enumerate(turns):
        role = "ipython" if turn["role"] == "tool" else turn["role"]
        text = (tool_text if i == 0 else "") + turn["content"].strip()
        if role == "ipython":
            text = _json(turn["content"])
        elif turn.get("tool_calls"):
            function = turn["tool_calls"][0]["function"]
            text = f'{{"name": "{function["name"]}", "parameters": {_json(function["arguments"])}}}'
        pieces += [(f"<|start_header_id|>{role}<|end_header_id|>\n\n", False), (f"{text}<|eot_id|>", assistant(turn))]
    return pieces


# A switch says whether the model reasons; what it writes is marked.
SMOLLM3 = """{%- set mode = "/think" if enable_thinking is not defined or enable_thinking else "/no_think" -%}
{{- "<|im_start|>system\n## Metadata\n\nReasoning Mode: " + mode + "\n\n## Custom Instructions\n\n" -}}
{%- if messages[0].role == "system" -%}{{- messages[0].content | trim -}}{%- else -%}{{- "You are a helpful AI assistant named SmolLM." -}}{%- endif -%}
{{- "\n\n<|im_end|>\n" -}}
{%- for message in messages -%}
{%- if message.role == "user" -%}
{{- "<|im_start|>user\n" + message.content + "<|im_end|>\n" -}}
{%- elif message.role == "assistant" -%}
{%- generation -%}
{%- if mode == "/think" -%}{{- "<|im_start|>assistant\n" + message.content.lstrip("\n") + "<|im_end|>\n" -}}
{%- else -%}{{- "<|im_start|>assistant\n<think>\n\n</think>\n" + message.content.lstrip("\n") + "<|im_end|>\n" -}}{%- endif -%}
{%- endgeneration -%}
{%- elif message.role == "tool" -%}
{{- "<|im_start|>user\n" + message.content + "<|im_end|>\n" -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{%- if mode == "/think" -%}{{- "<|im_start|>assistant\n" -}}{%- else -%}{{- "<|im_start|>assistant\n<think>\n\n</think>\n" -}}{%- endif -%}
{%- endif -%}"""


def smollm3(mode: str) -> Callable[..., Pieces]:
    def truth(turns: Turns) -> Pieces:
        system = "You are a helpful AI assistant named SmolLM."
        if turns[0]["role"] == "system":
            system = turns[0]["content"].strip()
            turns = turns[1:]
        head = f"<|im_start|>system\n## Metadata\n\nReasoning Mode: {mode}\n\n## Custom Instructions\n\n"
        pieces: Pieces = [(f"{head}{system}\n\n<|im_end|>\n", False)]
        for turn in turns:
            if not assistant(turn):
                pieces.append((f"<|im_start|>user\n{turn['content']}<|im_end|>\n", False))
                continue
            block = "<think>\n\n</think>\n" if mode == "/no_think" else ""
            text = turn["content"].lstrip("\n")
            pieces += [(f"<|im_start|>assistant\n{block}{text}<|im_end|>", True), ("\n", False)]
        return pieces

    return truth
