"""Every reader of a file gives the texts that stand in it: tables, lines and lists of JSON, compressed files."""

import bz2
import gzip
import json
import lzma
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torchtune.data import DataError
from torchtune.datasets import (
    RowSource,
    StreamedDataset,
    instruct_dataset,
    kto_dataset,
    load_rows,
    prompt_dataset,
    read_rows,
    scan,
)
from torchtune.datasets._data_files import FileRows
from torchtune.datasets._file_formats import JsonLines, Line, decode_row
from torchtune.datasets._streamed import open_reader
from torchtune.generation import read_prompts
from torchtune.rlhf.reward_functions import ExactMatch, NumberMatch
from torchtune.utils import UserError


def _streamed(path, **settings):
    """Read a file in windows of one row, with a new reader for each, as resumed runs do."""
    rows = []
    position = None
    while True:
        reader, _ = open_reader(str(path), split="train", **settings)
        window, position = reader.window(json.loads(json.dumps(position)), 1, None)
        rows += [pickle.loads(pickle.dumps(row)).columns() for row in window]
        if position is None:
            return rows


READERS: dict[str, Callable[..., Any]] = {
    "mapped": lambda path, **settings: list(load_rows(str(path), split="train", **settings)),
    "indexed": lambda path, **settings: list(load_rows(str(path), split="train[:100%]", **settings)),
    "streamed": _streamed,
}

