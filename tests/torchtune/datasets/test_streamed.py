"""Streams: every row once a pass, the same examples after a resume and for any number of processes."""

import gc
import itertools
import json
from pathlib import Path

import datasets
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.tiny import OPENAI, read_lines, write_conversations, write_lines
from torchtune.data import BatchLoader, DataError
from torchtune.datasets import (
    StreamedDataset,
    chat_dataset,
    instruct_dataset,
    mixed_dataset,
    text_completion_dataset,
)
from torchtune.datasets._streamed import HubReader
from torchtune.utils import close_run_logger, get_run_logger

CAPACITY = 12
QUICK = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def transform(row):
    return {"tokens": [row["id"]] * row["length"], "labels": [row["id"]] * row["length"]}


def write_rows(folder, sizes):
    """Files of rows with ids that go on from file to file; every second file ends with an empty line."""
    first = 0
    paths = []
    for number, size in enumerate(sizes):
        path = folder / f"{number}.jsonl"
        lines = []
        for row_id in range(first, first + size):
            lines.append(json.dumps({"id": row_id, "length": 1 + row_id % 7}))
        path.write_text("\n".join(lines) + "\n\n" * (number % 2))
        paths.append(str(path))
        first += size
    return paths


def ids(example):
    """The id of the row of each token, for a document or a pack of documents."""
    documents = example if isinstance(example, list) else [example]
    row_ids = []
    for document in documents:
        row_ids += [int(document["tokens"][0])] * len(document["tokens"])
    return row_ids


STREAMS = st.fixed_dictionaries(
    {
        "sizes": st.lists(st.integers(1, 20), min_size=1, max_size=3),
        "shuffle_buffer": st.integers(1, 30),
        "shuffle": st.booleans(),
        "packs": st.sampled_from([None, "whole", "split"]),
        "filtered": st.booleans(),
    }
)


def stream(folder, how):
    """A stream as one of ``STREAMS`` says."""
    return StreamedDataset(
        transform,
        "json",
        data_files=write_rows(folder, how["sizes"]),
        limit=None,
        pack_length=CAPACITY if how["packs"] else None,
        split_across_pack=how["packs"] == "split",
        filter_fn=(lambda row: row["id"] % 3 != 1) if how["filtered"] else None,
        shuffle_buffer=how["shuffle_buffer"],
    )


@given(how=STREAMS, index=st.integers(0, 60), skipped=st.integers(0, 40))
@QUICK
def test_stream_resumes_at_its_position(tmp_path, how, index, skipped):
    uninterrupted = stream(tmp_path, how)
    resumed = stream(tmp_path, how)
    uninterrupted.begin(3, shuffle=how["shuffle"])
    resumed.begin(3, shuffle=how["shuffle"])
    examples = [uninterrupted[i] for i in range(index + 50)]
    state = json.loads(json.dumps(uninterrupted.state_at(index)))
    resumed.go_to(state)
    first = index + skipped  # at most 40 of the next 50 examples
    for i in range(first, index + 50):
        assert ids(resumed[i]) == ids(examples[i])
    assert state["position"] is None or state["position"][1] >= 0

    ids_at_origins = set()
    for origin in uninterrupted.origins(index + 49):
        line = Path(origin["source"]).read_text().splitlines()[origin["line"] - 1]
        ids_at_origins.add(json.loads(line)["id"])
    assert ids_at_origins == set(ids(examples[-1]))


@given(how=STREAMS)
@QUICK
def test_pass_over_a_stream_has_every_row_once(tmp_path, how):
    dataset = stream(tmp_path, how)
    dataset.begin(1, shuffle=how["shuffle"])
    expected = []
    for i in range(sum(how["sizes"])):
        if not (how["filtered"] and i % 3 == 1):
            expected += [i] * (1 + i % 7)  # a row of as many tokens
    for passes in range(2):
        while dataset._starts[-1].passes <= passes:  # until it knows where the pass ends
            dataset[dataset._starts[-1].example]
        first = next(start.example for start in dataset._starts if start.passes == passes)
        end = next(start.example for start in dataset._starts if start.passes > passes)
        tokens = []
        for i in range(first, end):
            tokens += ids(dataset[i])
        assert sorted(tokens) == expected
        if not how["shuffle"] and not how["packs"]:
            assert tokens == expected


