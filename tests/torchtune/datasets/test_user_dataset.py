"""Rows in memory, turns as mappings, and components of somebody else that do not do what is expected of them."""

import pickle
import re

import pytest
import torch

from tests.tiny import write_lines
from torchtune.data import (
    ChatMLTemplate,
    DataError,
    Message,
    OpenAIToMessages,
    PromptTemplate,
    collate_documents,
    mask_messages,
    padded_collate_sft,
    validate_messages,
)
from torchtune.datasets import (
    PackedDataset,
    PreferenceDataset,
    SFTDataset,
    instantiate_collate,
    instantiate_dataset,
    instruct_dataset,
    kto_dataset,
    preference_dataset,
    prompt_dataset,
    text_completion_dataset,
)

ROWS = [{"input": f"red {i}", "output": f"blue {i}", "text": f"one {i}"} for i in range(5)]
TURNS = [{"role": "user", "content": "red"}, {"role": "assistant", "content": "blue"}]


class Sequence:
    """Rows by index, and no list."""

    def __len__(self):
        return len(ROWS)

    def __getitem__(self, index):
        return ROWS[index]


def in_memory(kind):
    import datasets

    table = datasets.Dataset.from_list(ROWS)
    kinds = {"list": ROWS, "tuple": tuple(ROWS), "generator": (row for row in ROWS), "sequence": Sequence()}
    return kinds | {"table": table, "tables": datasets.DatasetDict(train=table, test=table.select([0]))}


@pytest.mark.parametrize("kind", ["list", "tuple", "generator", "sequence", "table", "tables"])
def test_rows_in_memory_are_those_of_a_file(kind, tokenizer, tmp_path):
    path = str(write_lines(tmp_path / "a.jsonl", ROWS))
    expected, from_memory = (instruct_dataset(tokenizer, source=source) for source in (path, in_memory(kind)[kind]))
    assert [from_memory[i] for i in range(5)] == [expected[i] for i in range(5)]
    assert text_completion_dataset(tokenizer, in_memory(kind)[kind])[4]["tokens"][-1] == tokenizer.eos_id
    filtered = instruct_dataset(tokenizer, source=in_memory(kind)[kind], filter_fn=lambda row: row["input"] != "red 0")
    assert filtered[0] == expected[1]
    assert len(filtered) == 4


@pytest.mark.parametrize(
    ("source", "settings", "said"),
    [
        ([], {}, "There are no rows in the list of 0 rows in memory"),
        (ROWS, {"split": "test"}, "split='test' does not go with rows in memory"),
        (ROWS, {"data_files": "x.jsonl"}, "data_files does not go with rows in memory"),
        ({"input": ["a"]}, {}, "source is a mapping"),
        (3, {}, "source must be a name, or rows"),
        (["a"], {}, "row 0: a row must be a mapping column -> value, not str"),
    ],
)
def test_source_without_rows_is_refused(source, settings, said, tokenizer):
    with pytest.raises(DataError, match=re.escape(said)):
        instruct_dataset(tokenizer, source=source, **settings)


def test_turns_as_mappings_are_messages(tokenizer):
    """With what they train on: a mapping may say ``masked``."""
    parts = [{"role": "user", "content": [{"type": "text", "text": "red"}]}, TURNS[1]]
    for turns in (TURNS, parts):
        turns = [dict(turn) for turn in turns]
        mask_messages(turns, "train_on_assistant")
        assert [turn["masked"] for turn in turns] == [True, False]
        validate_messages(turns)
        messages = [Message("user", "red", masked=True), Message("assistant", "blue")]
        expected = tokenizer.tokenize_messages(messages)
        assert tokenizer.tokenize_messages(turns) == expected
        assert tokenizer({"messages": turns}) == {"tokens": expected[0], "mask": expected[1]}
        for template in (ChatMLTemplate(), PromptTemplate({"user": ("a ", " b")})):
            texts = [message.text_content for message in template(turns)]
            assert texts == [message.text_content for message in template(messages)]
    with pytest.raises(DataError, match=r"takes a row with 'messages', not a text: encode\(text\) gives"):
        tokenizer("red")
    with pytest.raises(DataError, match="conversation must be a list of turns, not str"):
        tokenizer.tokenize_messages("red")
    for turn, pattern in (
        ("red", "a turn must have 'role' and 'content', not str"),
        ({"from": "human"}, r"not \['from'\]"),
        ({"role": "robot", "content": "a"}, "'robot' is not a role"),
        ({"role": "user"}, "a turn of 'user' has no content"),
        ({"role": "user", "content": 3}, "must be a text or a list, not int"),
        ({"role": "user", "content": [{"type": "video"}]}, "type 'video'"),
    ):
        with pytest.raises(DataError, match=pattern):
            tokenizer.tokenize_messages([turn])


