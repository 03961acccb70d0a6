"""Policies for the reasoning of earlier turns: strip, keep and split."""

import importlib.util
import itertools
from pathlib import Path

import numpy as np
import pytest

from tests.tiny import CHATS, OPENAI, write_lines, write_tokenizer
from torchtune.data import DataError, OpenAIToMessages
from torchtune.datasets import PackedDataset, chat_dataset, preparing
from torchtune.tokenizers import hf_tokenizer

# Published templates; each writes reasoning only after the last question.
TEMPLATES = Path(importlib.util.find_spec("trl").submodule_search_locations[0]) / "chat_templates"
STRIPPING = ["qwen3", "glm4moe", "nemotron_3_nano"]
CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "cat"}}}
TURNS = [
    {"role": "user", "content": "red cat?"},
    {"role": "assistant", "content": "blue", "reasoning_content": "one two"},
    {"role": "user", "content": "green?"},
    {"role": "assistant", "content": "the bird", "reasoning_content": "three"},
    {"role": "user", "content": "why?"},
    {"role": "assistant", "content": "so", "reasoning_content": "dog"},
]
WITH_CALL = [
    TURNS[0],
    {"role": "assistant", "content": "", "reasoning_content": "one two", "tool_calls": [CALL]},
    {"role": "tool", "content": "found"},
    {"role": "assistant", "content": "blue", "reasoning_content": "big"},
    *TURNS[2:4],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return folder


def make(folder, policy, template="qwen3", **options):
    source = TEMPLATES / f"{template}.jinja"
    return hf_tokenizer(str(folder), chat_template=str(source), reasoning=policy, **options)


def messages(turns):
    return OpenAIToMessages()({"messages": turns})["messages"]


def parts(tokenizer, turns, **options):
    """The whole text of a conversation, and its trained passages."""
    tokens, mask = tokenizer.tokenize_messages(messages(turns), **options)
    edges = np.flatnonzero(np.diff([1, *mask, 1])).reshape(-1, 2)
    decode = lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False)  # noqa: E731
    return decode(tokens), [decode(tokens[start:end]) for start, end in edges]


def test_reasoning_policies_write_the_expected_text(folder):
    """Written out for Qwen 3: the layout of a last turn is that of its model card."""

    def turn(role, text):
        return f"<|im_start|>{role}\n{text}<|im_end|>\n"

    think = "<think>\n{}\n</think>\n\n".format
    asked = [turn("user", text) for text in ("red cat?", "green?", "why?")]
    stripped = [turn("assistant", "blue"), turn("assistant", "the bird")]
    last_turns = [turn("assistant", f"{think('one two')}blue"), turn("assistant", f"{think('three')}the bird")]
    last = turn("assistant", f"{think('dog')}so")
    text, trained = parts(make(folder, "strip"), TURNS)
    assert text == asked[0] + stripped[0] + asked[1] + stripped[1] + asked[2] + last
    assert trained == ["blue<|im_end|>", "the bird<|im_end|>", f"{think('dog')}so<|im_end|>"]
    text, trained = parts(make(folder, "keep"), TURNS)
    assert text == asked[0] + last_turns[0] + asked[1] + last_turns[1] + asked[2] + last
    assert trained == [f"{think(why)}{expected_text}<|im_end|>" for why, expected_text in
                       (("one two", "blue"), ("three", "the bird"), ("dog", "so"))]  # fmt: skip
    split = make(folder, "split")
    samples = split.conversations(messages(TURNS))
    tokens = [split.tokenize_messages(sample) for sample in samples]
    texts = [split.decode(ids, skip_special_tokens=False) for ids, _ in tokens]
    assert texts == [
        asked[0] + last_turns[0],
        asked[0] + stripped[0] + asked[1] + last_turns[1],
        asked[0] + stripped[0] + asked[1] + stripped[1] + asked[2] + last,
    ]
    for (ids, mask), expected_text in zip(tokens, trained, strict=True):
        labels = [token for token, masked in zip(ids, mask, strict=True) if not masked]
        assert split.decode(labels, skip_special_tokens=False) == expected_text, (
            "each answer is trained once, as it is written"
        )


