"""What a chat template is tried with: its text, its truth written out in Python, its special tokens.

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
    truth: Callable[..., Pieces]  # of the turns and, where the template shows them, the tools
    special: list[str]
    eos: str
    bos: str | None = None
    system: bool = True
    tool: bool = False  # takes turns of tools that nothing calls by tool_calls
    calls: bool = False  # takes structured tool_calls
    one_call: bool = False  # writes the first call of a turn alone
    shows_tools: bool = False
    reasoning: str | None = None  # field of a turn that holds reasoning
    closes: bool = True  # every assistant turn ends with a special token of its own
    plain: list[str] = field(default_factory=list)  # added tokens that are not special
    takes_spaces: list[str] = field(default_factory=list)  # special tokens that take the white space behind them
    stops: list[str] = field(default_factory=list)  # what generation_config.json names
    ends: list[str] = field(default_factory=list)  # of turns that another follows, where generation does not stop
    switches: dict[str, Any] = field(default_factory=dict)


def assistant(turn: dict[str, Any]) -> bool:
    return turn["role"] == "assistant"


def blocks(before: str, between: str, after: str, rest: str = "\n", strip: bool = False) -> Callable[..., Pieces]:
    """``{before}{role}{between}{text}{after}{rest}`` for every turn."""

    def truth(turns: Turns) -> Pieces:
        pieces: Pieces = []
        for turn in turns:
            text = turn["content"].strip() if strip else turn["content"]
            pieces += [(f"{before}{turn['role']}{between}", False), (text + after, assistant(turn)), (rest, False)]
        return pieces

    return truth


def with_default(system: str, truth: Callable[..., Pieces]) -> Callable[..., Pieces]:
    def defaulted(turns: Turns) -> Pieces:
        first = [] if turns[0]["role"] == "system" else [{"role": "system", "content": system}]
        return truth(first + turns)

    return defaulted


def prefixed(prefix: str, truth: Callable[..., Pieces]) -> Callable[..., Pieces]:
    return lambda turns: [(prefix, False), *truth(turns)]
