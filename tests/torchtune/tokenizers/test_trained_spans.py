"""What is trained on in conversations of every kind, with the templates that checkpoints were released with.

Every text of a turn has a word that stands nowhere else, so that it shows whose words are trained on. TRL's package has
the templates as they were published.
"""

import itertools
import re
from importlib.util import find_spec
from itertools import count
from pathlib import Path

import pytest

from tests.torchtune.tokenizers.chat_case import Case
from tests.torchtune.tokenizers.chat_checks import messages_of
from tests.torchtune.tokenizers.chat_layouts import CASES
from tests.torchtune.tokenizers.test_chat_templates import write_checkpoint
from torchtune.data import AlpacaToMessages, DataError
from torchtune.tokenizers import hf_tokenizer
from torchtune.tokenizers._chat_template import ChatTemplate
from torchtune.tokenizers._trained_spans import LayoutCache, TurnFinder, learn_stops

PUBLISHED = Path(find_spec("trl").origin).parent / "chat_templates"
# Turns by letter: S system, U user, A answer, T answers of tools; of the assistant also R reasoning and answer, and
# tool calls (C), with reasoning before (R) or a text beside them (X).
CALLS = ["C", "RC", "XC", "RXC", "CC", "RCC"]
KINDS = [
    "U A", "U R", "S U A", "S U R", "U A U A", "U R U R", "U R U A", "U A U R", "S U A U A U A", "U C T C T A",
    "U RC T RC T R", "U RC T C T A U A", "U RC T A U RC T R", "U CC T CC T A U C T A", "U A U RC T A",
    "U RXC T RXC T R U R", "U RC T U A", "U RCC T RC",
]  # fmt: skip
for _call in CALLS:
    KINDS += [f"U {_call}", f"U {_call} T A", f"U {_call} T R", f"U {_call} T A U A", f"U {_call} T R U R"]
    KINDS += [f"S U {_call}", f"S U {_call} T A"]
SPECIAL = {
    "gemma4": "<bos> <eos> <|turn> <turn|> <|think|> <|channel> <channel|> <|tool> <tool|> <|tool_call> <tool_call|> "
    '<|tool_response> <tool_response|> <|"|>',
    "gptoss": "<|startoftext|> <|endoftext|> <|return|> <|constrain|> <|channel|> <|start|> <|end|> <|message|> "
    "<|call|>",
    "glm4moe": "<|endoftext|> [gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|>",
    "cohere2": "<BOS_TOKEN> <|START_OF_TURN_TOKEN|> <|END_OF_TURN_TOKEN|> <|USER_TOKEN|> <|CHATBOT_TOKEN|> "
    "<|SYSTEM_TOKEN|> <|START_RESPONSE|> <|END_RESPONSE|>",
    "qwen3_6": "<|endoftext|> <|im_start|> <|im_end|>",
}
# Family: its end-of-sequence token, the tokens with which its turns end, what is never trained on.
FAMILIES = {
    "gemma4": ("<eos>", "<turn|> <|tool_response>", ["<|turn>", "response:", "<tool_response|>"]),
    "gemma4_v5": ("<eos>", "<turn|> <|tool_response>", ["<|turn>", "response:", "<tool_response|>"]),
    "gptoss": ("<|return|>", "<|call|> <|return|> <|end|>", ["<|start|>user", "<|start|>functions", "to=assistant"]),
    "glm4moe": ("<|endoftext|>", "<|user|> <|observation|> <|endoftext|>", ["<|assistant|>", "<tool_response>"]),
    "cohere2": ("<|END_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", ["<|START_OF_TURN_TOKEN|>", "<|CHATBOT_TOKEN|>"]),
    "qwen3_6": ("<|im_end|>", "<|im_end|>", ["<|im_start|>", "<tool_response>"]),
}


