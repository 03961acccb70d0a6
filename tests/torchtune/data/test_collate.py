"""Batches."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from torchtune.data import (
    Batch,
    BatchLoader,
    DataError,
    collate_documents,
    collate_preference,
    left_pad_sequence,
    padded_collate,
    padded_collate_dpo,
    padded_collate_packed,
    padded_collate_sft,
    padded_collate_tiled_images_and_mask,
    truncate,
)

ONE = {"tokens": [1, 2, 3], "labels": [2, 3, -100]}
TWO = {"tokens": [4], "labels": [5]}
THREE = {"tokens": torch.tensor([6, 7]), "labels": torch.tensor([7, -100])}
PAIR = {
    "chosen_input_ids": [1, 2, 3],
    "chosen_labels": [2, 3, -100],
    "rejected_input_ids": [4, 5],
    "rejected_labels": [5, -100],
}


def test_documents_are_concatenated_without_padding():
    batch = collate_documents([ONE, [TWO, THREE]])
    assert batch.keys() == {"tokens", "labels", "input_pos", "documents"}
    assert batch["tokens"].tolist() == [[1, 2, 3, 4, 6, 7]]
    assert batch["labels"].tolist() == [[2, 3, -100, 5, 7, -100]]
    assert batch["input_pos"].tolist() == [[0, 1, 2, 0, 0, 1]]
    assert batch["documents"].lengths == (3, 1, 2)
    assert batch["documents"].cu_seqlens.tolist() == [0, 3, 4, 6]
    assert batch["tokens"].dtype == batch["labels"].dtype == batch["input_pos"].dtype == torch.int64


def test_examples_that_collation_cannot_join_are_refused():
    with pytest.raises(DataError, match="encoder_input"):
        collate_documents([{**ONE, "encoder_input": {}}])
    with pytest.raises(DataError, match=r"at least one token, got lengths \(0,\): leave out empty rows"):
        collate_documents([{"tokens": [], "labels": []}])
    with pytest.raises(DataError, match="3 tokens but 2 labels"):
        collate_documents([{"tokens": [1, 2, 3], "labels": [1, 2]}])


def test_sft_examples_are_padded_on_the_right():
    batch = padded_collate_sft([ONE, TWO], padding_idx=9)
    assert batch["tokens"].tolist() == [[1, 2, 3], [4, 9, 9]]
    assert batch["labels"].tolist() == [[2, 3, -100], [5, -100, -100]]
    assert batch.keys() == {"tokens", "labels"}


@pytest.mark.parametrize(("multiple", "length"), [(1, 3), (2, 4), (3, 3), (8, 8)])
def test_rows_are_padded_to_the_next_multiple_at_most(multiple, length):
    assert padded_collate_sft([ONE, TWO], pad_to_multiple_of=multiple)["tokens"].shape == (2, length)
    assert padded_collate_dpo([PAIR], pad_to_multiple_of=multiple)[0].shape == (2, length)


def test_context_parallelism_adds_positions():
    batch = padded_collate_sft([ONE, TWO], cp_degree=2)
    assert batch["tokens"].shape == (2, 4)
    assert batch["input_pos"].tolist() == [[0, 1, 2, 3]]


def test_nested_inputs_keep_all_their_keys():
    examples = [{**ONE, "encoder_input": {"images": torch.ones(2, 3), "sizes": torch.ones(2, 1)}}] * 2
    stacked = padded_collate_sft(examples, stack_on_new_dim=True)["encoder_input"]
    assert {key: tuple(value.shape) for key, value in stacked.items()} == {"images": (2, 2, 3), "sizes": (2, 2, 1)}
    joined = padded_collate_sft(examples)["encoder_input"]
    assert {key: tuple(value.shape) for key, value in joined.items()} == {"images": (4, 3), "sizes": (4, 1)}


def test_each_pack_is_padded_as_one_row():
    batch = padded_collate_packed([[ONE, TWO], [THREE]], padding_idx=9)
    assert batch["tokens"].tolist() == [[1, 2, 3, 4], [6, 7, 9, 9]]
    assert batch["labels"].tolist() == [[2, 3, -100, 5], [7, -100, -100, -100]]
    assert batch["input_pos"].tolist() == [[0, 1, 2, 0], [0, 1, 0, 1]]
    assert batch["documents"].lengths == (3, 1, 2, 2)
    assert padded_collate_sft([[ONE, TWO], [THREE]])["documents"].lengths == (3, 1, 2, 2)


def test_pairs_are_padded_with_unshifted_labels():
    tokens, labels = padded_collate_dpo([PAIR, PAIR], padding_idx=0)
    assert tokens.tolist() == [[1, 2, 3], [1, 2, 3], [4, 5, 0], [4, 5, 0]]
    # Not shifted, as get_batch_log_probs takes them: chosen answers first, then the rejected ones.
    assert labels.tolist() == [[-100, 2, 3], [-100, 2, 3], [-100, 5, -100], [-100, 5, -100]]
    unshifted = {**PAIR, "chosen_labels": [-100, 2, 3], "rejected_labels": [-100, 5]}
    assert padded_collate_dpo([unshifted, unshifted])[1].tolist() == labels.tolist()
    with pytest.raises(DataError, match="a token which is not in the row"):
        padded_collate_dpo([{**PAIR, "rejected_labels": [5, 7]}])


def test_left_padding_aligns_the_ends():
    rows = [torch.tensor([1, 2, 3]), torch.tensor([4])]
    assert left_pad_sequence(rows, batch_first=True, padding_value=9).tolist() == [[1, 2, 3], [9, 9, 4]]
    assert left_pad_sequence(rows).shape == (3, 2)


def test_padded_collate_pads_the_named_keys():
    examples = [
        {"tokens": [1, 2], "labels": [3], "answer": 5},
        {"tokens": [4], "labels": [6, 7, 8], "answer": 6},
    ]
    padding = {"tokens": 0, "labels": -100}
    batch = padded_collate(examples, pad_direction="left", keys_to_pad=["tokens", "labels"], padding_idx=padding)
    assert batch["tokens"].tolist() == [[1, 2], [0, 4]]
    assert batch["labels"].tolist() == [[-100, -100, 3], [6, 7, 8]]
    assert batch["answer"].tolist() == [5, 6]
    with pytest.raises(DataError, match="pad_direction"):
        padded_collate(examples, pad_direction="up", keys_to_pad=["tokens"], padding_idx=0)
    with pytest.raises(DataError, match="keys_to_pad"):
        padded_collate(examples, pad_direction="left", keys_to_pad=["token"], padding_idx=0)
    with pytest.raises(DataError, match="padding_idx"):
        padded_collate(examples, pad_direction="left", keys_to_pad=["tokens"], padding_idx={"labels": 0})


def test_truncation_keeps_the_chosen_side():
    assert truncate([1, 2, 3, 4], 3) == [1, 2, 3]
    assert truncate([1, 2, 3, 4], 3, eos_id=9) == [1, 2, 9]
    assert truncate([1, 2, 3, 4], 3, eos_id=9, truncation_type="left") == [2, 3, 9]
    assert truncate([1, 2], 3, eos_id=9) == [1, 9]
    assert truncate([True, False], 1, eos_id=False) == [False]
    with pytest.raises(DataError, match="truncation_type"):
        truncate([1], 1, truncation_type="up")


def collate_text_beside_images(rows, **options):
    """Rows without an image, in a batch of a model that reads images."""
    no_image = {"encoder_input": {"images": [], "aspect_ratio": []}, "encoder_mask": []}
    return padded_collate_tiled_images_and_mask([{**row, **no_image} for row in rows], **options)


# Every way in which rows of tokens and labels become a batch.
COLLATES: dict[str, Callable[[list[dict[str, Any]]], Any]] = {
    "documents": collate_documents,
    "packs": lambda rows: collate_documents([rows]),
    "padded": padded_collate_sft,
    "padded packs": lambda rows: padded_collate_packed([rows, rows[:1]]),
    "images": collate_text_beside_images,
    "images, left": lambda rows: collate_text_beside_images(rows, pad_direction="left"),
    "dict": lambda rows: Batch.from_dict(stack(rows)),
    "pairs": lambda rows: collate_preference([pair_of(row) for row in rows]),
    "loader": lambda rows: next(iter(loader_of(rows))),
}


def stack(rows):
    """A user's collate function: tensors [b, s] of rows of one length."""
    tokens = torch.tensor([row["tokens"] for row in rows])
    labels = torch.tensor([row["labels"] for row in rows])
    return {"tokens": tokens, "labels": labels}


