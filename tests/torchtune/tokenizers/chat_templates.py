# ruff: noqa: E501, RUF001  (templates stand as checkpoints have them: long lines, full-width bars)
"""Chat templates without tools, in the layouts that released checkpoints have, each with its truth."""

from collections.abc import Callable

from tests.torchtune.tokenizers.chat_case import Pieces, Turns, assistant, blocks

CHATML = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

SMOLLM2 = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

LLAMA3 = """{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

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
        system = turns[0]["content"] + "\n\n"
        turns = turns[1:]
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


PHI3 = """{% for message in messages %}{% if message['role'] == 'system' and message['content'] %}{{'<|system|>\n' + message['content'] + '<|end|>\n'}}{% elif message['role'] == 'user' %}{{'<|user|>\n' + message['content'] + '<|end|>\n'}}{% elif message['role'] == 'assistant' %}{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"""


def phi3(turns: Turns) -> Pieces:
    written_turns = [turn for turn in turns if turn["role"] != "system" or turn["content"]]
    return [*blocks("<|", "|>\n", "<|end|>")(written_turns), ("<|endoftext|>", False)]


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


# The marked part leaves the end-of-turn token out; it is trained on nevertheless.
MARKED = """{% for message in messages %}{% if message['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' }}{% generation %}{{ message['content'] }}{% endgeneration %}{{ '<|im_end|>\n' }}{% else %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# The system's text stands in the first user turn.
GEMMA3 = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}{%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}{%- set loop_messages = messages[1:] -%}{%- else -%}{%- set first_user_prefix = "" -%}{%- set loop_messages = messages -%}{%- endif -%}
{%- for message in loop_messages -%}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}{%- endif -%}
{%- if (message['role'] == 'assistant') -%}{%- set role = "model" -%}{%- else -%}{%- set role = message['role'] -%}{%- endif -%}
{{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else "") }}{{ message['content'] | trim }}{{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"""


def gemma3(turns: Turns) -> Pieces:
    pieces: Pieces = [("<bos>", False)]
    system = turns[0]["content"] + "\n\n" if turns[0]["role"] == "system" else ""
    for turn in turns[1:] if turns[0]["role"] == "system" else turns:
        role = "model" if assistant(turn) else turn["role"]
        text = f"{turn['content'].strip()}<end_of_turn>"
        pieces += [(f"<start_of_turn>{role}\n{system}", False), (text, assistant(turn)), ("\n", False)]
        system = ""
    return pieces


# The token of the beginning is that of the end.
OLMO2 = """{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}{{ '<|system|>\n' + message['content'] + '\n' }}{% elif message['role'] == 'user' %}{{ '<|user|>\n' + message['content'] + '\n' }}{% elif message['role'] == 'assistant' %}{% if not loop.last %}{{ '<|assistant|>\n'  + message['content'] + eos_token + '\n' }}{% else %}{{ '<|assistant|>\n'  + message['content'] + eos_token }}{% endif %}{% endif %}{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"""


def olmo2(turns: Turns) -> Pieces:
    pieces: Pieces = [("<|endoftext|>", False)]
    for i, turn in enumerate(turns):
        end = "<|endoftext|>" if assistant(turn) else "\n"
        pieces += [(f"<|{turn['role']}|>\n", False), (turn["content"] + end, assistant(turn))]
        pieces += [("\n", False)] if assistant(turn) and i < len(turns) - 1 else []
    return pieces


# Turns as Gemma 4 writes them, and its thinking switch; tools left out.
GEMMA4 = """{{ bos_token }}
{%- set thinks = enable_thinking is defined and enable_thinking -%}
{%- set has_system = messages[0]['role'] == 'system' -%}
{%- if has_system or thinks -%}
    {{ '<|turn>system\n' }}{%- if thinks -%}{{ '<|think|>' }}{%- endif -%}
    {%- if has_system -%}{{ messages[0]['content'] | trim }}{%- endif -%}{{ '<turn|>\n' }}
{%- endif -%}
{%- for message in (messages[1:] if has_system else messages) -%}
    {{ '<|turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' }}
    {{- message['content'] | trim }}{{ '<turn|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|turn>model\n' }}{%- if not thinks -%}{{ '<|channel>thought\n<channel|>' }}{%- endif -%}{%- endif -%}"""


def gemma4(thinks: bool) -> Callable[[Turns], Pieces]:
    def truth(turns: Turns) -> Pieces:
        pieces: Pieces = [("<bos>", False)]
        if thinks:
            head = turns[0]["content"].strip() if turns[0]["role"] == "system" else ""
            pieces.append((f"<|turn>system\n<|think|>{head}<turn|>\n", False))
            turns = turns[1:] if turns[0]["role"] == "system" else turns
        for turn in turns:
            role = "model" if assistant(turn) else turn["role"]
            pieces += [(f"<|turn>{role}\n", False), (f"{turn['content'].strip()}<turn|>", assistant(turn))]
            pieces.append(("\n", False))
        return pieces

    return truth