def conversation(kind):
    """The turns of a kind, and the role and kind of text of every word."""
    turns = []
    words = {}
    number = count()
    called = []

    def word(whose):
        text = f"zq{len(turns)}w{next(number)}x"
        words[text] = whose
        return text

    for letters in kind.split():
        if letters in ("S", "U"):
            role = {"S": "system", "U": "user"}[letters]
            turns.append({"role": role, "content": f"Say {word(role)} now"})
        elif letters == "T":
            for call_id, name in called:
                content = f"Found {word('tool')} there"
                turns.append({"role": "tool", "content": content, "tool_call_id": call_id, "name": name})
            called = []
        else:
            turn = {"role": "assistant", "content": ""}
            if "R" in letters:
                turn["reasoning_content"] = f"Think {word('assistant')} hard"
            if letters in ("A", "R") or "X" in letters:
                turn["content"] = f"Say {word('assistant')} loud"
            for _ in range(letters.count("C")):
                call_id = f"call{next(number):05d}"
                name = word("assistant")
                function = {"name": name, "arguments": {"city": word("assistant"), "days": 3}}
                turn.setdefault("tool_calls", []).append({"type": "function", "id": call_id, "function": function})
                called.append((call_id, name))
            turns.append(turn)
    return turns, words


def make(family, folder):
    """A small tokenizer with a published template, and no generation config that names the ends of turns."""
    eos = FAMILIES[family][0]
    special = SPECIAL[family.removesuffix("_v5")].split()
    template = (PUBLISHED / f"{family}.jinja").read_text()
    write_checkpoint(folder, Case(family, template, lambda turns: [], special, eos, bos=special[0]))
    return hf_tokenizer(str(folder))


def trained_parts(tokenizer, turns):
    """The text of every run of tokens that is trained on."""
    tokens, mask = tokenizer.tokenize_messages(messages_of(turns))
    parts = [[]]
    for token, masked in zip(tokens, mask, strict=True):
        if not masked:
            parts[-1].append(token)
        elif parts[-1]:
            parts.append([])
    return [tokenizer.decode(part, skip_special_tokens=False) for part in parts if part]


@pytest.mark.parametrize("family", FAMILIES)
def test_exactly_the_model_output_is_trained_on(family, tmp_path):
    tokenizer = make(family, tmp_path)
    _, ends, never = FAMILIES[family]
    tried = 0
    for kind in KINDS:
        turns, words = conversation(kind)
        try:
            text = tokenizer.render_template(messages_of(turns))
        except DataError:  # the template takes no such conversation
            continue
        calls = itertools.chain.from_iterable(turn.get("tool_calls", []) for turn in turns)
        if not all(call["function"]["name"] in text for call in calls):
            with pytest.raises(DataError, match=r"writes \d of the \d tool_calls of turn|has no tool calls, but turn"):
                trained_parts(tokenizer, turns)
            continue
        tried += 1
        parts = trained_parts(tokenizer, turns)
        trained = "\n".join(parts)
        for word, role in words.items():
            assert (word in trained) == (role == "assistant" and word in text), (kind, word, parts)
        assert not [mark for mark in never if mark in trained], (kind, parts)
        assert all(part.endswith(tuple(ends.split())) for part in parts), (kind, parts)
        assert len(parts) >= sum(turn["role"] == "assistant" for turn in turns), (kind, parts)
    assert tried >= 6


@pytest.mark.parametrize("family", FAMILIES)
def test_generation_stops_where_turns_end(family, tmp_path):
    tokenizer = make(family, tmp_path)
    eos, ends, _ = FAMILIES[family]
    expected = {tokenizer.special_tokens[end] for end in {eos, *ends.split()} - {"<|end|>"}}
    assert set(tokenizer.stop_tokens) == expected


def small_tokenizer(folder, name, special):
    """A small tokenizer with a published template that has other special tokens than a family of ``FAMILIES``."""
    source = (PUBLISHED / f"{name}.jinja").read_text()
    write_checkpoint(folder, Case(name, source, lambda turns: [], special, special[-1], bos=special[0]))
    return hf_tokenizer(str(folder))