def pair_of(row):
    """A preference pair with the same answer twice."""
    pair = {}
    for side in ("chosen", "rejected"):
        pair[f"{side}_input_ids"] = row["tokens"]
        pair[f"{side}_labels"] = row["labels"]
    return pair


def loader_of(rows):
    return BatchLoader(rows, batch_size=len(rows), collate_fn=stack, shuffle=False, seed=0)


@pytest.mark.parametrize("num_prompt", [0, 3])
@pytest.mark.parametrize("name", COLLATES)
def test_labels_at_their_own_position_are_refused_where_rows_enter(name, num_prompt):
    """The convention of transformers, which shifts labels in the model; the prompt may be masked."""
    collate = COLLATES[name]
    unshifted = []
    shifted = []
    for tokens in ([4, 5, 6, 7, 8, 2], [4, 5, 6, 9, 9, 2]):
        labels = [-100] * num_prompt + tokens[num_prompt:]
        unshifted.append({"tokens": tokens, "labels": labels})
        shifted.append({"tokens": tokens, "labels": [*labels[1:], -100]})
    with pytest.raises(DataError, match=r"tokens at their own position, as transformers takes them: .* shift them"):
        collate(unshifted)
    with pytest.raises(DataError, match="tokens at their own position"):
        collate(unshifted[:1])
    collate(shifted)
    collate(shifted[:1])