# What is written, and the rows that RFC 4180 says it holds.
TABLES = {
    "numbers": (b"input,output\n007,1.50\n1e5,-0\n", [["007", "1.50"], ["1e5", "-0"]]),
    "words for nothing": (b"input,output\nNaN,n/a\nNULL,None\n", [["NaN", "n/a"], ["NULL", "None"]]),
    "words for truth": (b"input,output\nTRUE,no\n2024-05-06,12:30\n", [["TRUE", "no"], ["2024-05-06", "12:30"]]),
    "empty cells": (b'input,output\n,""\n" ",x\n', [["", ""], [" ", "x"]]),
    "quotes": (b'input,output\n"say ""hi"", please",5" wide\n', [['say "hi", please', '5" wide']]),
    "line breaks": (b'input,output\n"one\n\ntwo","a\r\nb"\nx,y\n', [["one\n\ntwo", "a\r\nb"], ["x", "y"]]),
    "Windows": (b"\xef\xbb\xbfinput,output\r\na,b\r\n\r\nc,d", [["a", "b"], ["c", "d"]]),
    "mark before quotes": (b'\xef\xbb\xbf"input","output"\n"a\nb",c\n', [["a\nb", "c"]]),
    "other lines of Unicode": ("input,output\na\u2028b,c\x0bd\n".encode(), [["a\u2028b", "c\x0bd"]]),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHTUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("table", TABLES)
def test_every_cell_is_the_text_in_the_file(reader, table, tmp_path):
    written, cells = TABLES[table]
    path = tmp_path / "rows.csv"
    path.write_bytes(written)
    rows = [dict(zip(("input", "output"), row, strict=True)) for row in cells]
    assert READERS[reader](path) == rows
    assert [row for _, row in read_rows(path)] == rows


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("settings", "written"),
    [
        ({"delimiter": ";"}, "input;output\n1,5;x\n"),
        ({"sep": "|", "quotechar": "'"}, "input|output\n'1,5'|x\n"),
        ({"names": ["input", "output"]}, '"1,5",x\n'),
        ({"column_names": ["input", "output"], "header": 0}, 'a,b\n"1,5",x\n'),
        ({"skiprows": 2}, 'a report\n\ninput,output\n"1,5",x\n'),
        ({"quoting": 3, "delimiter": "\t"}, "input\toutput\n1,5\tx\n"),
        ({"skipinitialspace": True}, 'input, output\n"1,5", "x"\n'),
        ({"escapechar": "\\", "doublequote": False}, "input,output\n1\\,5,x\n"),
        ({"keep_default_na": False, "num_proc": 2, "dtype": "str"}, 'input,output\n"1,5",x\n'),
    ],
)
def test_delimiter_and_quote_settings_of_tables_are_applied(reader, settings, written, tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(written)
    assert READERS[reader](path, **settings) == [{"input": "1,5", "output": "x"}]


def test_quoting_settings_of_tables_are_applied(tmp_path):
    path = tmp_path / "rows.tsv"
    path.write_text('input\toutput\n"hello" he said\t"\n')
    assert READERS["mapped"](path, quoting=3) == [{"input": '"hello" he said', "output": '"'}]
    with pytest.raises(DataError, match="line 2: a text goes on behind its closing quotation mark"):
        READERS["mapped"](path)
    (tmp_path / "rows.csv").write_text('a\n"say \\"hi\\""\n')
    assert READERS["mapped"](tmp_path / "rows.csv", escapechar="\\", doublequote=False) == [{"a": 'say "hi"'}]


def test_tab_separated_and_encoded_files_are_read(tmp_path):
    (tmp_path / "rows.tsv").write_bytes(b"input\toutput\n\t\na,b\tc\n")
    assert READERS["mapped"](tmp_path / "rows.tsv") == [{"input": "", "output": ""}, {"input": "a,b", "output": "c"}]
    (tmp_path / "rows.csv").write_bytes("input,output\ncafé,é\n".encode("latin-1"))
    rows = [{"input": "café", "output": "é"}]
    assert READERS["mapped"](tmp_path / "rows.csv", encoding="latin-1") == rows
    (tmp_path / "index.csv").write_text(",input\n0,a\n")  # as pandas writes an index
    assert READERS["mapped"](tmp_path / "index.csv") == [{"Unnamed: 0": "0", "input": "a"}]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dtype": {"a": "int"}}, "dtype is not a setting of tables, where every cell is the text"),
        ({"na_values": ["-"]}, "na_values is not a setting of tables"),
        ({"delimiter": "::"}, "delimiter must be one ASCII character, not '::'"),
        ({"header": 3}, "header must be 0"),
        ({"quoting": 2}, "quoting must be 0 or, if quotes are plain characters, 3, not 2"),
        ({"doublequote": "no"}, "doublequote must be true or false"),
        ({"column_names": "a"}, "column_names must be a list of names"),
        ({"column_names": ["a", "a"]}, "two columns are named 'a'"),
        ({"column_names": 5}, "column_names must be a list of names, not 5"),
        ({"skiprows": [1]}, "skiprows must be the number of lines"),
        ({"encoding": "utf-16"}, "encoding=utf-16 cannot be read in lines"),
        ({"encoding": 8}, "encoding must be the name of an encoding, such as utf-8, not 8"),
        ({"encoding": "utf-9"}, "encoding=utf-9 is not known"),
        ({"encoding": "undefined"}, "encoding=undefined is not known"),
    ],
)
def test_settings_that_are_not_known_are_refused_by_name(settings, words, tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("a,b\n1,2\n")
    for read in (load_rows, open_reader):
        with pytest.raises(DataError, match=words):
            read(str(path), split="train", **settings)


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ('input,output\na,b\n"c\nd",e,f\n', r"line 3: it has 3 fields and the header has 2: put texts with the delim"),
        ("input,output\na,b\nc\n", "line 3: it has 1 fields and the header has 2"),
        ('input,output\na,b\nc,"d\ne,f\n', "line 3: a cell begins with a quotation mark that is never closed"),
        ('input,output\n"a" b,c\n', "line 2: a text goes on behind its closing quotation mark"),
        ("input,output\na,b\0\n", "line 2: it has a zero byte"),
        ("input;output\na;b\n", "line 1: the header is one column, 'input;output': set delimiter=';'"),
        ('"input";"output"\n"a";"b"\n', "line 1: the names of the header are in quotes.*: set delimiter=';'"),
        ('"the ""input""" \t,"b"\na,b\n', "line 1: a text goes on behind its closing quotation mark"),
        ("input,input\na,b\n", "line 1: two columns are named 'input'"),
    ],
    ids=[
        "more fields",
        "fewer fields",
        "open quote",
        "behind a quote",
        "zero byte",
        "delimiter",
        "delimiter in quotes",
        "quotes",
        "header",
    ],
)
def test_broken_tables_are_refused_by_file_and_line(written, words, tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(written)
    for read in (*READERS.values(), lambda path: list(read_rows(path))):
        # A stream names the place beside the reason, as the run's error does.
        reason = words.split(": ", 1)[1] if read is _streamed else rf"rows\.csv, {words}"
        with pytest.raises(UserError, match=reason):
            read(path)


def test_a_row_of_another_width_is_skipped_on_request(tokenizer, tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("input,output\nthe cat,red\na, b,c\nthe dog,blue\n")
    with pytest.raises(DataError, match=r"row 1: it has 3 fields.*row 1 is .*rows\.csv, line 3"):
        instruct_dataset(tokenizer, source=str(path))
    assert len(instruct_dataset(tokenizer, source=str(path), on_bad_row="skip")) == 2


def test_numbers_of_a_table_are_trained_and_rewarded_as_texts(tokenizer, tmp_path):
    path = tmp_path / "sums.csv"
    path.write_text("input,output\n1+1,2\n2+2,04\n")
    data = instruct_dataset(tokenizer, source=str(path))
    answers = []
    for row in data:
        labels = [label for label in row["labels"] if label != -100]
        answers.append(tokenizer.decode(labels).strip())
    assert answers == ["2", "04"]
    path.write_text("prompt,answer\n1+1,2\n3 / 2,1.50\n")
    rows = [item["row"] for item in prompt_dataset(tokenizer, source=str(path))]
    assert rows == [{"prompt": "1+1", "answer": "2"}, {"prompt": "3 / 2", "answer": "1.50"}]
    assert ExactMatch()(rows, ["2", "1.50"]) == [1.0, 1.0]
    assert NumberMatch()(rows, ["2.0", "it is 1.5"]) == [1.0, 1.0]


def test_labels_of_a_table_are_understood(tokenizer, tmp_path):
    path = tmp_path / "thumbs.csv"
    path.write_text("prompt,completion,label\nwho,the cat,true\nwho,the dog,False\nwho,red,1\nwho,blue,0\n")
    assert [row["is_chosen"] for row in kto_dataset(tokenizer, source=str(path))] == [True, False, True, False]
    path.write_text("prompt,completion,label\nwho,the cat,good\n")
    with pytest.raises(DataError, match="column 'label' is 'good': it must be true or false"):
        kto_dataset(tokenizer, source=str(path))


PACKERS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", ["jsonl", "csv"])
@pytest.mark.parametrize("suffix", PACKERS)
def test_compressed_files_are_read_and_damaged_ones_named(reader, kind, suffix, tmp_path):
    written = b'a,b\n"1\n2",x\n\n3,y\n' if kind == "csv" else b'{"a": "1\\n2", "b": "x"}\n\n{"a": "3", "b": "y"}\n'
    path = tmp_path / f"rows.{kind}{suffix}"
    path.write_bytes(PACKERS[suffix](written))
    rows = [{"a": "1\n2", "b": "x"}, {"a": "3", "b": "y"}]
    assert READERS[reader](path) == rows
    assert [number for number, _ in read_rows(path)] == ([2, 5] if kind == "csv" else [1, 3])
    path.write_bytes(path.read_bytes()[:-6])
    with pytest.raises(UserError, match=rf"rows\.{kind}{suffix} is a damaged (gzip|bzip2|xz) file"):
        READERS[reader](path)


def test_zstd_needs_its_package(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl.zst"
    path.write_bytes(b"\x28\xb5\x2f\xfd")  # the first bytes of every such file
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    with pytest.raises(UserError, match=r"rows\.jsonl\.zst.*needs the package 'zstandard'.*torchtune\[zstd\]"):
        READERS["mapped"](path)
    monkeypatch.undo()
    zstandard = pytest.importorskip("zstandard")
    monkeypatch.setenv("TORCHTUNE_CACHE", str(tmp_path / "cache"))
    path.write_bytes(b"".join(zstandard.compress(b'{"a": %d}\n' % number) for number in range(3)))
    assert READERS["mapped"](path) == READERS["streamed"](path) == [{"a": 0}, {"a": 1}, {"a": 2}]
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(UserError, match=r"rows\.jsonl\.zst is a damaged zstd file"):
        READERS["mapped"](path)


# Nulls and keys of one row alone survive, and whole numbers stay whole.
OBJECTS = [{"a": {"x": None, "n": 1}}, {"a": {"y": 2.0}, "b": [None, "é"]}]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("rows.json", json.dumps(OBJECTS)),
        ("rows.jsonl", json.dumps(OBJECTS)),
        ("rows.jsonl", json.dumps(OBJECTS, indent=1)),
        ("rows.json", "\n".join(json.dumps(row, indent=2) for row in OBJECTS)),
        ("rows.json", "\n".join(map(json.dumps, OBJECTS))),
    ],
    ids=["list", "list in lines", "indented list", "indented objects", "lines"],
)
def test_json_lists_are_rows(reader, name, written, tmp_path):
    path = tmp_path / name
    path.write_text(written)
    assert READERS[reader](path) == OBJECTS
    assert [row for _, row in read_rows(path)] == OBJECTS


def test_list_inside_of_a_json_object_is_read(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"version": 1, "data": OBJECTS}, indent=1))
    assert READERS["mapped"](path, field="data") == READERS["streamed"](path, field="data") == OBJECTS
    for settings, words in (
        ({}, r"one object \(version, data\).*name the key.*or, if it is a row"),
        ({"field": "x"}, "no object with"),
    ):
        with pytest.raises(DataError, match=words):
            READERS["mapped"](path, **settings)
    path.write_text("3")
    with pytest.raises(DataError, match=r"rows\.json: it holds one int, not a list of rows"):
        READERS["mapped"](path)