LLAMA = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize(
    ("name", "special", "kind", "omitted"),
    [
        ("llama3_1", LLAMA, "S U XC T A", ["text beside tool calls"]),
        ("llama3_1", LLAMA, "U RXC T R", ["reasoning", "text beside tool calls"]),
        ("llama3_1", LLAMA, "S U A U C T A", []),
        ("llama3", LLAMA, "U R U A", ["reasoning"]),  # of an earlier turn, but it writes none of a last turn either
        ("gptoss", SPECIAL["gptoss"].split(), "U XC T A", ["text beside tool calls"]),
        ("gptoss", SPECIAL["gptoss"].split(), "U XC", []),
        ("qwen3", SPECIAL["qwen3_6"].split(), "U R U R", []),  # of earlier turns: the policy `reasoning`
        ("qwen2_5", SPECIAL["qwen3_6"].split(), "U RC T R", ["reasoning"]),
    ],
)
def test_texts_that_the_template_leaves_out_are_named(name, special, kind, omitted, tmp_path):
    tokenizer = small_tokenizer(tmp_path, name, special)
    messages = messages_of(conversation(kind)[0])
    tokenizer.tokenize_messages(messages)
    assert tokenizer.take_omitted() == omitted
    assert tokenizer.take_omitted() == []


def test_reasoning_in_the_text_that_the_template_cuts_off_is_named(tmp_path):
    """The template of the distilled DeepSeek R1 cuts everything before ``</think>``, of the last turn, too."""
    tokenizer = small_tokenizer(tmp_path, "deepseek_r1_distill", ["<s>", "</s>"])
    for thought, omitted in (("because", ["reasoning"]), ("", [])):
        answer = {"role": "assistant", "content": f"<think>\n{thought}\n</think>\n\nso"}
        tokenizer.tokenize_messages(messages_of([{"role": "user", "content": "Why?"}, answer]))
        assert tokenizer.take_omitted() == omitted


def test_tools_that_the_template_leaves_out_are_named(tmp_path):
    messages = messages_of(conversation("U A")[0])
    for name, omitted in (("llama3", ["tool definitions"]), ("llama3_1", [])):
        tokenizer = small_tokenizer(tmp_path / name, name, LLAMA)
        tokenizer.tokenize_messages(messages, tools=[TOOL])
        assert tokenizer.take_omitted() == omitted


ANSWERS_ONLY = (
    "{% for m in messages %}{% if m.role != 'system' %}{{ '<|im_start|>' + m.role + '\n' + "
    "(m.content if m.role == 'user' else m.get('answer', '')) + '<|im_end|>\n' }}{% endif %}{% endfor %}"
)


def test_an_answer_whose_text_the_template_leaves_out_is_refused(tmp_path):
    """Its end of turn alone would be trained on."""
    special = SPECIAL["qwen3_6"].split()
    write_checkpoint(tmp_path, Case("answers", ANSWERS_ONLY, lambda turns: [], special, "<|im_end|>"))
    tokenizer = hf_tokenizer(str(tmp_path))
    messages = messages_of(conversation("S U A U A")[0])
    with pytest.raises(DataError, match=r"writes nothing of the text of turn 2 \(assistant\)"):
        tokenizer.tokenize_messages(messages)
    for message in messages:
        message.masked = True
    tokenizer.take_omitted()
    tokenizer.tokenize_messages(messages)
    assert tokenizer.take_omitted() == ["system text", "text of assistant turns"]
    tokenizer({"messages": messages}, inference=True)  # a prompt
    assert tokenizer.take_omitted() == ["system text", "text of assistant turns"]


@pytest.mark.parametrize("family", ["gemma4", "gemma4_v5"])
@pytest.mark.parametrize("kind", ["U XC T A", "U XC T XC T A", "U XCC T U A", "S U RXC T R"])
def test_a_text_beside_a_call_is_trained_where_no_special_token_ends_the_call(family, kind, tmp_path):
    """Gemma 4 writes the text behind the tool's answer; here, only the ends of turns are special tokens."""
    special = ["<bos>", "<eos>", "<|turn>", "<turn|>"]
    source = (PUBLISHED / f"{family}.jinja").read_text()
    write_checkpoint(tmp_path, Case(family, source, lambda turns: [], special, "<eos>", bos="<bos>"))
    tokenizer = hf_tokenizer(str(tmp_path))
    turns, words = conversation(kind)
    trained = "\n".join(trained_parts(tokenizer, turns))
    text = tokenizer.render_template(messages_of(turns))
    assert {word for word in words if word in trained} == {
        word for word, role in words.items() if role == "assistant" and word in text
    }
    assert "response:" not in trained


