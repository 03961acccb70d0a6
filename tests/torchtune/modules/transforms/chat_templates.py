# ruff: noqa: E501, RUF001  (templates stand as checkpoints have them: long lines, full-width bars)
"""Chat templates in the layouts that released checkpoints have, each with its truth written out in Python.

A truth maps a conversation to (text, is trained) pieces: what the template must render, and what of it the model
writes, the end-of-turn token included.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Pieces = list[tuple[str, bool]]
Turns = list[dict[str, Any]]


@dataclass
class Case:
    name: str
    template: str
    truth: Callable[[Turns], Pieces]
    special: list[str]
    eos: str
    bos: str | None = None
    system: bool = True
    tool: bool = False
    closes: bool = True  # every assistant turn ends with a special token of its own
    plain: list[str] = field(default_factory=list)  # added tokens that are not special


def assistant(turn: dict[str, Any]) -> bool:
    return turn["role"] == "assistant"


def blocks(before: str, between: str, after: str, rest: str = "\n", strip: bool = False) -> Callable[[Turns], Pieces]:
    """``{before}{role}{between}{text}{after}{rest}`` for every turn."""

    def truth(turns: Turns) -> Pieces:
        pieces: Pieces = []
        for turn in turns:
            text = turn["content"].strip() if strip else turn["content"]
            pieces += [(f"{before}{turn['role']}{between}", False), (text + after, assistant(turn)), (rest, False)]
        return pieces

    return truth


def with_default(system: str, truth: Callable[[Turns], Pieces]) -> Callable[[Turns], Pieces]:
    def defaulted(turns: Turns) -> Pieces:
        first = [] if turns[0]["role"] == "system" else [{"role": "system", "content": system}]
        return truth(first + turns)

    return defaulted


def prefixed(prefix: str, truth: Callable[[Turns], Pieces]) -> Callable[[Turns], Pieces]:
    return lambda turns: [(prefix, False), *truth(turns)]


CHATML = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

SMOLLM2 = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

LLAMA3 = """{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

# System turn with a date first, whether the conversation has a system turn or not.
LLAMA3_DATED = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\nToday Date: 26 Jul 2024\n\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.role == 'tool' or message.role == 'ipython' %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\n\n" + message.content + "<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""


def llama3_dated(turns: Turns) -> Pieces:
    system = ""
    if turns[0]["role"] == "system":
        system, turns = turns[0]["content"].strip(), turns[1:]
    head = "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nToday Date: 26 Jul 2024\n\n"
    pieces: Pieces = [(f"{head}{system}<|eot_id|>", False)]
    for turn in turns:
        role = "ipython" if turn["role"] == "tool" else turn["role"]
        text = turn["content"] if role == "ipython" else turn["content"].strip()
        pieces += [(f"<|start_header_id|>{role}<|end_header_id|>\n\n", False), (f"{text}<|eot_id|>", assistant(turn))]
    return pieces


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


def tool_response(turn: dict[str, Any]) -> Pieces:
    return [(f"<|im_start|>user\n<tool_response>\n{turn['content']}\n</tool_response><|im_end|>\n", False)]


def calls(turn: dict[str, Any]) -> str:
    import json

    text = ""
    for call in turn.get("tool_calls", []):
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        text += f'\n<tool_call>\n{{"name": "{call["function"]["name"]}", "arguments": {arguments}}}\n</tool_call>'
    return text


def qwen2_5(turns: Turns) -> Pieces:
    pieces: Pieces = []
    for turn in turns:
        if turn["role"] == "tool":
            pieces += tool_response(turn)
            continue
        text = turn["content"] + calls(turn) if turn["content"] else calls(turn)[1:]
        pieces += [(f"<|im_start|>{turn['role']}\n", False), (f"{text}<|im_end|>", assistant(turn)), ("\n", False)]
    return pieces


def qwen3(turns: Turns) -> Pieces:
    last_query = max(i for i, turn in enumerate(turns) if turn["role"] == "user")
    pieces: Pieces = []
    for i, turn in enumerate(turns):
        if turn["role"] == "tool":
            pieces += tool_response(turn)
            continue
        text = turn["content"]
        if assistant(turn):
            reasoning = ""
            if "</think>" in text:
                reasoning = text.split("</think>")[0].rstrip("\n").split("<think>")[-1].lstrip("\n")
                text = text.split("</think>")[-1].lstrip("\n")
            called = calls(turn) if text else calls(turn)[1:]
            if i > last_query and (i == len(turns) - 1 or reasoning):
                text = "<think>\n" + reasoning.strip("\n") + "\n</think>\n\n" + text.lstrip("\n")
            text += called
        pieces += [(f"<|im_start|>{turn['role']}\n", False), (f"{text}<|im_end|>", assistant(turn)), ("\n", False)]
    return pieces


MISTRAL = """{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content'] %}{%- set loop_messages = messages[1:] %}{%- else %}{%- set loop_messages = messages %}{%- endif %}{{- bos_token }}{%- for message in loop_messages %}{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('After the optional system message, conversation roles must alternate user/assistant/user/assistant/...') }}{%- endif %}{%- if message['role'] == 'user' %}{%- if loop.first and system_message is defined %}{{- ' [INST] ' + system_message + '\n\n' + message['content'] + ' [/INST]' }}{%- else %}{{- ' [INST] ' + message['content'] + ' [/INST]' }}{%- endif %}{%- elif message['role'] == 'assistant' %}{{- ' ' + message['content'] + eos_token }}{%- else %}{{- raise_exception('Only user and assistant roles are supported') }}{%- endif %}{%- endfor %}"""


def mistral(turns: Turns) -> Pieces:
    pieces: Pieces = [("<s>", False)]
    system = ""
    for turn in turns:
        if turn["role"] == "system":
            system = turn["content"] + "\n\n"
        elif turn["role"] == "user":
            pieces.append((f" [INST] {system}{turn['content']} [/INST]", False))
            system = ""
        else:
            pieces.append((f" {turn['content']}</s>", True))
    return pieces


# The system's text stands in the last user turn, so no conversation is the beginning of a longer one.
MISTRAL_LAST = """{%- if messages[0]["role"] == "system" %}{%- set system_message = messages[0]["content"] %}{%- set loop_messages = messages[1:] %}{%- else %}{%- set loop_messages = messages %}{%- endif %}{{- bos_token }}{%- for message in loop_messages %}{%- if message["role"] == "user" %}{%- if loop.index0 >= loop.length - 2 and system_message is defined %}{{- "[INST] " + system_message + "\n\n" + message["content"] + "[/INST]" }}{%- else %}{{- "[INST] " + message["content"] + "[/INST]" }}{%- endif %}{%- elif message["role"] == "assistant" %}{{- " " + message["content"]|trim + eos_token }}{%- endif %}{%- endfor %}"""


def mistral_last(turns: Turns) -> Pieces:
    pieces: Pieces = [("<s>", False)]
    system = ""
    if turns[0]["role"] == "system":
        system, turns = turns[0]["content"] + "\n\n", turns[1:]
    for i, turn in enumerate(turns):
        if turn["role"] == "user":
            pieces.append((f"[INST] {system if i >= len(turns) - 2 else ''}{turn['content']}[/INST]", False))
        else:
            pieces.append((f" {turn['content'].strip()}</s>", True))
    return pieces


LLAMA2 = """{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}{% for message in loop_messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}{% if loop.index0 == 0 and system_message != false %}{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"""


def llama2(turns: Turns) -> Pieces:
    pieces: Pieces = []
    system = ""
    for turn in turns:
        if turn["role"] == "system":
            system = f"<<SYS>>\n{turn['content']}\n<</SYS>>\n\n"
        elif turn["role"] == "user":
            pieces.append((f"<s>[INST] {(system + turn['content']).strip()} [/INST]", False))
            system = ""
        else:
            pieces.append((f" {turn['content'].strip()} </s>", True))
    return pieces


GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"""


def gemma(turns: Turns) -> Pieces:
    pieces: Pieces = [("<bos>", False)]
    for turn in turns:
        role = "model" if assistant(turn) else turn["role"]
        text = f"{turn['content'].strip()}<end_of_turn>"
        pieces += [(f"<start_of_turn>{role}\n", False), (text, assistant(turn)), ("\n", False)]
    return pieces


PHI3 = """{% for message in messages %}{% if message['role'] == 'system' and message['content'] %}{{'<|system|>\n' + message['content'] + '<|end|>\n'}}{% elif message['role'] == 'user' %}{{'<|user|>\n' + message['content'] + '<|end|>\n'}}{% elif message['role'] == 'assistant' %}{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"""


def phi3(turns: Turns) -> Pieces:
    return [*blocks("<|", "|>\n", "<|end|>")(turns), ("<|endoftext|>", False)]


PHI4 = """{% for message in messages %}{% if (message['role'] == 'system') %}{{'<|im_start|>system<|im_sep|>' + message['content'] + '<|im_end|>'}}{% elif (message['role'] == 'user') %}{{'<|im_start|>user<|im_sep|>' + message['content'] + '<|im_end|>'}}{% elif (message['role'] == 'assistant') %}{{'<|im_start|>assistant<|im_sep|>' + message['content'] + '<|im_end|>'}}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"""

ZEPHYR = """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>
' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>
' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>
'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""


# The generation prompt opens the reasoning, finished turns have none.
DEEPSEEK_R1 = """{%- set ns = namespace(system_prompt='') -%}{%- for message in messages %}{%- if message['role'] == 'system' %}{% set ns.system_prompt = message['content'] %}{%- endif %}{%- endfor %}{{ bos_token }}{{ ns.system_prompt }}{%- for message in messages %}{%- if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}{%- endif %}{%- if message['role'] == 'assistant' %}{% set content = message['content'] %}{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}{{ '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}{%- endif %}{%- endfor -%}{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}"""


def deepseek(turns: Turns) -> Pieces:
    pieces: Pieces = [("<｜begin▁of▁sentence｜>", False)]
    pieces += [(turn["content"], False) for turn in turns if turn["role"] == "system"]
    for turn in turns:
        if turn["role"] == "user":
            pieces.append((f"<｜User｜>{turn['content']}", False))
        elif assistant(turn):
            text = turn["content"].split("</think>")[-1]
            pieces += [("<｜Assistant｜>", False), (f"{text}<｜end▁of▁sentence｜>", True)]
    return pieces


# No end-of-turn token: the header of the next turn is the sign to stop.
GLM4 = """[gMASK]<sop>{% for item in messages %}{% if item['role'] == 'system' %}{{ '<|system|>\n' + item['content'] }}{% elif item['role'] == 'user' %}{{ '<|user|>\n' + item['content'] }}{% elif item['role'] == 'assistant' %}{{ '<|assistant|>\n' + item['content'] }}{% elif item['role'] == 'tool' %}{{ '<|observation|>\n' + item['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""


def glm4(turns: Turns) -> Pieces:
    pieces: Pieces = [("[gMASK]<sop>", False)]
    for i, turn in enumerate(turns):
        role = "observation" if turn["role"] == "tool" else turn["role"]
        header = f"<|{role}|>"
        stops = i > 0 and assistant(turns[i - 1]) and role == "user"
        pieces += [(header, stops), (f"\n{turn['content']}", assistant(turn))]
    return pieces


GRANITE = """{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content'] %}{%- set loop_messages = messages[1:] %}{%- else %}{%- set system_message = "You are Granite, developed by IBM." %}{%- set loop_messages = messages %}{%- endif %}{{- '<|start_of_role|>system<|end_of_role|>' + system_message + '<|end_of_text|>\n' }}{%- for message in loop_messages %}{{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + message['content'] + '<|end_of_text|>\n' }}{%- if loop.last and add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}{%- endfor %}"""

COMMAND_R = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}{% if system_message != false %}{{ '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' + system_message + '<|END_OF_TURN_TOKEN|>' }}{% endif %}{% for message in loop_messages %}{% set content = message['content'] %}{% if message['role'] == 'user' %}{{ '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' + content.strip() + '<|END_OF_TURN_TOKEN|>' }}{% elif message['role'] == 'assistant' %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>'  + content.strip() + '<|END_OF_TURN_TOKEN|>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"""


def command_r(turns: Turns) -> Pieces:
    names = {"system": "SYSTEM", "user": "USER", "assistant": "CHATBOT"}
    pieces: Pieces = [("<BOS_TOKEN>", False)]
    for turn in turns:
        text = turn["content"] if turn["role"] == "system" else turn["content"].strip()
        pieces += [
            (f"<|START_OF_TURN_TOKEN|><|{names[turn['role']]}_TOKEN|>", False),
            (f"{text}<|END_OF_TURN_TOKEN|>", assistant(turn)),
        ]
    return pieces


# The marked part leaves the end-of-turn token out; it is trained on nevertheless.
MARKED = """{% for message in messages %}{% if message['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' }}{% generation %}{{ message['content'] }}{% endgeneration %}{{ '<|im_end|>\n' }}{% else %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

IM = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
QWEN = ["<tool_call>", "</tool_call>"]
HEADERS = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end_of_text|>"]
TURNS = [f"<|{name}_TOKEN|>" for name in ("START_OF_TURN", "END_OF_TURN", "SYSTEM", "USER", "CHATBOT")]
chatml = blocks("<|im_start|>", "\n", "<|im_end|>")

CASES = [
    Case("chatml", CHATML, chatml, IM, "<|im_end|>", tool=True),
    Case(
        "smollm2",
        SMOLLM2,
        with_default("You are a helpful AI assistant named SmolLM", chatml),
        IM,
        "<|im_end|>",
        bos="<|im_start|>",
        tool=True,
    ),
    Case(
        "llama3",
        LLAMA3,
        prefixed("<|begin_of_text|>", blocks("<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>", "", True)),
        HEADERS,
        "<|eot_id|>",
        bos="<|begin_of_text|>",
        tool=True,
    ),
    Case("llama3_dated", LLAMA3_DATED, llama3_dated, HEADERS, "<|end_of_text|>", bos="<|begin_of_text|>", tool=True),
    Case(
        "qwen2_5",
        QWEN2_5,
        with_default("You are Qwen, created by Alibaba Cloud. You are a helpful assistant.", qwen2_5),
        IM,
        "<|im_end|>",
        tool=True,
        plain=QWEN,
    ),
    Case("qwen3", QWEN3, qwen3, IM, "<|im_end|>", tool=True, plain=[*QWEN, "<think>", "</think>"]),
    Case("mistral", MISTRAL, mistral, ["<s>", "</s>"], "</s>", bos="<s>"),
    Case("mistral_last", MISTRAL_LAST, mistral_last, ["<s>", "</s>", "[INST]", "[/INST]"], "</s>", bos="<s>"),
    Case("llama2", LLAMA2, llama2, ["<s>", "</s>"], "</s>", bos="<s>"),
    Case(
        "gemma",
        GEMMA,
        gemma,
        ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"],
        "<eos>",
        bos="<bos>",
        system=False,
    ),
    Case("phi3", PHI3, phi3, ["<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"], "<|endoftext|>"),
    Case("phi4", PHI4, blocks("<|im_start|>", "<|im_sep|>", "<|im_end|>", ""), [*IM, "<|im_sep|>"], "<|im_end|>"),
    Case("zephyr", ZEPHYR, blocks("<|", "|>\n", "</s>"), ["<s>", "</s>"], "</s>", bos="<s>"),
    Case(
        "deepseek_r1",
        DEEPSEEK_R1,
        deepseek,
        ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"],
        "<｜end▁of▁sentence｜>",
        bos="<｜begin▁of▁sentence｜>",
        plain=["<think>", "</think>"],
    ),
    Case(
        "glm4",
        GLM4,
        glm4,
        ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"],
        "<|endoftext|>",
        closes=False,
    ),
    Case(
        "granite",
        GRANITE,
        with_default(
            "You are Granite, developed by IBM.", blocks("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>")
        ),
        ["<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>"],
        "<|end_of_text|>",
    ),
    Case("command_r", COMMAND_R, command_r, ["<BOS_TOKEN>", *TURNS], "<|END_OF_TURN_TOKEN|>", bos="<BOS_TOKEN>"),
    Case("marked", MARKED, chatml, IM, "<|im_end|>", tool=True),
]


def turn(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def exchange(*texts: str) -> Turns:
    """user, assistant, user, assistant …"""
    return [turn(("user", "assistant")[i % 2], text) for i, text in enumerate(texts)]


SYSTEM = turn("system", "Answer in one word.")
CONVERSATIONS: dict[str, Turns] = {
    "one exchange": exchange("What is red?", "A colour."),
    "three exchanges": exchange("one", "two", "three", "four", "five", "six"),
    "same texts": exchange("hello", "hello", "hello", "hello"),
    "system": [SYSTEM, *exchange("What is red?", "Colour")],
    "system, two exchanges": [SYSTEM, *exchange("cat", "dog", "bird", "fish")],
    "unicode": exchange("Grüße 🙂 你好", "naïve — 你好 🙂🙂", "Привет", "שלום"),
    "empty answer": exchange("Say nothing.", ""),
    "empty answer inside": exchange("Say nothing.", "", "Now speak.", "Well."),
    "spaces": exchange("  padded  ", "  answer with spaces  ", "again", "tail  "),
    "newlines": exchange("line\nline\n\n", "\nfirst\n\nsecond\n", "more", "\n\nend"),
    "reasoning": exchange("2+2?", "<think>\nsum\n</think>\n\n4", "3+3?", "<think>\nagain\n</think>\n\n6"),
    "code": exchange("Write.", "def f(x):\n    return {'a': x}  # {{ }}\n", "Thanks", "ok"),
    "names of roles": exchange("user assistant system", "assistant\nuser", "assistant", "user"),
}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln", "days": 2}}}
TOOL_CONVERSATIONS: dict[str, Turns] = {
    "tool": [
        turn("user", "Weather?"),
        turn("assistant", "I will look."),
        turn("tool", '{"sun": true}'),
        turn("assistant", "Sunny."),
    ],
    "tool, then a question": [
        SYSTEM,
        turn("user", "Weather?"),
        turn("assistant", "I will look."),
        turn("tool", '{"sun": true}'),
        turn("assistant", "Sunny."),
        *exchange("Sure?", "Yes."),
    ],
}
CALL_CONVERSATIONS: dict[str, Turns] = {
    "structured call": [
        turn("user", "Weather?"),
        turn("assistant", "", tool_calls=[CALL]),
        turn("tool", "rain"),
        turn("assistant", "Rain."),
    ],
    "structured calls with text": [
        turn("user", "Weather?"),
        turn("assistant", "I will look.", tool_calls=[CALL, CALL]),
        turn("tool", "rain"),
        turn("assistant", "Rain."),
        *exchange("And now?", "Sun."),
    ],
}