def test_row_locations_name_file_and_line(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text('a\n"1\n2"\n\n3\n')
    assert [load_rows(str(path), split="train").location(i) for i in (0, 1)] == [f"{path}, line 2", f"{path}, line 5"]
    assert [row.location for row in open_reader(str(path))[0].window(None, 9, None)[0]] == [
        f"{path}, line 2",
        f"{path}, line 5",
    ]
    path = tmp_path / "rows.json"
    path.write_text('[{"a": 1}, 3]')
    rows = load_rows(str(path), split="train")
    assert rows.location(1) == f"{path}, row 2"
    with pytest.raises(DataError, match=r"rows\.json, row 2: a row must be a mapping column -> value, not int"):
        rows[1]


@pytest.mark.parametrize(
    ("names", "left_out"),
    [
        (["a.csv", "b.csv", "c.jsonl"], "c.jsonl"),
        (["train.csv", "more/rows.csv"], "more/rows.csv"),
        (["train.csv", "test.csv", "LICENSE.txt", ".hidden.csv"], None),
        (["train.csv", ".cache/rows.csv", "__pycache__/rows.jsonl"], None),
    ],
)
def test_files_of_a_folder_that_are_left_out_are_named(tmp_path, caplog, names, left_out):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"a": "1"}' if name.endswith("l") else "a\n1\n")
    load_rows(str(tmp_path), split="train")
    messages = [record.message for record in caplog.records if "leaves out" in record.message]
    assert len(messages) == (left_out is not None)
    assert left_out is None or f"which leaves out {left_out}: name" in messages[0]