CALLS_WITH_ANOTHER_END = """
{%- for m in messages %}<|role|>{{ m.role }} {{ m.content }}
{%- for call in m.tool_calls or [] %}<|call|>{{ call.function.name }}<|/call|>{% endfor %}
{%- if m.tool_calls and loop.nextitem and loop.nextitem.role == "tool" %}<|eom|>{% else %}<|eot|>{% endif %}
{%- endfor %}{% if add_generation_prompt %}<|role|>assistant {% endif %}"""


def test_end_of_a_call_before_its_result_is_learned_from_another_continuation(tmp_path):
    """No config file names it, and another special token stands before it."""
    special = ["<|endoftext|>", "<|role|>", "<|call|>", "<|/call|>", "<|eom|>", "<|eot|>"]
    write_checkpoint(tmp_path, Case("ends", CALLS_WITH_ANOTHER_END, lambda turns: [], special, "<|endoftext|>"))
    parts = trained_parts(hf_tokenizer(str(tmp_path)), conversation("U C T A")[0])
    assert [re.sub(r"zq\w+", "W", part) for part in parts] == ["<|call|>W<|/call|><|eom|>", "Say W loud<|eot|>"]


@pytest.mark.parametrize("template", ["smolvlm_training", "idefics3_training", "llava_next"])
def test_a_text_reaches_a_template_that_reads_parts(template, tmp_path):
    end = "</s>" if template == "llava_next" else "<end_of_utterance>"
    source = (PUBLISHED / f"{template}.jinja").read_text()
    write_checkpoint(tmp_path, Case(template, source, lambda turns: [], ["<|im_start|>", end], end))
    tokenizer = hf_tokenizer(str(tmp_path))
    turns, _ = conversation("S U A U A")
    assert all(turn["content"] in tokenizer.render_template(turns) for turn in turns)
    answers = [f" {turns[i]['content']}{end}" for i in (2, 4)]
    assert [part.rstrip("\n") for part in trained_parts(tokenizer, turns)] == answers


def test_a_text_behind_the_answer_of_a_tool_is_a_part_of_its_turn(tmp_path):
    """Gemma 4 writes the text that accompanies a call behind the tool's answer."""
    turns, _ = conversation("U XC T A")
    parts = trained_parts(make("gemma4", tmp_path), turns)
    assert [re.sub(r"zq\w+", "W", part) for part in parts] == [
        '<|tool_call>call:W{city:<|"|>W<|"|>,days:3}<tool_call|><|tool_response>',
        "Say W loud<turn|>",
        "Say W loud<turn|>",
    ]


def test_a_call_that_the_template_leaves_out_is_refused(tmp_path):
    tokenizer = make("cohere2", tmp_path)
    turns, _ = conversation("U C")
    with pytest.raises(DataError, match=r"has no tool calls, but turn 1 has 1: .* the tokenizer's chat_template"):
        tokenizer.tokenize_messages(messages_of(turns))
    messages = messages_of(turns)
    messages[1].masked = True
    assert all(tokenizer.tokenize_messages(messages)[1])


def test_a_turn_that_the_template_leaves_out_is_refused(tmp_path):
    template = (
        "{% for m in messages %}{% if m.content != 'no' %}{{ '<|im_start|>' + m.role + '\n' + m.content "
        "+ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    )
    special = SPECIAL["qwen3_6"].split()
    write_checkpoint(tmp_path, Case("gaps", template, lambda turns: [], special, "<|im_end|>"))
    turns = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "no"), ("user", "b"))]
    with pytest.raises(DataError, match=r"writes nothing for turn 1|cannot tell which part"):
        hf_tokenizer(str(tmp_path)).tokenize_messages(messages_of(turns))


