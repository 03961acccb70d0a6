"""One batch: tokens, and what belongs to a token or to a document."""

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from torchtune.data import (
    Batch,
    DataError,
    Documents,
    collate_documents,
    collate_preference,
    padded_collate_packed,
    padded_collate_sft,
)
from torchtune.models import Description, build
from torchtune.utils import batch_to_device

ONE = {"tokens": [1, 2, 3], "labels": [2, 3, -100]}
TWO = {"tokens": [4], "labels": [5]}
THREE = {"tokens": [6, 7], "labels": [7, -100]}
PAIRS = [
    {
        "chosen_input_ids": [1, 2, 3, 4],
        "chosen_labels": [-100, 3, 4, 5],
        "rejected_input_ids": [1, 2, 6],
        "rejected_labels": [-100, 6, 7],
    },
    {
        "chosen_input_ids": [8, 9],
        "chosen_labels": [9, 10],
        "rejected_input_ids": [8, 11, 12, 13, 14],
        "rejected_labels": [11, 12, 13, 14, 15],
    },
]


@pytest.fixture
def model():
    torch.manual_seed(0)
    sizes = {"num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "embed_dim": 16, "intermediate_dim": 16}
    return build(Description(vocab_size=16, max_seq_len=32, **sizes)).double()


def document_states(model, batch):
    hidden = model(**batch.model_inputs(), output="hidden").flatten(0, 1)
    return list(hidden.split(list(batch.documents.lengths)))


def test_batch_supports_the_operations_of_a_dict():
    batch = collate_documents([ONE, TWO])
    assert isinstance(batch, Batch)
    assert (
        dict(batch).keys() == batch.model_inputs().keys() | {"labels"} == {*"tokens labels input_pos documents".split()}
    )
    batch["weights"] = torch.ones(1, 4)
    assert batch.per_token["weights"] is batch["weights"]
    batch_to_device(batch, torch.device("meta"))
    assert {batch[key].device.type for key in ("tokens", "labels", "input_pos", "weights")} == {"meta"}
    assert batch.documents.cu_seqlens.device.type == "meta"
    labels = batch.pop("labels")
    del batch["weights"]
    assert labels.shape == (1, 4)
    assert batch.labels is None
    assert batch.num_labels == 0
    assert {**batch}.keys() == batch.model_inputs().keys()
    with pytest.raises(KeyError):
        batch.pop("labels")


def test_a_dict_becomes_a_batch():
    weights = torch.ones(2, 3)
    states = torch.ones(2, 3, 5)
    collated = padded_collate_sft([ONE, TWO]) | {"weights": weights, "states": states, "mask": torch.ones(2, 3, 3) > 0}
    batch = Batch.from_dict(collated)
    assert Batch.from_dict(batch) is batch
    assert batch.per_token == {"weights": weights, "states": states}
    assert batch.model_inputs().keys() == {"tokens", "mask"}
    assert (batch.num_tokens, batch.num_labels, batch.num_documents) == (6, 3, 2)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"rewards": torch.ones(2)}, r"'rewards' \(shape \(2,\)\) is not per token, the tokens are \(2, 3\): return a"),
        ({"texts": ["a", "b"]}, r"'texts' \(list\) is not per token"),
        ({"position_ids": torch.ones(2, 3)}, "returns 'position_ids': return 'input_pos' instead"),
        ({"attention_mask": torch.ones(2, 3)}, "return 'documents' or 'mask' instead"),
        ({"labels": torch.ones(2, 4).long()}, r"tokens \(2, 3\) has 'labels' of shape \(2, 4\)"),
        ({"documents": Documents.from_lengths([5])}, "6 tokens has documents that cover 5"),
    ],
)
def test_entry_without_shape_per_token_is_refused(entry, message):
    with pytest.raises(DataError, match=message):
        Batch.from_dict(padded_collate_sft([ONE, TWO]) | entry)


def test_inconsistent_entries_of_a_batch_are_refused():
    batch = padded_collate_sft([ONE, TWO])
    with pytest.raises(DataError, match="2 documents has 3 values of 'reward'"):
        Batch(**batch, per_document={"reward": torch.ones(3)})
    with pytest.raises(DataError, match="two entries 'reward'"):
        Batch(**batch, per_document={"reward": torch.ones(2)}, per_token={"reward": torch.ones(2, 3)})
    with pytest.raises(DataError, match="must be a tensor, not dict"):
        Batch(dict(batch))  # as a Trainer of transformers rebuilds mappings


