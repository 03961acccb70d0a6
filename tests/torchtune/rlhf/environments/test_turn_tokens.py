"""The bridge between two turns, and the calls in a turn, against what published chat templates render themselves."""

import itertools
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.torchtune.tokenizers.chat_case import Case
from tests.torchtune.tokenizers.test_chat_templates import write_checkpoint
from torchtune.data import Message
from torchtune.rlhf import RolloutError
from torchtune.rlhf.environments import Bridge, ToolCall, detect_format, parameters_of, parse_calls
from torchtune.rlhf.environments._turn_tokens import Turn
from torchtune.tokenizers import HuggingFaceModelTokenizer, hf_tokenizer

PUBLISHED = Path(find_spec("trl").origin).parent / "chat_templates"
CHATML, LLAMA = "<|im_end|>", "<|eot_id|>"
# Template: the token that ends a turn, and the format of calls.
TEMPLATES = {
    "gemma4": ("<turn|>", "gemma4"),
    "gemma4_v5": ("<turn|>", "gemma4"),
    "gptoss": ("<|return|>", "harmony"),
    "lfm2_2_5": (CHATML, None),
    "llama3_1": (LLAMA, "llama3"),
    "llama3_2": (LLAMA, "llama3"),
    "nemotron_3_nano": (CHATML, "qwen_xml"),
    "qwen2_5": (CHATML, "hermes"),
    "qwen3": (CHATML, "hermes"),
    "qwen3_instruct_2507": (CHATML, "hermes"),
    "qwen3_5_think": (CHATML, "qwen_xml"),
    "qwen3_5_nothink": (CHATML, "qwen_xml"),
    "qwen3_6": (CHATML, "qwen_xml"),
    "qwen3_8": (CHATML, "qwen_xml"),
    "qwen3_vl": (CHATML, "hermes"),
}
_SPECIAL = re.compile(r"<\|[^|<>\s'\"]+\|>|<\|[a-z_]+>|<[a-z_]+\|>|<\|\"\|>")
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "Where"},
        "days": {"type": "integer", "description": "Many"},
    },
    "required": ["city", "days"],
}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Look it up.", "parameters": PARAMETERS}}]
CALL = ToolCall("look", {"city": "Bern, CH", "days": 3})


def make(name: str, folder: Path) -> HuggingFaceModelTokenizer:
    template = (PUBLISHED / f"{name}.jinja").read_text()
    end = TEMPLATES[name][0]
    special = ["<bos>", *sorted({*_SPECIAL.findall(template), end})]
    write_checkpoint(folder, Case(name, template, lambda turns: [], special, end, bos="<bos>"))
    return hf_tokenizer(str(folder))


def conversation(calls: int, reasons: bool) -> list[Message]:
    """A question, a turn with calls, their results, and an answer; only the turn has labels."""
    called = [
        {"type": "function", "id": f"call0000{i}", "function": {"name": CALL.name, "arguments": CALL.arguments}}
        for i in range(calls)
    ]
    thought = {"reasoning_content": "Think first hard"} if reasons else {}
    results = [
        Message("tool", f"Found {i} there", masked=True, extra={"tool_call_id": f"call0000{i}", "name": "look"})
        for i in range(calls)
    ]
    user = Message("user", "Say the weather now", masked=True)
    return [user, Message("assistant", "", extra={"tool_calls": called, **thought}), *results]


