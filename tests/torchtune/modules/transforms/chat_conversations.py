"""Conversations that every chat template is tried with."""

from typing import Any

from tests.torchtune.modules.transforms.chat_case import Turns


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