@pytest.mark.parametrize("collate", [collate_documents, lambda packs: Batch.from_dict(padded_collate_packed(packs))])
def test_padding_to_a_multiple_changes_no_document(collate, model):
    batch = collate([[ONE, TWO], [THREE, TWO]])
    before = document_states(model, batch)
    padded = batch.pad_to_multiple(16)
    assert padded.tokens.shape == (1, 16)
    assert padded.num_labels == batch.num_labels
    assert padded.num_documents == batch.num_documents
    for unpadded, with_padding in zip(before, document_states(model, padded), strict=False):
        torch.testing.assert_close(unpadded, with_padding, atol=1e-12, rtol=0)
    assert padded.pad_to_multiple(1) is padded
    assert Batch.from_dict(padded_collate_sft([ONE, TWO])).pad_to_multiple(4).input_pos.tolist() == [[0, 1, 2, 0]] * 2


def test_a_split_batch_is_the_batch_in_parts():
    batch = collate_documents([ONE, TWO, THREE])
    batch = Batch(**batch, per_token={"state": torch.randn(1, 6, 2)}, per_document={"reward": torch.randn(3)})
    batch = batch.pad_to_multiple(4)
    parts = [batch.split(rank, 2) for rank in range(2)]
    for name in ("tokens", "labels", "input_pos", "state"):
        assert torch.equal(torch.cat([part[name] for part in parts], dim=1), batch[name])
    assert sum(part.num_labels for part in parts) == batch.num_labels == 4
    assert {part.documents for part in parts} == {batch.documents}
    assert all(part["reward"] is batch["reward"] for part in parts)
    with pytest.raises(DataError, match="8 positions in 1 part"):
        batch.split(0, 3)
    with pytest.raises(DataError, match="in 2 part"):
        parts[0].split(0, 2)


def test_images_are_not_split():
    batch = Batch.from_dict(padded_collate_sft([ONE]) | {"encoder_input": {"images": torch.ones(1, 3)}})
    assert batch.to("meta").inputs["encoder_input"]["images"].device.type == "meta"
    for change in (lambda: batch.pad_to_multiple(2), lambda: batch.split(0, 3)):
        with pytest.raises(DataError, match="not known how to split 'encoder_input'"):
            change()


