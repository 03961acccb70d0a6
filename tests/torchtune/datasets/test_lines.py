"""JSON lines are read by one rule, wherever they are read."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torchtune.data import DataError
from torchtune.datasets import instruct_dataset, prompt_dataset, read_rows, scan
from torchtune.datasets._file_formats import JsonLines
from torchtune.datasets._file_rows import FileRows
from torchtune.datasets._row_source import load_rows
from torchtune.datasets._stream_readers import open_reader
from torchtune.generation import read_prompts
from torchtune.utils import UserError

GOOD = '{"prompt": "the cat"}'
BOM = b"\xef\xbb\xbf"


def _shown(path):
    facts = scan(path, everything=True)
    if facts.problems:
        raise UserError(f"{path}, line {facts.problems[0][0]}: {facts.problems[0][1]}")
    return [facts.example] * facts.rows


READERS: dict[str, Callable[[Path], Any]] = {
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


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    "text",
    [
        f"{GOOD}\n{GOOD}".encode(),
        BOM + f"{GOOD}\n\n  \n{GOOD}\r\n\n".encode(),
        gzip.compress(f"{GOOD}\n{GOOD}\n".encode()),
    ],
    ids=["plain", "mark and empty lines", "packed"],
)
def test_lines_of_json_are_rows(reader, text, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(text)
    assert READERS[reader](path) == [json.loads(GOOD)] * 2


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f'{GOOD}\n{{"prompt": \n'.encode(), "line 2: no JSON, Expecting value at column"),
        (f"{GOOD}\n".encode() + '{"prompt": "é"}'.encode("latin-1"), "line 2: byte 13 is not UTF-8: save"),
        (f"{GOOD}\n".encode("utf-16"), "line 1: the file is UTF-16, not UTF-8: save"),
        (f'{GOOD}\n{{"prompt": "a\0"}}\n'.encode(), "line 2: a zero byte at column 14"),
        (f'{GOOD}\n{{"prompt": "\\ud83d"}}\n'.encode(), r"line 2: \\ud83d is half of a character"),
        (b'{"prompt": ' + b"[" * 100_000, "line 1: it is nested too deeply"),
        (b'{"prompt": ' + b"1" * 5_000 + b"}", "line 1: no JSON, Exceeds the limit"),
    ],
    ids=["broken", "Latin-1", "UTF-16", "NUL", "surrogate", "deep", "digits"],
)
def test_broken_lines_are_refused_by_number(reader, text, words, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(text)
    with pytest.raises(UserError, match=words if reader != "streamed" else words.partition(": ")[2]):
        READERS[reader](path)


@pytest.mark.parametrize("reader", ["mapped", "shown", "answered"])
@pytest.mark.parametrize("damage", [slice(0, 60), slice(15, None)], ids=["cut", "changed"])
def test_damaged_gzip_file_is_named(reader, damage, tmp_path):
    path, packed = (
        tmp_path / "rows.jsonl.gz",
        gzip.compress("".join(f'{{"prompt": {n}}}\n' for n in range(99)).encode()),
    )
    path.write_bytes(packed[:10] + packed[damage] if damage.start else packed[damage])
    with pytest.raises(UserError, match=r"rows\.jsonl\.gz"):
        READERS[reader](path)


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
