"""Whatever stands in a row, it is read, or refused with a sentence: never with a traceback."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from torchtune.data import (
    AlpacaToMessages,
    ChosenRejectedToMessages,
    DataError,
    InputOutputToMessages,
    OpenAIToMessages,
    ShareGPTToMessages,
)
from torchtune.datasets import LabelledAnswerToMessages, format_of
from torchtune.datasets._file_report import FileFacts, _inspect

USER = {"role": "user", "content": "x"}
ANSWER = {"role": "assistant", "content": "y"}
CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
CASES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "openai": (
        {
            "messages": [USER, {**ANSWER, "tool_calls": [CALL]}, {"role": "tool", "content": "r"}, ANSWER],
            "tools": [CALL],
        },
        OpenAIToMessages(),
    ),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]},
        ShareGPTToMessages(),
    ),
    "instruct": ({"input": "a", "output": "b"}, InputOutputToMessages()),
    "alpaca": ({"instruction": "a", "input": "", "output": "b"}, AlpacaToMessages()),
    "pairs": ({"chosen": [USER, ANSWER], "rejected": [USER, ANSWER]}, ChosenRejectedToMessages()),
    "answers to a prompt": ({"prompt": "p", "chosen": "a", "rejected": "b"}, ChosenRejectedToMessages()),
    "labelled": ({"prompt": [USER], "completion": "a", "label": True}, LabelledAnswerToMessages()),
}
WEIRD = [
    None, 5, 1.5, True, "", [], {}, [5], ["s"], [None], {"a": 1}, [[]], [{}], [{"type": "text"}],
    [{"type": "text", "text": 5}], [{"type": "text", "content": None}], [{"type": "image_url"}],
    [{"type": "image_url", "image_url": "u"}], float("nan"), 10**30,
]  # fmt: skip


def places(value, path=()):
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


@pytest.mark.parametrize("case", CASES)
def test_hostile_row_is_read_or_refused_in_one_sentence(case):
    row, transform = CASES[case]
    num_read = refused = 0
    for *way, last in places(row):
        for weird in WEIRD:
            changed = copy.deepcopy(row)
            inner = changed
            for key in way:
                inner = inner[key]
            inner[last] = weird
            _inspect(FileFacts("rows.jsonl"), 1, changed, format_of(changed), {})
            try:
                sample = transform(changed)
                for messages in (value for value in sample.values() if isinstance(value, list) and value):
                    assert all(isinstance(getattr(turn, "text_content", ""), str) for turn in messages)
                num_read += 1
            except DataError:
                refused += 1
    assert refused > num_read / 2
