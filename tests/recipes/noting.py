"""An environment whose tool a random model calls by chance, and the format of its calls."""

import time
from typing import Any

from torchtune.rlhf.environments import FORMATS, CallError, ToolCall


def by_length(text: str, schemas: Any) -> list[ToolCall]:
    """A format for random text: some of it answers, some cannot be parsed, the rest calls a tool."""
    if len(text) % 5 == 4:
        raise CallError("too long by one")
    return [ToolCall("note", {"text": text})] if len(text) % 3 else []


FORMATS["by_length"] = by_length
# Every sixth token ends a turn, so that a random model ends most of them.
STOP = list(range(0, 300, 6))


class Notes:
    """Replies with how much was noted so far, and rewards it."""

    def __init__(self, pause: float = 0.0) -> None:
        self.pause = pause
        self.notes = []

    def reset(self, seed: int, start: str = "nothing") -> str:
        self.notes = [start]
        self.seed = seed
        return f" Begin with {start}."

    def note(self, text: str) -> str:
        """Note a text."""
        time.sleep(self.pause * (len(text) % 4))
        self.notes.append(text)
        return f"{len(self.notes)} notes"

    def get_reward(self) -> float:
        return float(len(self.notes))