@pytest.mark.parametrize("template", STRIPPING)
@pytest.mark.parametrize("turns", [TURNS, WITH_CALL], ids=["answers", "calls"])
def test_kept_turns_are_those_that_the_model_wrote(folder, template, turns):
    """Prompt and answer of every turn, as they are when it is generated, begin the training row of `keep`."""
    keep = make(folder, "keep", template)
    row, mask = keep.tokenize_messages(messages(turns))
    assert "think" in keep.decode(row, skip_special_tokens=False)
    trained = set(np.flatnonzero(~np.array(mask)).tolist())
    for i, turn in enumerate(turns):
        if turn["role"] != "assistant":
            continue
        prompt, _ = keep.tokenize_messages(messages(turns[:i]), add_end_tokens=False)
        answered, answer_mask = keep.tokenize_messages(messages(turns[: i + 1]))
        end = max(np.flatnonzero(~np.array(answer_mask)))  # without the stop token, which GLM writes as the next role
        assert row[:end] == answered[:end]
        if row[: len(prompt)] == prompt:
            assert min(position for position in trained if position >= len(prompt)) >= len(prompt)
            assert not trained.intersection(range(len(prompt) - 2, len(prompt))), "the prompt is no label"


def test_rows_without_earlier_reasoning_are_the_same_under_every_policy(folder):
    plain = [{"role": turn["role"], "content": turn["content"]} for turn in TURNS]
    for turns in (plain, TURNS[:2]):
        rows = [make(folder, policy).tokenize_messages(messages(turns)) for policy in ("strip", "keep", "split")]
        assert rows[0] == rows[1] == rows[2]
        assert len(make(folder, "split").conversations(messages(turns))) == 1


def test_think_tags_in_a_text_are_reasoning(folder):
    """``<think>`` in a turn's text is reasoning, too."""
    inside = []
    for turn in TURNS:
        content = turn["content"]
        if "reasoning_content" in turn:
            content = f"<think>\n{turn['reasoning_content']}\n</think>\n\n{content}"
        inside.append({"role": turn["role"], "content": content})
    keep = make(folder, "keep")
    assert keep.tokenize_messages(messages(inside)) == keep.tokenize_messages(messages(TURNS))


def test_keep_is_refused_where_the_template_writes_no_reasoning(folder):
    with pytest.raises(DataError, match="reasoning is 'all': use one of strip, keep, split"):
        make(folder, "all")
    never = hf_tokenizer(str(folder), reasoning="keep")  # its template does not know reasoning
    with pytest.raises(DataError, match=r"writes no reasoning for turn 1 \(assistant\)"):
        never.tokenize_messages(messages(TURNS))
    with pytest.raises(DataError, match="leave streaming out"):
        dataset(folder, [], streaming=True)


def dataset(folder, rows, policy="split", **options):
    source = str(write_lines(folder / "rows.jsonl", [{"messages": turns} for turns in rows]))
    tokenizer = make(folder, policy, max_seq_len=options.pop("max_seq_len", 256))
    return chat_dataset(tokenizer, source=source, **OPENAI, **options)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHTUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))


@pytest.mark.usefixtures("cache")
def test_split_rows_keep_their_origins_when_cached_or_prepared(folder, tmp_path):
    rows = [TURNS[:2], TURNS, TURNS[:4]]
    data = dataset(folder, rows)
    assert len(data) == 1 + 3 + 2
    origins = itertools.chain.from_iterable(data.origins(i) for i in range(6))
    assert [origin["row"] for origin in origins] == [0, 1, 1, 1, 2, 2]
    again = dataset(folder, rows)  # from the cache
    assert [again[i] for i in range(6)] == [data[i] for i in range(6)]
    assert [again.origins(i) for i in range(6)] == [data.origins(i) for i in range(6)]
    with preparing(tmp_path / "prepared"):
        dataset(folder, rows)
    prepared = dataset(folder, rows, prepared=str(tmp_path / "prepared"))
    assert [prepared[i] for i in range(6)] == [data[i] for i in range(6)]
    with pytest.raises(DataError, match=r"they were made with .*reasoning"):
        dataset(folder, rows, policy="keep", prepared=str(tmp_path / "prepared"))
    packed = dataset(folder, rows, packed=True)
    assert isinstance(packed, PackedDataset)
    assert sum(len(packed[i]) for i in range(len(packed))) == 6
    assert len(dataset(folder, rows, policy="keep")) == 3


@pytest.mark.usefixtures("cache")
def test_samples_that_are_cut_before_their_answer_are_left_out(folder):
    data = dataset(folder, [TURNS], max_seq_len=60)
    assert 1 <= len(data) < 3
    for sample in data:
        assert set(sample["labels"]) != {-100}


@pytest.mark.usefixtures("cache")
def test_data_show_counts_the_rows_that_a_policy_changes(folder, capsys):
    from torchtune._cli._data_show import show_dataset

    dataset(folder, [TURNS, TURNS[:2], WITH_CALL])
    node = {**CHATS, "source": str(folder / "rows.jsonl")}
    for policy, message in (("strip", "keep changes 2 rows, split changes 2 rows"), ("keep", "strip changes 2 rows")):
        show_dataset("dataset", node, make(folder, policy), 0, True, 10, longest=None)
        assert f"reasoning   {policy} is set" in (out := capsys.readouterr().out)
        assert message in out
