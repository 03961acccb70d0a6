"""Conversations that every chat template is tried with."""

import random
from typing import Any

from tests.torchtune.tokenizers.chat_case import Case, Turns


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
ARGUMENTS = {"city": "Köln", "days": 2}
TOOLS = [{"type": "function", "function": {"name": name, "description": "Größe"}} for name in ("weather", "time")]


def call(number: int = 0, **arguments: Any) -> dict[str, Any]:
    function = {"name": "weather", "arguments": {**ARGUMENTS, **arguments}}
    return {"type": "function", "id": f"call0000{number}", "function": function}


def answer(text: str, number: int = 0) -> dict[str, Any]:
    return turn("tool", text, tool_call_id=f"call0000{number}")


TOOL_CONVERSATIONS: dict[str, Turns] = {
    "tool": [
        turn("user", "Weather?"),
        turn("assistant", "I will look."),
        answer('{"sun": true}'),
        turn("assistant", "Sunny."),
    ],
    "tool, then a question": [
        SYSTEM,
        turn("user", "Weather?"),
        turn("assistant", "I will look."),
        answer('{"sun": true}'),
        turn("assistant", "Sunny."),
        *exchange("Sure?", "Yes."),
    ],
}
CALL_CONVERSATIONS: dict[str, Turns] = {
    "structured call": [
        turn("user", "Weather?"),
        turn("assistant", "", tool_calls=[call()]),
        answer("rain"),
        turn("assistant", "Rain."),
    ],
    "two structured calls": [
        turn("user", "Weather?"),
        turn("assistant", "", tool_calls=[call(), call(1, days=3)]),
        answer("rain"),
        answer("snow", 1),
        turn("assistant", "Rain."),
        *exchange("And now?", "Sun."),
    ],
    "a call is the end": [turn("user", "Weather?"), turn("assistant", "", tool_calls=[call()])],
}
PARTS = [
    "a", "b ", " c", "\n", "\n\n", "assistant", "user", "<think>", "</think>", "<", "|", "[/INST]", "im_end", "🙂",
    "é", "red", "Standin0Text", " ", "\t", "{{x}}", "<|im", "s>", "你好", "[INST]", "</s>", "<|im_end|>", "<|end|>",
]  # fmt: skip


def _text(rng: random.Random, parts: list[str]) -> str:
    return "".join(rng.choices(parts, k=rng.randint(0, 5)))


def _random(case: Case, rng: random.Random) -> Turns:
    """One conversation of the kinds that the template takes, of confusing texts."""
    parts = [*PARTS, *rng.choices(case.special, k=3)] if rng.random() < 0.6 else PARTS[:22]
    turns = [turn("system", _text(rng, parts))] if case.system and rng.random() < 0.4 else []
    for _ in range(rng.randint(1, 3)):
        turns.append(turn("user", _text(rng, parts)))
        if (case.tool or case.calls) and rng.random() < 0.3:
            calls = {"tool_calls": [call(text=_text(rng, parts))]} if case.calls else {}
            turns.append(turn("assistant", "" if case.calls else _text(rng, parts), **calls))
            turns.append(answer(_text(rng, parts)))
        turns.append(turn("assistant", _text(rng, parts)))
    if case.reasoning is not None:
        for random_turn in turns:
            if random_turn["role"] == "assistant" and rng.random() < 0.5:
                random_turn[case.reasoning] = rng.choice(["because", "two\nlines", "x <|im_end|>", "🙂"])
    return turns


def conversations(case: Case, count: int) -> list[tuple[str, Turns, list[Any] | None]]:
    """(name, turns, tools) of ``count`` conversations that the template takes, the fixed ones first."""
    fixed = {**CONVERSATIONS, **(TOOL_CONVERSATIONS if case.tool else {}), **(CALL_CONVERSATIONS if case.calls else {})}
    fixed = {name: turns for name, turns in fixed.items() if case.system or turns[0]["role"] != "system"}
    fixed = {name: turns for name, turns in fixed.items() if not (case.one_call and "two structured" in name)}
    cases = [(name, turns, None) for name, turns in fixed.items()]
    if case.shows_tools:
        cases += [(f"{name} with tools", turns, TOOLS) for name, turns in fixed.items() if "call" in name]
    rng = random.Random(case.name)
    while len(cases) < count:
        tools = TOOLS if case.shows_tools and rng.random() < 0.5 else None
        cases.append((f"random {len(cases)}", _random(case, rng), tools))
    return cases
