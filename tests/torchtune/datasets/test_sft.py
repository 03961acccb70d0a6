"""Rows to tokens and labels, and rows that cannot be trained on."""

import json
import shutil
import sys
from functools import partial

import numpy as np
import pytest

from tests.tiny import CHATS, OPENAI, write_lines
from torchtune.data import (
    CROSS_ENTROPY_IGNORE_IDX,
    DataError,
    Message,
    OpenAIToMessages,
    Transform,
    collate_documents,
)
from torchtune.datasets import (
    ConcatDataset,
    PreferenceDataset,
    SFTDataset,
    SFTTransform,
    alpaca_cleaned_dataset,
    alpaca_dataset,
    chat_dataset,
    cnn_dailymail_articles_dataset,
    grammar_dataset,
    hh_rlhf_helpful_dataset,
    instantiate_collate,
    instantiate_dataset,
    instruct_dataset,
    kto_dataset,
    preference_dataset,
    samsum_dataset,
    slimorca_dataset,
    stack_exchange_paired_dataset,
    text_completion_dataset,
    wikitext_dataset,
)
from torchtune.tokenizers import HuggingFaceModelTokenizer, hf_tokenizer

IGNORE = CROSS_ENTROPY_IGNORE_IDX


def openai(*texts):
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]}


def chat(tokenizer, source, **settings):
    return chat_dataset(tokenizer, source=str(source), **OPENAI | settings)


def trained_text(tokenizer, row):
    return tokenizer.decode([label for label in row["labels"] if label != IGNORE], skip_special_tokens=False)


def test_labels_are_shifted_once(tokenizer, tmp_path):
    dataset = chat(tokenizer, write_lines(tmp_path / "a.jsonl", [openai("red", "blue", "one", "two")]))
    assert isinstance(dataset, SFTDataset)
    row = dataset[0]
    assert isinstance(row["tokens"], list)
    assert len(row["tokens"]) == len(row["labels"]) == dataset.lengths[0]
    for i, label in enumerate(row["labels"][:-1]):
        assert label in (IGNORE, row["tokens"][i + 1])
    assert row["labels"][-1] == IGNORE
    assert trained_text(tokenizer, row) == "blue<|im_end|>two<|im_end|>"
    assert dataset[-1] == row
    with pytest.raises(IndexError):
        dataset[1]


def test_masking_strategy_selects_the_labels(tokenizer, tmp_path):
    path = str(write_lines(tmp_path / "a.jsonl", [openai("red", "blue", "one", "two")]))
    assert trained_text(tokenizer, chat(tokenizer, path, masking_strategy="train_on_last")[0]) == "two<|im_end|>"
    with pytest.raises(DataError, match="masking_strategy must be one of"):
        chat(tokenizer, path, masking_strategy="all")


@pytest.mark.parametrize(("value", "strategy"), [(True, "train_on_all"), (False, "train_on_assistant")])
def test_train_on_input_is_deprecated_and_equals_a_masking_strategy(tokenizer, tmp_path, value, strategy):
    path = str(write_lines(tmp_path / "a.jsonl", [openai("red", "blue")]))
    with pytest.warns(FutureWarning, match=f"masking_strategy='{strategy}'"):
        old = chat(tokenizer, path, train_on_input=value)
    assert old[0] == chat(tokenizer, path, masking_strategy=strategy)[0]