def sums_by_loop(values, lengths):
    rows = values.flatten().tolist()
    sums = []
    for length in lengths:
        sums.append(sum(rows[:length]))
        rows = rows[length:]
    return torch.tensor(sums, dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_sums_per_document_equal_those_of_a_loop(dtype):
    lengths = (3, 1, 7, 2, 40)
    tokens = torch.zeros(1, sum(lengths), dtype=torch.int64)
    batch = Batch(tokens, documents=Documents.from_lengths(lengths)).pad_to_multiple(4)
    values = (torch.randn(batch.tokens.shape, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    sums = batch.sum_per_document(values)
    expected = sums_by_loop(values, lengths)
    assert sums.dtype == (torch.int64 if dtype == torch.bool else dtype)
    tolerance = {torch.bfloat16: 2**-8, torch.float32: 1e-6}.get(dtype, 1e-12)  # of the result alone
    torch.testing.assert_close(sums.double(), expected, rtol=tolerance, atol=tolerance)
    parts = [batch.split(rank, 4).sum_per_document(part) for rank, part in enumerate(values.double().chunk(4, dim=1))]
    torch.testing.assert_close(sum(parts), expected, rtol=1e-12, atol=1e-12)


def test_rows_without_documents_count_as_documents():
    batch = Batch.from_dict(padded_collate_sft([ONE, TWO]))
    assert batch.sum_per_document(torch.tensor([[1, 2, 3], [4, 5, 6]])).tolist() == [6, 15]
    with pytest.raises(DataError, match=r"\(2, 4\) are not per token, the tokens are \(2, 3\)"):
        batch.sum_per_document(torch.ones(2, 4))


def test_sums_and_pairs_read_nothing_from_the_device():
    """Fake tensors have no values: reading one on the host raises."""
    with FakeTensorMode():
        batch = collate_preference(PAIRS).pad_to_multiple(8)
        values = torch.randn(batch.tokens.shape, requires_grad=True)
        chosen, rejected = batch.chosen_and_rejected(batch.sum_per_document(values))
        (chosen - rejected).sum().backward()
        assert chosen.shape == rejected.shape == (2,)
        with pytest.raises(DataDependentOutputException):
            batch.num_labels  # noqa: B018 - recipes count before the batch moves


def test_preference_pairs_are_matched_by_their_number():
    batch = collate_preference(PAIRS)
    assert batch.documents.lengths == (4, 2, 3, 5)
    assert batch.tokens.shape == (1, 14)
    assert batch.per_document["pair"].tolist() == [0, 1, 0, 1]
    assert batch.per_document["is_chosen"].tolist() == [True, True, False, False]
    chosen, rejected = batch.pad_to_multiple(8).chosen_and_rejected(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert (chosen.tolist(), rejected.tolist()) == ([1, 2], [3, 4])
    batch.per_document = {"pair": torch.tensor([1, 1, 0, 0]), "is_chosen": torch.tensor([False, True, True, False])}
    chosen, rejected = batch.chosen_and_rejected(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert (chosen.tolist(), rejected.tolist()) == ([3, 2], [4, 1])
    with pytest.raises(DataError, match="no 'rejected_labels', it has chosen_input_ids"):
        collate_preference([{key: [1] for key in ("chosen_input_ids", "chosen_labels", "rejected_input_ids")}])
    with pytest.raises(DataError, match="no pairs"):
        collate_documents([ONE]).chosen_and_rejected(torch.ones(1))


def test_only_cuda_takes_pinned_memory():
    batch = collate_preference(PAIRS)
    moved = batch.to("meta", non_blocking=True)
    assert moved.per_document["pair"].device.type == moved.documents.cu_seqlens.device.type == "meta"
    assert batch.tokens.device.type == "cpu"
    if not torch.cuda.is_available():
        return
    moved = batch.to("cuda", non_blocking=True)
    assert torch.equal(moved.tokens.cpu(), batch.tokens)
    assert batch.pin_memory().tokens.is_pinned()


@pytest.mark.parametrize("prefixes", [(), (-1, 0, 0, -1)])
def test_documents_compute_on_the_device_of_their_boundaries(prefixes):
    """The meta device stands for one that is not the CPU: it has no values to wait for."""
    lengths = [3, 2, 1, 4]
    documents = Documents.from_lengths(lengths, prefixes=prefixes)
    assert documents.document_ids().tolist() == [0, 0, 0, 1, 1, 2, 3, 3, 3, 3]
    assert documents.positions().tolist() == ([0, 1, 2, 3, 4, 3] if prefixes else [0, 1, 2, 0, 1, 0]) + [0, 1, 2, 3]
    elsewhere = documents.to("meta")
    for values in (elsewhere.document_ids(), elsewhere.positions(), elsewhere.ends()):
        assert values.device.type == "meta"
    assert elsewhere.positions().shape == (10,)


def test_label_positions_move_to_the_device_with_the_batch():
    """The meta device stands for an accelerator, whose values cannot be looked at."""
    batch = collate_documents([ONE, TWO, THREE])
    assert batch.label_index is None, "on the CPU nobody waits"
    assert batch.to("cpu").label_index is None
    sent = batch.to("meta")
    assert (sent.label_index.device.type, sent.label_index.shape) == ("meta", (batch.num_labels,))
    sent["labels"] = torch.empty_like(sent.labels)
    assert sent.label_index is None, "those of other labels"


def test_documents_of_a_batch_split_into_batches():
    batch = collate_documents([ONE, TWO, THREE]).pad_to_multiple(4)
    first, second = batch.split_documents(2)
    assert first.tokens.tolist() == [[1, 2, 3, 4]]
    assert first.documents.lengths == (3, 1)
    assert first.input_pos.tolist() == [[0, 1, 2, 0]]
    assert second.tokens.tolist() == [[6, 7]]  # without the padding
    assert second.labels.tolist() == [[7, -100]]


def test_rows_without_documents_do_not_split_into_documents():
    with pytest.raises(DataError, match="only batches of texts whose documents"):
        Batch(torch.tensor([[1, 2]])).split_documents(1)


def test_a_prefix_with_a_prefix_is_refused_also_if_that_is_the_first_document():
    with pytest.raises(ValueError, match="goes on from one that itself goes on from another"):
        Documents.from_lengths([2, 2, 2], prefixes=[-1, 0, 1])


def test_empty_documents_are_refused():
    for lengths in ([], [2, 0]):
        with pytest.raises(ValueError, match="at least one token"):
            Documents.from_lengths(lengths)


def test_chunks_of_a_document_are_counted_from_the_start_of_its_prefix():
    chunks = Documents.from_lengths([6, 4], prefixes=[-1, 0]).split_into_chunks(4)
    assert chunks.lengths == (4, 2, 2, 2)
    assert chunks.prefixes == (-1, -1, 1, -1)


def test_rows_that_become_one_row_keep_their_entries_per_token():
    batch = Batch(
        tokens=torch.tensor([[1, 2], [3, 4]]),
        labels=torch.tensor([[2, -100], [4, -100]]),
        documents=Documents.from_lengths([2, 2]),
        per_token={"advantages": torch.tensor([[0.5, 1.0], [1.5, 2.0]])},
    )
    padded = batch.pad_to_multiple(3)
    assert padded.tokens.tolist() == [[1, 2, 3, 4, 0, 0]]
    assert padded.per_token["advantages"].tolist() == [[0.5, 1.0, 1.5, 2.0, 0.0, 0.0]]
