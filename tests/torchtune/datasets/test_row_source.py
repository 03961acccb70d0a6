"""Where rows come from, and what is said when they cannot be read."""

import csv
import gzip
import json
import logging
import socket
import time
from pathlib import Path

import pytest

from tests.tiny import write_lines
from torchtune.data import DataError
from torchtune.datasets import RowSource, chat_dataset, instruct_dataset, load_rows
from torchtune.datasets._data_files import resolve_source
from torchtune.datasets._streamed import open_reader

ROWS = [{"input": f"red {i}", "output": f"blue {i}"} for i in range(6)]


def write(path, rows=ROWS):
    """Write rows in the format of the suffix."""
    kind = path.suffixes[0]
    if kind == ".jsonl":
        write_lines(path, rows)
        if path.suffix == ".gz":
            path.write_bytes(gzip.compress(path.read_bytes()))
    elif kind == ".json":
        path.write_text(json.dumps(rows))
    elif kind == ".parquet":
        import datasets

        datasets.Dataset.from_list(rows).to_parquet(str(path))
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if kind == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    return path


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".jsonl.gz", ".csv", ".tsv", ".parquet"])
def test_file_is_read_by_its_suffix(suffix, tmp_path):
    path = str(write(tmp_path / f"mine{suffix}"))
    assert list(load_rows(path, split="train")) == ROWS
    assert list(load_rows("someone/on-the-hub", data_files=path, split="train")) == ROWS
    loader = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}.get(Path(path).suffixes[0], "csv")
    assert list(load_rows(loader, data_files=[path], split="train")) == ROWS


def test_split_and_filter_select_rows(tmp_path):
    path = str(write(tmp_path / "mine.jsonl"))
    test_path = str(write(tmp_path / "other.jsonl", ROWS[:2]))
    assert len(load_rows(path, split="train[:50%]")) == 3
    assert list(load_rows("json", data_files={"train": path, "test": test_path}, split="test")) == ROWS[:2]
    assert len(load_rows(path, split="train", filter_fn=lambda row: row["input"] != "red 3")) == 5


def test_a_folder_of_save_to_disk_is_read(tmp_path):
    import datasets

    dataset_folder = str(tmp_path / "one")
    dict_folder = str(tmp_path / "two")
    datasets.Dataset.from_list(ROWS).save_to_disk(dataset_folder)
    assert list(load_rows(dataset_folder, split="train")) == ROWS
    assert list(load_rows(dataset_folder, split="train[1:3]")) == ROWS[1:3]
    assert [row.columns() for row in open_reader(dataset_folder, split="train")[0].window(None, 9, None)[0]] == ROWS
    parts = {"train": datasets.Dataset.from_list(ROWS), "held": datasets.Dataset.from_list(ROWS[:1])}
    datasets.DatasetDict(parts).save_to_disk(dict_folder)
    assert list(load_rows(dict_folder, split="held")) == ROWS[:1]
    assert "has the splits train, held: set split to one" in refused(tmp_path, source=dict_folder, split="test")
    assert "name does not go with" in refused(tmp_path, source=dict_folder, name="x")
    assert RowSource(datasets.load_from_disk(dataset_folder)).rows().to_list() == ROWS


def test_files_of_a_hub_dataset_stay_its_files():
    assert resolve_source("someone/data", {"data_files": "part/one.jsonl"}) == (
        "someone/data",
        {"data_files": "part/one.jsonl"},
    )
    assert resolve_source("json", {"data_files": "https://host/x.jsonl"})[0] == "json"
    # A URL is no file inside the Hub dataset.
    assert resolve_source("someone/data", {"data_files": "s3://bucket/x.jsonl"})[0] == "json"


def refused(tmp_path, **settings):
    with pytest.raises(DataError) as caught:
        load_rows(**{"split": "train", **settings})
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_hub_that_cannot_be_reached_for_a_data_file_is_one_sentence(tmp_path, monkeypatch):
    import datasets

    class ConnectError(Exception):
        """As of httpx, which is neither an OSError nor a ValueError."""

    def download(self, name):
        raise ConnectError("[Errno -2] Name or service not known")

    monkeypatch.setattr(datasets.DownloadManager, "download", download)
    message = refused(tmp_path, source="json", data_files="hf://datasets/someone/data/x.jsonl")
    assert message.startswith("hf://datasets/someone/data/x.jsonl cannot be fetched ([Errno -2] Name or service not")
    assert message.endswith("check the address, the credentials, and the network.")


def test_missing_or_empty_file_is_refused(tmp_path):
    assert "There is no data file" in refused(tmp_path, source=str(tmp_path / "no.jsonl"))
    for data_files in (1e-5, [3], {"train": 3}):
        assert "which is no path: give the path of a file" in refused(tmp_path, source="json", data_files=data_files)
    assert "There is no data file" in refused(tmp_path, source="json", data_files=str(tmp_path / "no.jsonl"))
    assert "There is no data file" in refused(tmp_path, source="a/b", data_files=str(tmp_path / "no.jsonl"))
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    assert "is empty" in refused(tmp_path, source=str(empty))
    assert "needs data_files" in refused(tmp_path, source="json")