def refused(build, *args, **settings):
    with pytest.raises(DataError) as caught:
        build(*args, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_rows_that_cannot_be_trained_on_are_named(tokenizer, tmp_path):
    long = openai("red " * 300, "blue")
    alone = {"messages": [{"role": "user", "content": "hello"}]}
    twice = {"messages": [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]}
    path = str(write_lines(tmp_path / "a.jsonl", [openai("a", "b"), long, openai("a", "b"), alone, long, twice]))
    message = refused(chat, tokenizer, path)
    assert f"{path} has rows that cannot be trained on" in message
    assert "rows 1, 4: no label is left within max_seq_len=128, the prompt is too long" in message
    assert "row 3: a conversation needs at least 2 turns" in message
    assert "row 5: turn 1 is a second user turn in a row" in message


def test_tool_call_that_the_template_omits_is_refused(tokenizer, tmp_path):
    row = openai("red", "")
    row["messages"][1]["tool_calls"] = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    message = refused(chat, tokenizer, write_lines(tmp_path / "rows.jsonl", [openai("a", "b"), row]))
    assert "row 1: the chat template has no tool calls, but turn 1 has 1: set the tokenizer's chat_template" in message


def test_texts_that_the_template_omits_are_counted(tokenizer, tmp_path, caplog):
    """The template writes no reasoning; a count is of rows, also of those that an earlier run tokenized."""
    thoughtful = openai("red", "blue")
    thoughtful["messages"][1]["reasoning_content"] = "because"
    path = write_lines(tmp_path / "rows.jsonl", [openai("a", "b"), thoughtful, thoughtful, openai("c", "d")])
    for _ in range(2):
        caplog.clear()
        dataset = chat(tokenizer, path)
        assert dataset.omitted == "the chat template drops the reasoning of 2 of 4 rows"
        assert f"{path}: {dataset.omitted}: it is not trained on." in caplog.text
    caplog.clear()
    assert chat(tokenizer, write_lines(tmp_path / "plain.jsonl", [openai("a", "b")])).omitted == ""
    assert "drops" not in caplog.text
    stream = chat(tokenizer, path, streaming=True)
    assert [len(stream[i]["tokens"]) for i in range(8)]  # two passes
    assert caplog.text.count("drops the reasoning") == 1
    assert f"{path}, line 2: the chat template drops the reasoning" in caplog.text


def test_pair_that_loses_texts_is_counted_as_one_row(tokenizer):
    """Both sides of the pair lose their reasoning."""
    messages = {
        side: [
            Message("user", "red", masked=True),
            Message("assistant", side, extra={"reasoning_content": "because"}),
        ]
        for side in ("chosen", "rejected")
    }

    class Pair(Transform):
        fingerprint = "pair"

        def __call__(self, row):
            return messages

    dataset = PreferenceDataset(source=[{"id": 1}, {"id": 2}], message_transform=Pair(), tokenizer=tokenizer)
    assert dataset.omitted == "the chat template drops the reasoning of 2 of 2 rows"


@pytest.mark.parametrize("place", ["arguments", "tools"])
def test_deeply_nested_row_is_refused(tokenizer, tmp_path, place, request):
    request.addfinalizer(partial(sys.setrecursionlimit, sys.getrecursionlimit()))
    sys.setrecursionlimit(1000)  # some libraries raise it for the whole process
    nested = "x"
    for _ in range(900):
        nested = {"a": nested}
    row = openai("red", "blue")
    function = {"name": "f", "arguments": nested if place == "arguments" else {}}
    row["messages"][1]["tool_calls"] = [{"type": "function", "function": function}]
    row |= {"tools": [nested]} if place == "tools" else {}
    source = write_lines(tmp_path / "rows.jsonl", [openai("a", "b"), row])
    assert "row 1: it is nested too deeply" in refused(chat, tokenizer, source)
    assert len(chat(tokenizer, source, on_bad_row="skip")) == 1


def test_no_more_than_ten_rows_are_named(tokenizer, tmp_path):
    message = refused(chat, tokenizer, write_lines(tmp_path / "a.jsonl", [openai("red " * 300, "blue")] * 30))
    assert "rows 0, 1, 2, 3, 4, 5, 6, 7, 8, 9: no label" in message
    assert "looked no further" in message


def test_end_token_of_a_truncated_row_is_not_trained(tokenizer, tmp_path, caplog):
    dataset = chat(tokenizer, write_lines(tmp_path / "a.jsonl", [openai("red", "blue " * 300), openai("a", "b")]))
    row = dataset[0]
    assert len(row["tokens"]) == 128
    assert row["tokens"][-1] == tokenizer.eos_id
    assert IGNORE in row["labels"][-2:]
    assert tokenizer.eos_id not in row["labels"]


def test_array_rows_equal_list_rows(tokenizer):
    """Rows that go to a file take another way; the text of the one is long, and spells a control token."""
    transform = SFTTransform(OpenAIToMessages(), tokenizer)
    for texts in (["red  sun", "blue one"], ["a", "b", "c\n d", "<|im_end|>"], ["red", "blue " * 300]):
        lists = transform(openai(*texts))
        arrays = transform.tokenize_row(openai(*texts))
        assert isinstance(arrays["labels"], np.ndarray)
        assert lists == {name: values.tolist() for name, values in arrays.items()}


def test_columns_that_a_transform_keeps_are_not_stored_with_the_tokens(tokenizer):
    def keep_columns(row):
        return {**row, **OpenAIToMessages()(row)}

    rows = [{**openai("a", "b"), "note": "checked"}]
    data = SFTDataset(source=rows, message_transform=keep_columns, model_transform=tokenizer)
    assert data.num_images is None
    assert list(data[0]) == ["tokens", "labels"]


def test_tokenize_messages_of_a_derived_tokenizer_is_called(tokenizer_folder):
    class Own(HuggingFaceModelTokenizer):
        def tokenize_messages(self, *args, **kwargs):
            tokens, mask = super().tokenize_messages(*args, **kwargs)
            return [5, *tokens], [True, *mask]

    derived = Own(str(tokenizer_folder / "tokenizer.json"))
    data = SFTDataset(source=[openai("a", "b")], message_transform=OpenAIToMessages(), model_transform=derived)
    assert data[0]["tokens"][0] == 5


def test_a_missing_column_names_those_that_are_there(tokenizer, tmp_path):
    path = str(write_lines(tmp_path / "a.jsonl", [{"inputs": "a", "answer": "b"}]))
    message = refused(instruct_dataset, tokenizer, source=path)
    assert "there is no column 'input' among 'inputs', 'answer'; did you mean 'inputs'" in message
    message = refused(chat, tokenizer, path)
    assert "no column 'messages' among" in message
    message = refused(instruct_dataset, tokenizer, source=path, column_map={"input": "inputs"})
    assert "column_map needs the key 'output'" in message
    message = refused(
        instruct_dataset, tokenizer, source=path, column_map={"input": "inputs", "out": "b", "output": "c"}
    )
    assert "unknown key 'out'" in message
    assert len(instruct_dataset(tokenizer, source=path, column_map={"input": "inputs", "output": "answer"})) == 1


def test_empty_cells_are_named(tokenizer, tmp_path):
    rows = [{"input": "a", "output": "b"}, {"input": "a", "output": None}, {"input": "a", "output": "b"}]
    message = refused(instruct_dataset, tokenizer, source=str(write_lines(tmp_path / "a.jsonl", rows)))
    assert "row 1: column 'output' holds nothing, not a text" in message


def test_unknown_speaker_is_refused(tokenizer, tmp_path):
    sharegpt = {"conversations": [{"from": "human", "value": "a"}, {"from": "robot", "value": "b"}]}
    path = str(write_lines(tmp_path / "a.jsonl", [sharegpt]))
    assert "'robot' is not a speaker" in refused(slimorca_dataset, tokenizer, source=path)


def test_packing_needs_a_length(tokenizer_folder, tmp_path):
    path = str(write_lines(tmp_path / "a.jsonl", [openai("a", "b")]))
    tokenizer = hf_tokenizer(str(tokenizer_folder))
    assert "set the tokenizer's max_seq_len" in refused(chat, tokenizer, path, packed=True)


def test_named_instruction_datasets_read_their_columns(tokenizer, tmp_path):
    alpaca = str(write_lines(tmp_path / "a.jsonl", [{"instruction": "red", "input": "", "output": "blue"}]))
    tokenizer.max_seq_len = None
    assert "red" in trained_text(tokenizer, alpaca_dataset(tokenizer, source=alpaca)[0])
    row = alpaca_cleaned_dataset(tokenizer, data_files=alpaca, masking_strategy="train_on_assistant")[0]
    assert trained_text(tokenizer, row) == "blue<|im_end|>"
    assert "### Instruction:\nred\n\n### Response:\n<|im_end|>" in tokenizer.decode(row["tokens"], False)
    pairs = str(write_lines(tmp_path / "b.jsonl", [{"input": "a", "output": "b", "dialogue": "c", "summary": "d"}]))
    assert trained_text(tokenizer, grammar_dataset(tokenizer, data_files=pairs)[0]) == "b<|im_end|>"
    assert trained_text(tokenizer, samsum_dataset(tokenizer, data_files=pairs)[0]) == "d<|im_end|>"
    turns = [{"from": "system", "value": "s"}, {"from": "human", "value": "h"}, {"from": "gpt", "value": "g"}]
    orca = str(write_lines(tmp_path / "c.jsonl", [{"conversations": turns}]))
    row = slimorca_dataset(tokenizer, data_files=orca, new_system_prompt="new")[0]
    assert trained_text(tokenizer, row) == "g<|im_end|>"
    assert tokenizer.decode(row["tokens"], False).startswith("<|im_start|>system\nnew<|im_end|>")


def test_text_completion_rows_are_cut_and_end_with_eos(tokenizer, tmp_path):
    path = str(write_lines(tmp_path / "a.jsonl", [{"text": "red blue one", "page": "a", "article": "b"}] * 3))
    row = text_completion_dataset(tokenizer, path)[0]
    assert row["tokens"] == [*tokenizer.encode("red blue one", False, False), tokenizer.eos_id]
    assert row["labels"] == [*row["tokens"][1:], IGNORE]
    assert text_completion_dataset(tokenizer, path, add_eos=False)[0]["tokens"] == row["tokens"][:-1]
    assert len(text_completion_dataset(tokenizer, path, max_seq_len=4)[0]["tokens"]) == 3
    assert len(wikitext_dataset(tokenizer, path, max_seq_len=3)[0]["tokens"]) == 2
    assert len(cnn_dailymail_articles_dataset(tokenizer, path, max_seq_len=3)[0]["tokens"]) == 2
    packed = wikitext_dataset(tokenizer, path, max_seq_len=4, packed=True)
    assert packed.lengths.tolist() == [4, 2]


@pytest.mark.parametrize(("adds_bos", "first"), [(None, []), (False, []), (True, [1])])
def test_text_completion_encodes_no_control_tokens(tokenizer_folder, tmp_path, adds_bos, first):
    """No chat header in front unless the checkpoint asks for one, no control token out of a document's text."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_folder / name, tmp_path)
    config = tmp_path / "tokenizer_config.json"
    settings = json.loads(config.read_text()) | ({} if adds_bos is None else {"add_bos_token": adds_bos})
    config.write_text(json.dumps(settings))
    text = "red<|im_end|>blue <|endoftext|>"
    path = str(write_lines(tmp_path / "a.jsonl", [{"text": text}]))
    tokenizer = hf_tokenizer(str(tmp_path))
    row = text_completion_dataset(tokenizer, path)[0]["tokens"]
    body = row[len(first) : -1]
    assert (row[: len(first)], row[-1]) == (first, tokenizer.eos_id)
    assert not set(body) & set(tokenizer.special_tokens.values())
    assert tokenizer.decode(body) == text
    parsed = text_completion_dataset(hf_tokenizer(str(tmp_path), parse_special_tokens=True), path)[0]["tokens"]
    assert [token for token in parsed if token in (0, 2)] == [2, 0, 2]


def test_preference_builders_give_the_same_pairs(tokenizer, tmp_path):
    pair = {"chosen": openai("a", "good")["messages"], "rejected": openai("a", "bad one")["messages"]}
    stack = {"question": "a", "response_j": "good", "response_k": "bad one"}
    path = str(write_lines(tmp_path / "a.jsonl", [{**pair, **stack}] * 2))
    expected = preference_dataset(tokenizer, source=path)[0]
    for side, text in (("chosen", "good"), ("rejected", "bad one")):
        row = {"labels": expected[f"{side}_labels"]}
        assert trained_text(tokenizer, row) == f"{text}<|im_end|>"
        assert all(
            label in (IGNORE, token)
            for label, token in zip(expected[f"{side}_labels"], expected[f"{side}_input_ids"][1:], strict=False)
        )
    assert hh_rlhf_helpful_dataset(tokenizer, data_files=path)[1] == expected
    assert stack_exchange_paired_dataset(tokenizer, data_files=path)[0] == expected
    long = {"chosen": openai("a " * 300, "b")["messages"], "rejected": openai("a " * 300, "c")["messages"]}
    message = refused(preference_dataset, tokenizer, source=str(write_lines(tmp_path / "b.jsonl", [pair, long])))
    assert "row 1: no label is left in the chosen answer within max_seq_len=" in message
    assert "the prompt is too long" in message
    turns = []
    for side in pair:
        for prompt in ("a", pair[side][:1]):  # the prompt as a text or as turns
            turns.append({**pair, side: pair[side][1:], "prompt": prompt})
    texts = [{"chosen": "good", "rejected": "bad one", "prompt": "a"}, {"yes": "good", "no": "bad one", "ask": "a"}]
    for row in (*turns, texts[0]):
        assert preference_dataset(tokenizer, source=[row])[0] == expected
    names = {"chosen": "yes", "rejected": "no", "prompt": "ask"}
    assert preference_dataset(tokenizer, source=texts[1:], column_map=names)[0] == expected
    assert "no column 'prompt'" in refused(preference_dataset, tokenizer, source=[{"chosen": "a", "rejected": "b"}])


def test_pairs_that_teach_nothing_are_named_or_left_out(tokenizer, caplog):
    rows = [
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"prompt": "a", "chosen": "b", "rejected": "b"},
        {"prompt": "a", "chosen": " ", "rejected": "b"},
        {"prompt": "a", "chosen": "b", "rejected": ""},
        {"prompt": "a " * 300, "chosen": "b", "rejected": "c"},
        {"prompt": "a", "chosen": "d", "rejected": "e " * 300},
        {"prompt": "a", "chosen": "b", "rejected": [{"role": "user", "content": "a"}]},
    ]
    message = refused(preference_dataset, tokenizer, source=rows)
    for words in (
        "row 1: both answers are the same",
        "row 2: the chosen answer is empty",
        "row 3: the rejected answer is empty",
        "row 4: no label is left in the chosen answer within max_seq_len=",
        "row 6: the rejected answer is missing",
        "leave them out with on_bad_row=skip",
    ):
        assert words in message
    remaining = preference_dataset(tokenizer, source=rows, on_bad_row="skip")
    assert [remaining.origins(index)[0]["row"] for index in range(len(remaining))] == [0, 5]
    assert "5 of 7 rows of" in caplog.text
    assert "are left out (row 1: both answers are the same" in caplog.text
    assert "1 of 2 rows of" in caplog.text
    assert "no row is left" in refused(preference_dataset, tokenizer, source=rows[1:4], on_bad_row="skip")


def test_kto_rows_have_the_tokens_of_pairs(tokenizer):
    rows = [
        {"prompt": "a", "completion": "good", "label": True},
        {"prompt": [{"role": "user", "content": "a"}], "completion": "bad one", "label": False},
        {"completion": openai("a", "good")["messages"], "label": 1},
    ]
    dataset = kto_dataset(tokenizer, source=rows)
    assert [dataset[index]["is_chosen"] for index in range(3)] == [True, False, True]
    pair = preference_dataset(tokenizer, source=[{"prompt": "a", "chosen": "good", "rejected": "bad one"}])[0]
    sides = ("chosen", "rejected", "chosen")
    for index, side in enumerate(sides):
        assert dataset[index]["tokens"] == pair[f"{side}_input_ids"]
        assert dataset[index]["labels"] == pair[f"{side}_labels"]
    assert dataset.fingerprint != kto_dataset(tokenizer, source=[{**rows[0], "label": False}, *rows[1:]]).fingerprint
    assert "no answer that is labeled bad" in refused(kto_dataset, tokenizer, source=rows[::2])
    assert "column 'label' is 'yes'" in refused(kto_dataset, tokenizer, source=[{**rows[0], "label": "yes"}])
    assert "the answer is empty" in refused(kto_dataset, tokenizer, source=[{**rows[0], "completion": ""}])


def test_list_of_datasets_is_concatenated(tokenizer, tmp_path):
    path = str(write_lines(tmp_path / "a.jsonl", [openai("a", "b"), openai("c", "d")]))
    node = {**CHATS, "source": path}
    both = instantiate_dataset([node, node], tokenizer)
    assert isinstance(both, ConcatDataset)
    assert [both[i] for i in range(4)] == [both[i] for i in (0, 1, 0, 1)]
    assert both[-1] == both[1]
    assert len(instantiate_dataset(node, tokenizer)) == 2
    with pytest.raises(DataError, match="streaming=True: leave streaming out"):
        instantiate_dataset([node, {**node, "streaming": True}], tokenizer)
    with pytest.raises(DataError, match="cannot be mixed"):
        instantiate_dataset([node, {**node, "packed": True}], tokenizer)
    packs = instantiate_dataset([{**node, "packed": True}] * 2, tokenizer)
    assert isinstance(packs[0], list)


def test_collate_function_is_found_by_name(tokenizer):
    assert instantiate_collate("torchtune.data.collate_documents", tokenizer) is collate_documents
    pad = instantiate_collate("torchtune.data.padded_collate_sft", tokenizer)
    rows = [{"tokens": [5, 6], "labels": [6, IGNORE]}, {"tokens": [5], "labels": [IGNORE]}]
    assert pad(rows)["tokens"].tolist() == [[5, 6], [5, tokenizer.pad_id]]


def test_rows_with_more_than_tokens_are_transformed_on_reading(tmp_path):
    def transform(sample):
        return {"tokens": [1, 2, 3], "mask": [True, False, False], "encoder_input": {"images": [0.5]}}

    path = str(write_lines(tmp_path / "a.jsonl", [openai("a", "b")] * 2))
    dataset = SFTDataset(source=path, message_transform=None, model_transform=transform, split="train")
    assert dataset[1]["encoder_input"] == {"images": [0.5]}
    assert dataset[1]["labels"] == [2, 3, IGNORE]
    assert dataset.lengths.tolist() == [3, 3]


OPENAI_ROW = {"messages": [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "red"}]}
SHAREGPT_ROW = {"talk": [{"from": "human", "value": "the cat"}, {"from": "gpt", "value": "red"}]}


@pytest.mark.parametrize("row", [OPENAI_ROW, SHAREGPT_ROW], ids=["openai", "sharegpt"])
def test_chats_are_read_without_settings(tokenizer, row):
    (name,) = row
    style = "openai" if row is OPENAI_ROW else "sharegpt"
    with_settings = chat_dataset(tokenizer, source=[row], conversation_column=name, conversation_style=style)
    for settings in ({}, {"conversation_column": name}, {"conversation_style": style}):
        assert chat_dataset(tokenizer, source=[{"id": 1, **row}], **settings)[0] == with_settings[0]


def test_chats_that_can_be_read_in_two_ways_are_refused(tokenizer):
    both = {**SHAREGPT_ROW, **OPENAI_ROW}
    words = (
        "can be read in two ways: set conversation_column=talk conversation_style=sharegpt or "
        "conversation_column=messages conversation_style=openai"
    )
    with pytest.raises(DataError, match=words):
        chat_dataset(tokenizer, source=[both])
    assert len(chat_dataset(tokenizer, source=[both], conversation_style="openai")) == 1
    assert len(chat_dataset(tokenizer, source=[both], conversation_column="talk")) == 1
    with pytest.raises(DataError, match="no column holds a conversation among 'input', 'output'"):
        chat_dataset(tokenizer, source=[{"input": "a", "output": "b"}])
    with pytest.raises(DataError, match="there is no column 'chat' among 'messages'"):
        chat_dataset(tokenizer, source=[OPENAI_ROW], conversation_column="chat")


@pytest.mark.parametrize(
    ("build", "row", "advice"),
    [
        (chat_dataset, {"prompt": "a", "chosen": "b", "rejected": "c"}, "these are preference pairs: use preference_"),
        (instruct_dataset, OPENAI_ROW, "these are OpenAI messages: use chat_dataset"),
        (text_completion_dataset, SHAREGPT_ROW, "these are ShareGPT: use chat_dataset"),
        (preference_dataset, {"instruction": "a", "input": "", "output": "b"}, "these are Alpaca: use alpaca_dataset"),
        (alpaca_dataset, {"input": "a", "output": "b"}, "these are instructions: use instruct_dataset"),
    ],
)
def test_the_error_names_the_dataset_that_reads_the_rows(tokenizer, build, row, advice):
    with pytest.raises(DataError, match=advice):
        build(tokenizer, source=[row] * 12)
    with pytest.raises(DataError, match="counted from 0") as caught:
        build(tokenizer, source=[{"x": 3}] * 12)
    assert "these are" not in str(caught.value)