def sft(tokenizer, message_transform, model_transform=None):
    return SFTDataset(
        source=[{"messages": TURNS}], message_transform=message_transform, model_transform=model_transform or tokenizer
    )


@pytest.mark.parametrize(
    ("gives", "said"),
    [
        (None, "row 0: message_transform gives NoneType, not a mapping"),
        ({"chat": TURNS}, "there are no 'messages' among 'chat'"),
        ({"messages": "red"}, "a conversation must be a list of turns, not str"),
    ],
)
def test_output_of_a_message_transform_is_checked(gives, said, tokenizer):
    with pytest.raises(DataError, match=re.escape(said)):
        sft(tokenizer, lambda row: gives)
    with pytest.raises(DataError, match="message_transform gives"):
        PreferenceDataset(source=[{"a": 1}], message_transform=lambda row: gives, tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("gives", "said"),
    [
        (None, "the model transform gives NoneType, not a mapping"),
        ({"tokens": [1, 2]}, "'tokens' and 'mask' are needed"),
        ({"tokens": [1, 2, 3], "mask": [True, False]}, "gives 3 tokens but 2 elements of a mask"),
        ({"tokens": [1, -2, 3], "mask": [True, False, True]}, "token id -2 is not in the vocabulary"),
        ({"tokens": [1.5, 2.0], "mask": [True, False]}, "must be a flat list of whole numbers"),
        ({"tokens": [[1], [2]], "mask": [True, False]}, "tokens and labels must be flat lists"),
    ],
)
def test_output_of_a_model_transform_is_checked(gives, said, tokenizer):
    with pytest.raises(DataError, match=re.escape(said)):
        sft(tokenizer, OpenAIToMessages(), lambda sample: gives)


class Own(torch.utils.data.Dataset):
    """A dataset as users write them."""

    def __init__(self, tokenizer, rows=None):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, tokenizer):
        pass

    def __iter__(self):
        return iter(())


def made(tokenizer, rows):
    return instantiate_dataset({"_component_": f"{__name__}.Own", "rows": rows}, tokenizer)


GOOD = {"tokens": [1, 2, 3], "labels": [2, 3, -100]}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (None, "it is NoneType, not a mapping with 'tokens' and 'labels'"),
        ({"tokens": [1, 2]}, "it has no 'labels' among 'tokens'"),
        ({"tokens": [1, 2], "labels": [2]}, "a row has 2 tokens but 1 labels"),
        ({"tokens": [], "labels": []}, "it has no tokens"),
        ({"tokens": [1, 4000], "labels": [4000, -100]}, "token id 4000 is not below 316, the tokenizer's vocabulary"),
        ({"tokens": [1, 2], "labels": [999, -100]}, "label 999 is not below 316"),
        ({"tokens": [1, -1], "labels": [2, -100]}, "token id -1 is not in the vocabulary"),
        ({"tokens": [1, 2], "labels": [-1, -100]}, "label -1 is neither a token id nor -100"),
        ({"tokens": "red", "labels": "red"}, "tokens must be a list of token ids, not str"),
    ],
)
def test_examples_of_a_users_dataset_are_checked(row, said, tokenizer):
    with pytest.raises(DataError, match=f"^dataset: example 0 of Own: .*{re.escape(said)}"):
        made(tokenizer, [row])
    later = made(tokenizer, [GOOD, row])
    with pytest.raises(DataError, match="example 1 of Own"):
        later[1]