@given(how=STREAMS, world=st.sampled_from([2, 4]), taken=st.integers(0, 5))
@QUICK
def test_any_number_of_processes_see_the_same_steps(tmp_path, how, world, taken):
    def loader(rank, size):
        settings = {"batch_size": 4 // size, "seed": 2, "max_steps_per_epoch": 4, "shuffle": how["shuffle"]}
        return BatchLoader(stream(tmp_path, how), rank=rank, world_size=size, collate_fn=list, **settings)

    def examples_of(step):
        return [ids(example) for example in itertools.chain(*step)]

    uninterrupted = loader(0, 1)
    two_epochs = itertools.chain(uninterrupted, uninterrupted)
    expected_steps = [examples_of(step) for step in two_epochs]

    stopped = loader(0, world)
    for _ in itertools.islice(itertools.chain(stopped, stopped), taken):
        pass
    ranks = [loader(rank, world) for rank in range(world)]
    for rank_loader in ranks:
        rank_loader.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    for number, expected in enumerate(expected_steps[taken:], taken):
        examples = []
        for rank_loader in ranks:
            if number % 4 == 0 and rank_loader.at_epoch_end:
                list(rank_loader)  # ends the epoch
            examples += examples_of(next(iter(rank_loader)))
        assert examples == expected


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of files that the datasets package leaves open
@pytest.mark.parametrize("buffer", [1, 4, 40])
@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_tables_are_read_from_any_position(tmp_path, kind, buffer):
    import pyarrow as pa
    from pyarrow import csv, parquet

    paths = [str(tmp_path / f"{number}.{kind}") for number in range(2)]
    for path, rows in zip(paths, (range(7), range(7, 18)), strict=True):
        table = pa.table({"id": list(rows)})
        if kind == "csv":
            csv.write_csv(table, path)
        else:
            parquet.write_table(table, path, row_group_size=3)

    def to_example(row):
        return {"tokens": [int(row["id"])], "labels": [int(row["id"])]}

    def stream():
        return StreamedDataset(to_example, kind, data_files=paths, limit=None, shuffle_buffer=buffer)

    complete = stream()
    assert [ids(complete[index])[0] for index in range(36)] == [*range(18)] * 2
    if kind == "parquet":
        origin = {"source": paths[1], "row": 2}
    else:
        origin = {"source": paths[1], "line": 3}  # behind the header
    assert complete.origins(8) == [origin]
    for index in range(20):
        resumed = stream()
        resumed.go_to(json.loads(json.dumps(complete.state_at(index))))
        assert ids(resumed[index]) == [index % 18]
    gc.collect()


def test_examples_are_those_of_the_mapped_dataset(tmp_path, tokenizer):
    path = write_conversations(tmp_path / "chats.jsonl")
    settings = {"source": str(path), **OPENAI}
    mapped = chat_dataset(tokenizer, **settings)
    streamed = chat_dataset(tokenizer, streaming=True, shuffle_buffer=7, **settings)
    assert [streamed[i] for i in range(24)] == [mapped[i] for i in range(24)]
    assert streamed.origins(23) == [{"source": str(path), "line": 24}]
    texts = tmp_path / "texts.txt"
    texts.write_text("the cat sees a red bird\n" * 30)
    packed = text_completion_dataset(tokenizer, str(texts), packed=True, streaming=True, max_seq_len=50)
    for i in range(4):
        assert sum(len(document["tokens"]) for document in packed[i]) == 50
    for splits in (True, False):  # unpacked texts are truncated in any case
        settings = {"max_seq_len": 5, "split_across_pack": splits}
        streamed = text_completion_dataset(tokenizer, str(texts), streaming=True, **settings)
        assert len(streamed[0]["tokens"]) == 4
        assert streamed[0] == text_completion_dataset(tokenizer, str(texts), **settings)[0]


def test_error_while_streaming_names_file_and_line(tmp_path):
    def stream(text, **settings):
        path = tmp_path / "rows.jsonl"
        path.write_bytes(text)
        return StreamedDataset(transform, str(path), limit=None, **settings)

    good = b'{"id": 1, "length": 2}\n'
    for text, words in (
        (good + b"{broken\n", r"rows\.jsonl, line 2: no JSON, Expecting property name"),
        (good + b"[1]\n", r"rows\.jsonl, line 2: a row must be a mapping"),
        (
            good + b'{"id": 1, "length": 0}\n',
            r"rows\.jsonl, line 2: no label is left; correct it, or leave",
        ),
        (good + b'{"id": -5, "length": 1}\n', r"rows\.jsonl, line 2: token id -5 is not in the vocabulary"),
    ):
        with pytest.raises(DataError, match=words):
            stream(text)[1]
    with pytest.raises(DataError, match="There are no rows in"):
        stream(good, filter_fn=lambda row: False)[0]
    with pytest.raises(DataError, match="1: 2 tokens fit into no pack of 1"):
        stream(good, pack_length=1)[0]
    shrinking = stream(good * 4, shuffle_buffer=2)
    shrinking[0]
    (tmp_path / "rows.jsonl").write_bytes(good * 3)
    with pytest.raises(DataError, match="has shrunk while the run reads it, from 92 to 69 bytes"):
        shrinking[2]
    (tmp_path / "rows.jsonl").unlink()
    with pytest.raises(DataError, match="can no longer be read"):
        shrinking[2]


def test_a_source_that_fails_once_is_read_again():
    """A second read at the same position does not take the failure for the end of the rows."""
    failures = [ConnectionError("no route to host")]

    def generate():
        for row_id in range(6):
            if row_id == 3 and failures:
                raise failures.pop()
            yield {"id": row_id}

    reader = HubReader(datasets.IterableDataset.from_generator(generate), "rows of the hub")
    rows, position = reader.window(None, 2, None)
    with pytest.raises(DataError, match="can no longer be read after 2 rows"):
        reader.window(position, 2, None)
    further_rows, position = reader.window(position, 4, None)
    assert [row.content["id"] for row in [*rows, *further_rows]] == list(range(6))


def test_rows_that_are_left_out_are_listed(tmp_path, tokenizer):
    path = tmp_path / "chats.jsonl"
    out = tmp_path / "out"
    rows = [{"input": "the cat", "output": "a bird"}, {"input": "the cat"}, {"input": "a dog", "output": "one cat"}]
    write_lines(path, rows)
    settings = {"source": str(path), "on_bad_row": "skip"}
    get_run_logger(out, "ERROR")
    try:
        for _ in range(2):  # the second time they were tokenized before
            mapped = instruct_dataset(tokenizer, **settings)
            assert len(mapped) == 2
            assert mapped.origins(1) == [{"source": str(path), "row": 2}]
        path.write_text(path.read_text() + "{broken\n")
        streamed = instruct_dataset(tokenizer, **settings, streaming=True, packed=True)
        assert [len(streamed[i]) for i in range(3)] == [2, 2, 2]  # passes of one pack
        assert streamed.origins(0) == [{"source": str(path), "line": line} for line in (1, 3)]
    finally:
        close_run_logger()
    skipped = read_lines(out / "skipped_rows.jsonl")
    assert [(row.get("row"), row.get("line")) for row in skipped] == [(1, None), (None, 2), (None, 4)]
    assert "there is no column 'output'" in skipped[0]["reason"]
    assert "Expecting property name" in skipped[2]["reason"]
    with pytest.raises(DataError, match=r"row 1: .*leave them out with on_bad_row=skip"):
        instruct_dataset(tokenizer, source=rows)
    with pytest.raises(DataError, match="no row is left"):
        instruct_dataset(tokenizer, source=rows[1:2], on_bad_row="skip")


def test_settings_that_streams_rule_out_are_refused(tmp_path, tokenizer):
    rows = [{"input": "a", "output": "b"}]
    source = str(write_lines(tmp_path / "x.jsonl", rows))
    node = {"_component_": "torchtune.datasets.instruct_dataset", "source": source, "streaming": True}
    for change, words in (
        ({"source": rows}, "rows in memory"),
        ({"split": "train[:5%]"}, "name a whole split"),
        ({"prepared": "/tmp"}, "leave streaming out"),
        ({"shuffle_buffer": 0}, "shuffle_buffer must be at least 1"),
        ({"drop_duplicates": True}, "drop_duplicates compares all rows"),
        ({"filter_kwargs": {"with_indices": True}}, "filter_kwargs is not possible for a stream"),
    ):
        with pytest.raises(DataError, match=words):
            mixed_dataset(tokenizer, datasets={"a": {**node, **change}}, weights={"a": 1})
    with pytest.raises(DataError, match="give each dataset of the mixture a weight"):
        mixed_dataset(tokenizer, datasets={"a": node})
    with pytest.raises(DataError, match="stop=all needs to know"):
        mixed_dataset(tokenizer, datasets={"a": node}, weights={"a": 1}, stop="all")
    mixture = mixed_dataset(tokenizer, datasets={"a": node}, weights={"a": 1})
    with pytest.raises(DataError, match="set max_steps_per_epoch"):
        BatchLoader(mixture, batch_size=1, collate_fn=list, shuffle=True, seed=0)


@given(
    how=STREAMS,
    weights=st.tuples(st.floats(0.1, 9), st.floats(0.1, 9)),
    index=st.integers(0, 700),
    size=st.integers(1, 9),
)
@QUICK
def test_a_mixture_with_a_stream_is_in_proportion_and_goes_on(tmp_path, how, weights, index, size):
    how = {**how, "packs": None}
    mapped = [{"tokens": [1000 + i], "labels": [1]} for i in range(size)]

    def mixture():
        parts = {"stream": stream(tmp_path, how), "mapped": mapped}
        dataset = mixed_dataset(None, datasets=parts, weights=dict(zip(parts, weights, strict=True)))
        dataset.begin(4, shuffle=how["shuffle"])
        return dataset

    uninterrupted = mixture()
    resumed = mixture()
    examples = [uninterrupted[i] for i in range(index + 20)]
    for i in range(0, len(examples), 37):
        count = sum(int(example["source"]) for example in examples[:i])
        assert abs(count - i * weights[1] / sum(weights)) <= 3
    times = [0] * size
    for example in examples:
        if example["source"] == 1:
            times[example["tokens"][0] - 1000] += 1
    assert max(times) - min(times) <= 1
    resumed.go_to(json.loads(json.dumps(uninterrupted.state_at(index))))
    assert [resumed[i] for i in range(index, index + 20)] == examples[index:]


def test_a_row_may_fill_a_pack_but_not_exceed_it(tmp_path):
    path = write_lines(tmp_path / "rows.jsonl", [{"id": 1, "length": CAPACITY}])
    (document,) = StreamedDataset(transform, str(path), limit=None, pack_length=CAPACITY)[0]
    assert len(document["tokens"]) == CAPACITY
    with pytest.raises(DataError, match=rf"rows\.jsonl, line 1: {CAPACITY} tokens fit into no pack of {CAPACITY - 1}"):
        StreamedDataset(transform, str(path), limit=None, pack_length=CAPACITY - 1)[0]