def test_splits_follow_file_names_and_slices(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, numbers in (("train-0", range(3)), ("train-1", range(3, 5)), ("test", range(5, 7))):
        (folder / f"{name}.csv").write_text("a\n" + "".join(f"{n}.0\n" for n in numbers))

    def read(source, **settings):
        return [row["a"] for row in load_rows(str(source), **settings)]

    assert read(folder, split="train") == ["0.0", "1.0", "2.0", "3.0", "4.0"]
    assert read(folder, split="train[1:3]+test[-1:]") == ["1.0", "2.0", "6.0"]
    assert read("csv", data_files={"t": f"{folder}/train-*.csv"}, split="t[:40%]") == ["0.0", "1.0"]
    with pytest.raises(DataError, match="has the splits"):
        read(folder, split=None)
    with pytest.raises(DataError, match="valid"):
        read(folder, split="valid")
    stream = StreamedDataset(lambda row: {"tokens": [1], "labels": [int(float(row["a"]))]}, str(folder), limit=None)
    assert [stream[index]["labels"] for index in range(5)] == [[0], [1], [2], [3], [4]]


def test_filter_settings_are_applied_to_rows(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("a,b\n1,x\n2,y\n3,x\n")

    def kept(filter_fn, **settings):
        source = RowSource(str(path), split="train", filter_fn=filter_fn, filter_kwargs=settings)
        return [row["a"] for row in source.rows()]

    assert kept(lambda row: row["b"] == "x") == ["1", "3"]
    assert kept(lambda b, number: b == "x" and number, input_columns="b", with_indices=True, num_proc=2) == ["3"]
    assert kept(lambda row, name: row["b"] == name, fn_kwargs={"name": "y"}) == ["2"]
    with pytest.raises(DataError, match="batched=True is not possible"):
        kept(lambda rows: rows, batched=True)


def test_blank_lines_of_a_text_are_no_rows(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("one\n\n  \n two \r\n\n")
    rows = [{"text": "one"}, {"text": " two "}]
    assert [READERS[name](path) for name in READERS] == [rows] * 3
    assert [number for number, _ in read_rows(path)] == [1, 4]


def test_a_row_that_is_no_mapping_is_refused():
    with pytest.raises(DataError, match="not list"):
        decode_row(Line.of(b"[1]", JsonLines()))


GOOD = '{"prompt": "the cat"}'
BOM = b"\xef\xbb\xbf"


def _shown(path):
    facts = scan(path, everything=True)
    if facts.problems:
        raise UserError(f"{path}, line {facts.problems[0][0]}: {facts.problems[0][1]}")
    return [facts.example] * facts.rows


LINE_READERS: dict[str, Callable[[Path], Any]] = {
    "mapped": lambda path: list(load_rows(str(path), split="train")),
    "streamed": lambda path: [row.columns() for row in open_reader(path, split="train")[0].window(None, 9, None)[0]],
    "evaluated": lambda path: [row for _, row in read_rows(path)],
    "answered": lambda path: [prompt.given for prompt in read_prompts(path)],
    "shown": _shown,
}


def test_messages_of_a_prompt_may_be_json_text(tmp_path):
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"messages": json.dumps(turns)}) + "\n" + json.dumps({"messages": "Why?"}))
    written, text = read_prompts(path)
    assert [(turn.role, turn.text_content) for turn in written.messages] == [("system", "Be brief."), ("user", "Why?")]
    assert [(turn.role, turn.text_content) for turn in text.messages] == [("user", "Why?")]


