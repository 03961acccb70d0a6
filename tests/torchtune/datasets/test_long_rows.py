"""Rows of more tokens than the model reads are refused, or skipped, before training."""

import json

import pytest

from torchtune.data import DataError
from torchtune.datasets import PackedDataset, instantiate_dataset, instruct_dataset, workers
from torchtune.estimate import context_length

SHORT = {"input": "the cat", "output": "red"}
LONG = {"input": "the cat", "output": "a red bird " * 30}
ROWS = [SHORT, SHORT, LONG, SHORT]
WORDS = "it has more tokens than the 40 that the model reads"


def build(tokenizer, path, longest=40, kind="instruct", **settings):
    node = {"_component_": f"torchtune.datasets.{kind}_dataset", "source": str(path), **settings}
    return instantiate_dataset(node, tokenizer, longest)


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHTUNE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "rows.jsonl"
    path.write_text("\n" + "".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def test_a_long_row_is_named_by_file_and_line(tokenizer, path):
    with pytest.raises(DataError, match=rf"row 2: {WORDS}.*row 2 is {path}, line 4\); correct them or leave them out"):
        build(tokenizer, path)
    assert len(build(tokenizer, path, longest=None)) == 4
    tokenizer.max_seq_len = 40
    assert build(tokenizer, path).lengths.max() == 40  # truncated


def test_a_long_row_is_skipped_on_request(tokenizer, path):
    data = build(tokenizer, path, on_bad_row="skip")
    unlimited = build(tokenizer, path, longest=None, on_bad_row="skip")
    assert [data.dropped, len(data), unlimited.dropped] == [[2], 3, []]
    assert [data[index] for index in range(3)] == [unlimited[index] for index in (0, 1, 3)]
    assert data.lengths.tolist() == [unlimited.lengths[index] for index in (0, 1, 3)]
    assert data.origins(2) == [{"source": str(path), "row": 3}]
    assert data.fingerprint != unlimited.fingerprint
    packs = PackedDataset(data, max_seq_len=100)
    assert sum(len(document["tokens"]) for document in packs[0]) == data.lengths.sum()
    path.write_text(json.dumps(LONG) + "\n")
    with pytest.raises(DataError, match="no row is left that can be trained on"):
        build(tokenizer, path, on_bad_row="skip")


def test_streams_name_or_skip_a_long_row(tokenizer, path):
    stream = build(tokenizer, path, streaming=True)
    assert [len(stream[index]["tokens"]) < 40 for index in (0, 1, 3)] == [True] * 3
    with pytest.raises(DataError, match=rf"{path}, line 4: {WORDS}.*on_bad_row=skip"):
        stream[2]
    stream = build(tokenizer, path, streaming=True, on_bad_row="skip")
    assert [stream.origins(index)[0]["line"] for index in range(4)] == [2, 3, 5, 2]
    tokenizer.max_seq_len = 100
    with pytest.raises(DataError, match=WORDS):
        build(tokenizer, path, streaming=True, packed=True)[0]


def test_texts_that_packs_divide_are_cut_at_the_context(tokenizer, path):
    path.write_text(json.dumps({"text": LONG["output"]}) + "\n")
    tokenizer.max_seq_len = 100
    with pytest.raises(DataError, match=WORDS):
        build(tokenizer, path, kind="text_completion")
    for settings in ({}, {"streaming": True}):
        packs = build(tokenizer, path, kind="text_completion", packed=True, **settings)
        lengths = [len(document["tokens"]) for document in packs[0]]
        assert max(lengths) == 40
        assert sum(lengths) == 100


def test_long_rows_of_pairs_and_prompts_are_named_or_skipped(tokenizer, path):
    pair = {"prompt": "the cat", "chosen": "red", "rejected": LONG["output"]}
    path.write_text(json.dumps(pair) + "\n" + json.dumps({**pair, "rejected": "blue"}) + "\n")
    with pytest.raises(DataError, match=rf"row 0: {WORDS}"):
        build(tokenizer, path, kind="preference")
    data = build(tokenizer, path, kind="preference", on_bad_row="skip")
    assert [len(data), data.dropped] == [1, [0]]
    path.write_text(json.dumps({"prompt": "a red bird " * 9}) + "\n")
    with pytest.raises(DataError, match=rf"row 0: {WORDS} \(its max_seq_len\): shorten it \(.*them out with filter_fn"):
        build(tokenizer, path, kind="prompt")


def test_a_mixture_compares_the_rows_of_all_its_datasets(tokenizer, path):
    node = {"_component_": "torchtune.datasets.instruct_dataset", "source": str(path)}
    mixture = {"_component_": "torchtune.datasets.mixed_dataset", "datasets": {"one": node}}
    with pytest.raises(DataError, match=WORDS):
        instantiate_dataset(mixture, tokenizer, 40)
    with pytest.raises(DataError, match=WORDS):
        instantiate_dataset([node, node], tokenizer, 40)


def rows_of_ones_own(tokenizer):
    return _OwnRows()


class _OwnRows:
    def __len__(self):
        return 2

    def __getitem__(self, index):
        tokens = list(range(1, 4 if index == 0 else 60))
        return {"tokens": tokens, "labels": [*tokens[1:], -100]}


def test_long_example_of_a_users_dataset_is_named(tokenizer):
    node = {"_component_": f"{__name__}.rows_of_ones_own"}
    with pytest.raises(DataError, match="example 1 of _OwnRows: it has 59 tokens and the model reads 40"):
        instantiate_dataset(node, tokenizer, 40)[1]


def test_builders_without_a_model_have_no_limit(tokenizer, path):
    assert len(instruct_dataset(tokenizer, source=str(path))) == 4


def test_the_context_is_the_smallest_of_all_models():
    small = {"_component_": "torchtune.models.llama2.llama2", "vocab_size": 8, "num_layers": 1, "num_heads": 1}
    small |= {"num_kv_heads": 1, "embed_dim": 8, "max_seq_len": 64}
    assert context_length({"model": small}) == 64
    assert context_length({"model": {**small, "max_seq_len": 128}, "teacher_model": small}) == 64
    assert context_length({"policy_model": small}) == 64
    assert context_length({"model": None}) is None


def test_packs_and_mixtures_count_the_rows_that_are_left(tokenizer, path):
    def node(**settings):
        return {"_component_": "torchtune.datasets.instruct_dataset", "source": str(path), **settings}

    mixture = {"_component_": "torchtune.datasets.mixed_dataset", "datasets": {"a": node(on_bad_row="skip")}}
    dataset = instantiate_dataset(mixture, tokenizer, 40)
    assert [len(dataset), dataset.sizes, dataset.examples_per_epoch] == [3, [3], 3]
    assert sorted(dataset.order(0, 0, shuffle=True)) == [0, 1, 2]
    tokenizer.max_seq_len = 100
    packs = instantiate_dataset(node(on_bad_row="skip", packed=True), tokenizer, 40)
    assert len(packs) == 1
    assert [origin["row"] for origin in packs.origins(0)] == [0, 1, 3]
    both = instantiate_dataset([node(on_bad_row="skip"), node(on_bad_row="skip")], tokenizer, 40)
    assert [len(both), both.origins(3)[0]["row"], both.dropped] == [6, 0, [2, 2]]


def test_rows_that_fit_are_packed_once(tokenizer, path, caplog):
    path.write_text(json.dumps(SHORT) + "\n")
    with caplog.at_level("INFO"):
        build(tokenizer, path, packed=True)
    assert caplog.text.count("Packed 1 examples") == 1


def test_skipping_long_rows_must_leave_good_and_bad_answers(tokenizer, path):
    rows = [{"prompt": "the cat", "completion": answer["output"], "label": answer is SHORT} for answer in (SHORT, LONG)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert len(build(tokenizer, path, kind="kto", longest=None, on_bad_row="skip")) == 2
    with pytest.raises(DataError, match="has no answer that is labeled bad: both kinds are needed"):
        build(tokenizer, path, kind="kto", on_bad_row="skip")
    path.write_text("".join(json.dumps(row) + "\n" for row in [rows[1], rows[0], {**rows[0], "label": False}]))
    data = build(tokenizer, path, kind="kto", on_bad_row="skip")
    assert [data[index]["is_chosen"] for index in range(len(data))] == [True, False]


def test_the_process_of_a_stream_in_a_mixture_knows_the_limit(tokenizer, path, monkeypatch):
    monkeypatch.setattr("torchtune.datasets._streamed._SMALL", 0)
    node = {"_component_": "torchtune.datasets.instruct_dataset", "source": str(path), "streaming": True}
    mixture = {"_component_": "torchtune.datasets.mixed_dataset", "datasets": {"a": node}, "weights": {"a": 1}}
    dataset = instantiate_dataset(mixture, tokenizer, 40)
    with workers(2):
        dataset.begin(0, shuffle=False)
    dataset.read_ahead([0, 1, 2])
    with pytest.raises(DataError, match=rf"{path}, line 4: {WORDS}"):
        dataset[2]