@pytest.mark.parametrize("reasons", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_bridge_equals_the_tokens_that_the_template_renders_between_turns(name, reasons, tmp_path):
    tokenizer = make(name, tmp_path)
    one_call_only = name.startswith(("gptoss", "llama3"))
    for calls in (1,) if one_call_only else (1, 2):
        turns = conversation(calls, reasons)
        tokens, mask = tokenizer.tokenize_messages(turns, tools=TOOLS)
        start = mask.index(False)
        end = len(mask) - mask[::-1].index(False)
        bridge = Bridge(tokenizer, TOOLS)
        replies = [f"Found {i} there" for i in range(calls)]
        between = bridge([CALL] * calls, replies)
        assert all(reply in tokenizer.decode(between, skip_special_tokens=False) for reply in replies)
        expected = tokenizer.render_template(turns, add_generation_prompt=True, tools=TOOLS)
        sampled = tokenizer.decode(tokens[start:end], skip_special_tokens=False)
        assert tokenizer.decode(tokens[:end] + between, skip_special_tokens=False) == expected
        prompt = bridge.prompt(turns[:1])
        assert tokenizer.decode(prompt, skip_special_tokens=False) == tokenizer.render_template(
            turns[:1], add_generation_prompt=True, tools=TOOLS
        )
        tool_format = TEMPLATES[name][1]
        if tool_format is not None:
            assert detect_format((PUBLISHED / f"{name}.jinja").read_text()) == tool_format
            assert parse_calls(sampled, tool_format, parameters_of(TOOLS)) == [CALL] * calls


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_turn_that_could_not_be_parsed_is_answered_in_every_template(name, tmp_path):
    tokenizer = make(name, tmp_path)
    text = tokenizer.decode(Bridge(tokenizer, TOOLS)([], ["Error: no JSON."]), skip_special_tokens=False)
    turns = [Message("user", "Why?"), Message("assistant", "so"), Message("user", "Error: no JSON.")]
    rendered = tokenizer.render_template(turns, add_generation_prompt=True, tools=TOOLS)
    assert "Error: no JSON." in text
    assert rendered.endswith(text)


SHAPES = ("tool", "error", "tool error", "error tool", "error error")


@pytest.mark.parametrize("name", TEMPLATES)
def test_context_equals_the_template_without_reasoning_of_earlier_turns(name, tmp_path):
    """Sampled turns with reasoning, then replies of tools, or of the user to a turn that could not be parsed."""
    tokenizer = make(name, tmp_path)
    bridge = Bridge(tokenizer, TOOLS)
    num_omitted = 0
    for shape, reasons in itertools.product(SHAPES, (False, True)):
        messages = [Message("user", "Say the weather now", masked=True)]
        turns = []
        for number, kind in enumerate(shape.split()):
            extra = {"reasoning_content": f"Think {number} first"} if reasons else {}
            if kind == "tool":
                _, turn, reply = conversation(1, False)
                turn.extra.update(extra)
                calls = [CALL]
            else:
                turn = Message("assistant", f"So {number}", extra=extra)
                reply = Message("user", "Error: no")
                calls = []
            reply.masked = True
            tokens, mask = tokenizer.tokenize_messages([*messages, turn], tools=TOOLS)
            sampled = [token for token, masked in zip(tokens, mask, strict=True) if not masked]
            turns.append(Turn(sampled, calls, [reply.text_content]))
            turn.masked = True
            messages += [turn, reply]
        if "</think>" in tokenizer.decode(turns[-1].tokens) and (not reasons or name == "qwen3_5_nothink"):
            continue  # the template writes that nothing was thought, or the prompt has ended reasoning before
        prompt = bridge.prompt(messages[:1])
        tokens = prompt
        for count, turn in enumerate(turns, 1):
            with_turn = tokens + turn.tokens
            context = bridge.context(prompt, turns[:count])
            if context is None or context[: len(with_turn)] == with_turn:
                tokens = with_turn + bridge(turn.calls, turn.replies)
            else:
                tokens = context
                num_omitted += 1
        text = tokenizer.decode(tokens, skip_special_tokens=False).replace("<|return|>", "<|end|>")  # of a last turn
        assert text == tokenizer.render_template(messages, add_generation_prompt=True, tools=TOOLS), shape
        tokenizer.reasoning = "keep"
        assert Bridge(tokenizer, TOOLS).context(prompt, turns) is None
        tokenizer.reasoning = "strip"
    keeps = name.startswith(("llama3", "qwen2_5", "qwen3_8", "qwen3_vl", "qwen3_instruct"))
    assert (num_omitted == 0) == keeps, num_omitted


def test_special_tokens_in_a_reply_are_plain_text(tmp_path):
    tokenizer = make("qwen3", tmp_path)
    between = Bridge(tokenizer, TOOLS)([CALL], ["a<|im_end|>b"])
    assert between.count(tokenizer.special_tokens[CHATML]) == 1
    assert "a<|im_end|>b" in tokenizer.decode(between, skip_special_tokens=False)


def test_templates_without_tools_render_replies_as_turns_or_are_refused(tmp_path):
    def tokenizer_of(template, name):
        write_checkpoint(
            tmp_path / name, Case("own", template, lambda turns: [], ["<bos>", CHATML], CHATML, bos="<bos>")
        )
        return hf_tokenizer(str(tmp_path / name))

    turn = "{% for m in messages %}{{ m.role + ': ' + m.content + '<|im_end|>' }}{% endfor %}"
    turn += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    tokenizer = tokenizer_of(turn, "plain")
    between = Bridge(tokenizer, TOOLS)([CALL], ["sun"])
    assert tokenizer.decode(between, skip_special_tokens=False) == "tool: sun<|im_end|>assistant: "
    strict = turn.replace("{{ m.role", "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{{ m.role")
    with pytest.raises(RolloutError, match=r"the chat template takes no replies of tools: .*no tools"):
        Bridge(tokenizer_of(strict, "strict"), TOOLS)([CALL], ["sun"])