# Rows whose labels may stand at their own position or one before: they are taken as they are.
AMBIGUOUS = {
    "one label, in the last position": [
        {"tokens": [4, 5, 6, 7], "labels": [-100, -100, -100, 7]},
        {"tokens": [4, 5, 6, 8], "labels": [-100, -100, -100, 8]},
    ],
    "one token, repeated": [
        {"tokens": [7, 7, 7, 7], "labels": [7, 7, 7, 7]},
        {"tokens": [8, 8, 8, 8], "labels": [8, 8, 8, 8]},
    ],
    "pairs of equal tokens": [{"tokens": [7, 7, 8, 8], "labels": [7, -100, 8, -100]}] * 2,
    "no label": [{"tokens": [4, 5, 6, 7], "labels": [-100] * 4}] * 2,
    "a label that is not the next token, as a method of training may have": [
        {"tokens": [4, 5, 6, 7], "labels": [-100, 5, -100, -100]}
    ]
    * 2,
}


@pytest.mark.parametrize("name", COLLATES)
def test_labels_that_fit_no_convention_or_both_are_taken(name):
    collate = COLLATES[name]
    for rows in AMBIGUOUS.values():
        collate(rows)
    if name not in ("dict", "loader"):  # their rows have one length
        shorter = {"tokens": [5, 6, 7], "labels": [-100, -100, 7]}
        collate([shorter, *AMBIGUOUS["one label, in the last position"]])


@pytest.mark.parametrize(
    ("example", "words"),
    [
        ({"query": [1], "positive": [2]}, r"queries with passages: set collate_fn=torchtune\.data\.collate_embedding"),
        ({"query": [1], "positive": [2], "negatives": [[3]]}, r"torchtune\.data\.collate_embedding.*InfoNCELoss"),
        ({"documents": [[1]], "targets": [1.0]}, r"torchtune\.data\.collate_reranking.*RerankBCELoss"),
        ({"tokens": [1], "labels": [-100]}, r"has no 'chosen_input_ids', it has tokens, labels, so it is no pair"),
    ],
)
def test_examples_of_another_method_name_its_collate_function(example, words):
    with pytest.raises(DataError, match=words):
        collate_preference([example])