@pytest.mark.parametrize("family", ["qwen3_6", "glm4moe"])
@pytest.mark.parametrize("round_", ["U A", "U RC T A"])
def test_rendering_grows_with_the_turns(family, round_, tmp_path, monkeypatch):
    """No turn is rendered once for every other: 600 turns take few renderings, most of them short."""
    tokenizer = make(family, tmp_path)
    rendered = []
    render = ChatTemplate.render
    monkeypatch.setattr(
        ChatTemplate, "render", lambda self, turns, **more: rendered.append(len(turns)) or render(self, turns, **more)
    )
    turns, _ = conversation(" ".join([round_] * 150))
    trained = "\n".join(trained_parts(tokenizer, turns))
    assert trained.count("loud") == 150
    assert sum(rendered) < 12 * len(turns)


def test_layout_of_conversations_with_equal_roles_is_learned_once(monkeypatch):
    template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}", {})
    renderings = []
    render = ChatTemplate.render
    monkeypatch.setattr(
        ChatTemplate, "render", lambda self, turns, **more: renderings.append(turns) or render(self, turns, **more)
    )
    cache = LayoutCache(["<end>"], ["<end>"])
    num_renderings = []
    for question, answer in (("Why?", "So."), ("How many?", "one two")):
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        text = f"<user>{question}<end><assistant>{answer}<end>"
        ((start, end),) = cache.spans(template, turns, text, [True, False])
        assert text[start:end] == f"<assistant>{answer}<end>"
        num_renderings.append(len(renderings))
    assert num_renderings[0] == num_renderings[1] > 0


def test_rows_of_alpaca_are_rendered_once(tmp_path, monkeypatch):
    """Their prompts end in a line break, which the template writes as it is."""
    tokenizer = small_tokenizer(tmp_path, "qwen3", SPECIAL["qwen3_6"].split())
    rows = [{"instruction": "Count.", "output": "one two"}, {"instruction": "Ask.", "input": "", "output": "Why?"}]
    conversations = [AlpacaToMessages()(row)["messages"] for row in rows]
    assert all(messages[0].text_content.endswith("\n") for messages in conversations)
    tokenizer.tokenize_messages(conversations[0])  # learns the layout
    rendered = []
    render = ChatTemplate.render
    monkeypatch.setattr(
        ChatTemplate, "render", lambda self, turns, **more: rendered.append(turns) or render(self, turns, **more)
    )
    tokenizer.tokenize_messages(conversations[1])
    assert len(rendered) == 1


WHITE_SPACE = ["Say it\n", "Say it \t", "\n Say it", " Say it\n\n", "\u00a0Say it\u2028", "<b>Say it</b>\n", " \n"]
# An answer without a token that ends it, before another header.
OPEN_ANSWERS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
TEMPLATES = {case.name: (case.template, case.special, case.eos) for case in CASES}
TEMPLATES["open answers"] = (OPEN_ANSWERS + "{% if add_generation_prompt %}assistant:{% endif %}", [], "</s>")
for _file in PUBLISHED.glob("*.jinja"):
    _special = SPECIAL.get(_file.stem.split("_training")[0], "<|im_start|> <|im_end|> <|eot_id|> <|end|>")
    TEMPLATES[f"published {_file.stem}"] = (_file.read_text(), [*_special.split(), "</s>"], "</s>")


@pytest.mark.parametrize("name", TEMPLATES)
def test_learned_layout_gives_the_spans_of_the_turns_also_around_white_space(name):
    source, special, eos = TEMPLATES[name]
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": eos})
    _, stops = learn_stops(template, special, [eos])
    stops = list(dict.fromkeys([*stops, eos]))
    cache = LayoutCache(stops, special)
    roles = ["user", "assistant", "user", "assistant"]
    for index, text in itertools.product(range(4), WHITE_SPACE):
        turns = [{"role": role, "content": f"Turn {i} here"} for i, role in enumerate(roles)]
        turns[index]["content"] = text
        try:
            rendered, generated = template.render(turns)
        except DataError:  # the template takes no such conversation
            continue
        for masked in ([True, False, True, False], [False] * 4):
            spans = cache.spans(template, turns, rendered, masked)
            if spans is not None and not generated:
                finder = TurnFinder(template, turns, rendered, stops, special)
                assert spans == finder.trained(masked, generated), (turns, masked)
                assert not finder.omitted()