def test_a_loader_reads_a_folder(tmp_path):
    import datasets

    folder = tmp_path / "parts"
    folder.mkdir()
    assert "its files are none that are read" in refused(tmp_path, source="parquet", data_dir=str(folder))
    for name, rows in (("train", ROWS), ("test", ROWS[:2])):
        datasets.Dataset.from_list(rows).to_parquet(folder / f"{name}.parquet")
    for split, rows in (("train", ROWS), ("test", ROWS[:2])):
        assert list(load_rows("parquet", data_dir=str(folder), split=split)) == rows
    assert "its files are 2 of parquet: name those" in refused(tmp_path, source="json", data_dir=str(folder))
    for name in ("a.json", "b.json"):
        write(folder / name)
    assert "2 of json, 2 of parquet" in refused(tmp_path, source="parquet", data_dir=str(folder))
    assert "There is no folder" in refused(tmp_path, source="parquet", data_dir=str(tmp_path / "none"))


def test_error_of_the_datasets_package_is_reported_once(tmp_path, caplog):
    path = tmp_path / "broken.parquet"
    path.write_bytes(b"PAR1")
    log = logging.getLogger("datasets")  # its messages do not reach the root
    log.addHandler(caplog.handler)
    try:
        assert f"Cannot load {path}: Parquet file size is 4 bytes" in refused(tmp_path, source=str(path))
    finally:
        log.removeHandler(caplog.handler)
    assert not caplog.records, "the datasets package logs what it raises, too"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b'{"input": "a"}\n{"input": \n', r"rows\.jsonl, line 2: no JSON"),
        (b"input,output\na,caf\xe9\n", r"rows\.csv, line 2: byte 6 is not UTF-8: save the file as UTF-8"),
    ],
)
def test_a_broken_line_is_named_when_it_is_read(text, words, tmp_path):
    path = tmp_path / f"rows.{'jsonl' if text.startswith(b'{') else 'csv'}"
    path.write_bytes(text)
    for split in ("train", "train[:100%]"):
        with pytest.raises(DataError, match=words):
            list(load_rows(str(path), split=split))


def test_unknown_split_is_refused_with_the_splits_of_the_file(tmp_path):
    message = refused(tmp_path, source=str(write(tmp_path / "mine.jsonl")), split="valid")
    assert "valid" in message
    assert "train" in message


def test_filter_that_leaves_no_rows_is_refused(tmp_path):
    path = str(write(tmp_path / "mine.jsonl"))
    assert "filter_fn is 'mine.keep', not a function of a row" in refused(tmp_path, source=path, filter_fn="mine.keep")
    assert "filter_fn leaves no rows" in refused(tmp_path, source=path, filter_fn=lambda row: False)
    empty = tmp_path / "head.csv"
    empty.write_text("input,output\n")
    assert "no rows" in refused(tmp_path, source=str(empty))
    assert "no rows" in refused(tmp_path, source=path, split="train[:0]")


def test_missing_split_is_refused_with_the_splits_of_the_file(tmp_path):
    path = str(write(tmp_path / "mine.jsonl"))
    assert "has the splits train" in refused(tmp_path, source=path, split=None)
    for setting in ({"streaming": True}, {"shuffle_buffer": 5}):
        with pytest.raises(DataError, match="streaming=True"):
            RowSource(path, **setting)


def test_unreachable_hub_is_named(tmp_path):
    message = refused(tmp_path, source="someone/something")
    assert "someone/something" in message
    assert "hub" in message


def test_a_hub_that_does_not_answer_is_not_waited_for(tmp_path, monkeypatch):
    import datasets

    with socket.socket() as closed:  # a port at which nobody listens
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    monkeypatch.chdir(tmp_path)
    waits = []
    monkeypatch.setattr(time, "sleep", waits.append)
    message = refused(tmp_path, source="someone/something", data_files="nope.jsonl")
    assert not waits, "between the attempts of the datasets package"
    assert f"the hub cannot be reached, and there is no data file nope.jsonl in {tmp_path}" in message
    assert datasets.config.HF_HUB_OFFLINE is False


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"source": "a/b", "data_files": ["mine.jsonl", "nope.jsonl"]}, "There is no data file nope.jsonl"),
        ({"source": "a/b", "data_files": {"train": "./min.jsonl"}}, "did you mean mine.jsonl"),
        ({"source": "a/b", "data_files": "./*.jsonlines"}, "There is no data file ./*.jsonlines"),
        ({"source": "json", "data_files": "more/*.json"}, "There is no data file more/*.json"),
        ({"source": "json", "data_files": "folder"}, "names the folder folder"),
        ({"source": "./data"}, "There is no folder or file ./data"),
        ({"source": "~/no/such/data"}, "There is no folder or file"),
        ({"source": "one/two/three"}, "There is no folder or file one/two/three"),
        ({"source": "mine.xlsx"}, "is of no kind that is read"),
    ],
)
def test_missing_path_is_refused_without_the_hub(settings, said, tmp_path, monkeypatch):
    write(tmp_path / "mine.jsonl")
    (tmp_path / "mine.xlsx").write_text("x")
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: pytest.fail("was asked"))
    assert said in refused(tmp_path, **settings)


def test_builders_read_a_path_as_source(tmp_path, tokenizer):
    path = str(write(tmp_path / "mine.jsonl"))
    assert len(instruct_dataset(tokenizer, source=path)) == 6
    with pytest.raises(DataError, match="conversation_style must be openai or sharegpt, not 'chatml'"):
        chat_dataset(tokenizer, source=path, conversation_column="a", conversation_style="chatml")