def test_a_tokenizer_of_transformers_is_refused(tokenizer_folder):
    from transformers import PreTrainedTokenizerFast

    hf_tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_folder / "tokenizer.json"))
    for build in (instruct_dataset, text_completion_dataset, preference_dataset, kto_dataset, prompt_dataset):
        with pytest.raises(DataError, match=r"hf_tokenizer\(folder\), which reads the same files"):
            build(hf_tokenizer, source=[{"input": "red", "output": "blue"}])


def test_a_dataset_goes_to_workers_that_are_spawned(tokenizer):
    dataset = instruct_dataset(tokenizer, source=[{"input": "red", "output": "blue"}])
    assert pickle.loads(pickle.dumps(dataset))[0] == dataset[0]
    again = pickle.loads(pickle.dumps(tokenizer))
    chat = {"messages": [{"role": "user", "content": "red"}, {"role": "assistant", "content": "blue"}]}
    assert again(chat) == tokenizer(chat)


def test_users_dataset_without_shifted_labels_is_refused(tokenizer):
    masked = {"tokens": [1, 2, 3], "labels": [-100, -100, -100]}
    with pytest.raises(DataError, match="Own has no label in its first 32 examples: labels"):
        made(tokenizer, [masked] * 40)
    same = {"tokens": [1, 2, 3], "labels": [-100, 2, 3]}
    with pytest.raises(DataError, match=r"The labels of Own are the tokens at their own position, .* shift them"):
        made(tokenizer, [masked, same])
    for rows in ([masked, GOOD], [same, GOOD], [{**same, "number": 0}], [{"tokens": [5, 5], "labels": [5, -100]}]):
        assert len(made(tokenizer, rows)) == len(rows)
    dataset = made(tokenizer, [GOOD] * 5)
    del dataset.rows[3:]
    with pytest.raises(DataError, match="example 4 of Own is gone: it had 5 examples at the start and has 3 now"):
        dataset[4]
    with pytest.raises(IndexError):
        dataset[5]


def test_users_dataset_needs_examples_a_length_and_an_index(tokenizer):
    with pytest.raises(DataError, match=r"^dataset: Own is empty: there is nothing to train on\.$"):
        made(tokenizer, [])
    with pytest.raises(DataError, match="Stream has no __len__"):
        instantiate_dataset({"_component_": f"{__name__}.Stream"}, tokenizer)
    dataset = made(tokenizer, [GOOD, {key: torch.tensor(value) for key, value in GOOD.items()}])
    assert dataset.rows[0] is GOOD, "what else it has is there"
    assert collate_documents([dataset[0], dataset[1]])["tokens"].tolist() == [[1, 2, 3, 1, 2, 3]]
    assert made(tokenizer, [[GOOD, GOOD]])[0] == [GOOD, GOOD], "packs of one's own"
    assert len(PackedDataset(dataset, max_seq_len=6)) == 1


@pytest.mark.parametrize(
    ("gives", "said"),
    [
        (None, "gives NoneType, not a mapping"),
        ({"tokens": torch.zeros(1, 2, dtype=torch.int64)}, "the batch has no 'labels', it has tokens"),
        ({"tokens": [[1]], "labels": [[1]]}, r"not list"),
        ({"tokens": torch.zeros(2), "labels": torch.zeros(2)}, "not torch.float32 of shape (2,)"),
        (
            {"tokens": torch.zeros(1, 2, dtype=torch.int64), "labels": torch.zeros(1, 3, dtype=torch.int64)},
            "tokens (1, 2) has 'labels' of shape (1, 3)",
        ),
    ],
)
def test_output_of_a_users_collate_function_is_checked(gives, said, tokenizer):
    def mine(batch):
        return gives

    with pytest.raises(DataError, match=re.escape(said)):
        instantiate_collate(mine, tokenizer)([GOOD])
    with pytest.raises(DataError, match="is a module: name a function"):
        instantiate_collate("os.path", tokenizer)


@pytest.mark.parametrize("collate", [collate_documents, padded_collate_sft])
@pytest.mark.parametrize("batch", [[None], [{"tokens": [1]}], [{"labels": [1]}]])
def test_collations_say_what_an_example_lacks(collate, batch):
    with pytest.raises(DataError, match="An example "):
        collate(batch)