@pytest.mark.parametrize("reader", LINE_READERS)
@pytest.mark.parametrize(
    "text",
    [
        f"{GOOD}\n{GOOD}".encode(),
        BOM + f"{GOOD}\n\n  \n{GOOD}\r\n\n".encode(),
        gzip.compress(f"{GOOD}\n{GOOD}\n".encode()),
        f"{GOOD[:-1]}, {GOOD[1:]}\n{GOOD}".encode(),
    ],
    ids=["plain", "mark and empty lines", "packed", "keys with equal values"],
)
def test_lines_of_json_are_rows(reader, text, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(text)
    assert LINE_READERS[reader](path) == [json.loads(GOOD)] * 2


@pytest.mark.parametrize("reader", LINE_READERS)
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f'{GOOD}\n{{"prompt": \n'.encode(), "line 2: no JSON, Expecting value at column"),
        (f"{GOOD}\n".encode() + '{"prompt": "é"}'.encode("latin-1"), "line 2: byte 13 is not UTF-8: save"),
        (f"{GOOD}\n".encode("utf-16"), "line 1: the file is UTF-16, not UTF-8: save"),
        (f"{GOOD}\n".encode() + b"\xff\xfe bad", "line 2: byte 1 is not UTF-8: save"),
        (f'{GOOD}\n{{"prompt": "a\0"}}\n'.encode(), "line 2: a zero byte at column 14"),
        (f'{GOOD}\n{{"prompt": "\\ud83d"}}\n'.encode(), r"line 2: \\ud83d is half of a character"),
        (b'{"prompt": ' + b"[" * 100_000, "line 1: it is nested too deeply"),
        (b'{"prompt": ' + b"1" * 5_000 + b"}", "line 1: no JSON, Exceeds the limit"),
        (b'{"prompt": "a\tb"}', "line 1: no JSON, Invalid control character at column 14"),
        (f'{GOOD}\n{{"prompt": "a", "prompt": "b"}}\n'.encode(), "line 2: the key 'prompt' has two values: keep one"),
        (b'{"prompt": {"role": "user", "role": "system"}}', "line 1: the key 'role' has two values: keep one"),
    ],
    ids=[
        "broken",
        "Latin-1",
        "UTF-16",
        "bytes of its mark",
        "NUL",
        "surrogate",
        "deep",
        "digits",
        "tab",
        "keys",
        "deep keys",
    ],
)
def test_broken_lines_are_refused_by_number(reader, text, words, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(text)
    with pytest.raises(UserError, match=words if reader != "streamed" else words.partition(": ")[2]):
        LINE_READERS[reader](path)


@pytest.mark.parametrize("reader", ["mapped", "shown", "answered"])
@pytest.mark.parametrize("damage", [slice(0, 60), slice(15, None)], ids=["cut", "changed"])
def test_damaged_gzip_file_is_named(reader, damage, tmp_path):
    path = tmp_path / "rows.jsonl.gz"
    lines = "".join(f'{{"prompt": {number}}}\n' for number in range(99))
    packed = gzip.compress(lines.encode())
    path.write_bytes(packed[:10] + packed[damage] if damage.start else packed[damage])
    with pytest.raises(UserError, match=r"rows\.jsonl\.gz"):
        LINE_READERS[reader](path)


def test_rows_of_several_files_are_indexed_in_order(tmp_path):
    texts = ['{"a": 0}\n\n{"a": 1}\n', '\n \n{"a": 2}', '{"a": 3}\n{"a": 4}\nbroken\n    ']
    paths = []
    for number, text in enumerate(texts):
        paths.append(str(tmp_path / f"{number}.jsonl"))
        Path(paths[-1]).write_text(text)
    rows = FileRows([(path, JsonLines()) for path in paths])
    assert len(rows) == 6
    assert [rows[i]["a"] for i in (4, 0, 2, -3)] == [4, 0, 2, 3]
    assert [row["a"] for row in rows.select(range(1, 5))] == [1, 2, 3, 4]
    filtered = rows.filter(lambda row, number: row["a"] % 2 == 0)
    assert [len(filtered), filtered[1]["a"], filtered.select([2])[0]["a"]] == [4, 2, 4]
    with pytest.raises(DataError, match=r"2\.jsonl, line 3: no JSON.*correct the line"):
        filtered[3]
    assert [rows.location(i)[-15:] for i in (1, 2)] == ["0.jsonl, line 3", "1.jsonl, line 3"]
    Path(paths[2]).write_text(texts[2][:9])
    assert rows[3] == {"a": 3}
    with pytest.raises(DataError, match=r"2\.jsonl has shrunk while the run reads it, from 29 to 9 bytes"):
        rows[4]
    with pytest.raises(IndexError):
        rows[6]


def test_lone_surrogates_in_memory_are_refused_as_in_files(tokenizer, tmp_path):
    rows = [{"input": "a cat", "output": "x"}, {"input": "a \ud83d", "output": "x"}, {"input": "a", "output": "\udc00"}]
    words = r"row 1: \\ud83d is half of a character: write both halves, or neither; row 2: \\udc00 is half"
    with pytest.raises(DataError, match=words):
        instruct_dataset(tokenizer, source=rows)
    assert len(instruct_dataset(tokenizer, source=rows, on_bad_row="skip")) == 1
    with pytest.raises(DataError, match=r"row 0: \\ud83d is half of a character"):
        prompt_dataset(tokenizer, source=[{"prompt": [{"role": "user", "content": "\ud83d"}]}])


@pytest.mark.parametrize("text", ['[{"prompt": 1, "prompt": 2}]', '{"prompt":\n1}\n{"prompt": 1, "prompt":\n2}'])
def test_a_key_with_two_values_is_refused_in_a_whole_file(text, tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"rows\.json: the key 'prompt' has two values"):
        list(read_rows(path))
