"""``tune data show`` says what a file holds and what a run sees of it."""

import json
import sys

import pytest

from tests.tiny import write_tokenizer
from tests.torchtune.models.tokenizer_files import write_ranks
from tests.torchtune.modules.transforms.test_vision import photo
from torchtune.datasets._file_report import format_of, histogram, scan
from torchtune.utils import UserError

TURNS = [{"role": "user", "content": "red cat"}, {"role": "assistant", "content": "blue"}]
ROWS = {
    "OpenAI messages": ({"messages": TURNS}, "chat_dataset conversation_column=messages conversation_style=openai"),
    "ShareGPT": (
        {"conversations": [{"from": "human", "value": "red"}, {"from": "gpt", "value": "blue"}]},
        "chat_dataset conversation_column=conversations conversation_style=sharegpt",
    ),
    "Alpaca": ({"instruction": "red", "input": "", "output": "blue"}, "alpaca_dataset"),
    "instructions": (
        {"question": "red", "answer": "blue"},
        "instruct_dataset column_map.input=question column_map.output=answer",
    ),
    "ShareGPT with images": (
        {"conversations": [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "blue"}], "image": "a.png"},
        "multimodal.multimodal_chat_dataset column_map.conversations=conversations column_map.image=image "
        "image_tag=<image>",
    ),
    "questions about images": (
        {"question": "red", "answer": "blue", "image": "a.png"},
        "multimodal.vqa_dataset column_map.input=question column_map.output=answer column_map.image=image",
    ),
    "preference pairs": ({"prompt": "red", "chosen": "blue", "rejected": "cat"}, "preference_dataset"),
    "labeled answers (KTO)": ({"prompt": "red", "completion": "blue", "label": True}, "kto_dataset"),
    "raw text": ({"text": "red blue"}, "text_completion_dataset column=text"),
    "prompts with answers": ({"prompt": "red", "expected": "blue"}, "prompt_dataset"),
    "unknown": ({"a": 1, "b": 2}, ""),
}  # fmt: skip


def write(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


@pytest.fixture
def tokenizer(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHTUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    (tmp_path / "tokenizer").mkdir()
    write_tokenizer(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


@pytest.mark.parametrize("kind", ROWS)
def test_formats(kind):
    row, reader = ROWS[kind]
    assert format_of(row) == (kind, reader)


def test_what_is_wrong_is_named_with_its_line(tmp_path, tune):
    before = set(sys.modules)
    rows = [TURNS, TURNS[:1], TURNS, TURNS[::-1], [TURNS[0], TURNS[0]], [{"role": "user"}]]
    rows += [[{"role": "robot", "content": "red"}, TURNS[1]], [{"role": "user", "content": 5}, TURNS[1]]]
    first, *others = [{"messages": turns} for turns in rows]
    path = write(tmp_path / "rows.jsonl", first, others[0], "", '{"messages": [', *others[1:4], "[1]", *others[4:])
    with path.open("ab") as file:
        file.write(b'{"messages": "caf\xe9"}\n')
    out = tune("data", "show", path).out
    for line, reason in (
        (2, "a conversation needs at least 2 turns"), (4, "no JSON, Expecting value at column 15"),
        (6, "turn 0 of the assistant follows nothing"), (7, "turn 1 is a second user turn in a row"),
        (8, "a row must be a mapping"), (9, "a turn of 'user' has no content"),
        (10, "'robot' is not a role: use system, user, "),
        (11, "the content of a turn of 'user' must be a text"), (12, "byte 18 is not UTF-8"),
    ):  # fmt: skip
        assert f"{path}:{line}: {reason}" in out
    assert "1 rows are the same as an earlier one, the first in line 5 (as line 1)" in out
    assert "11 rows, " in out
    assert not {"pyarrow", "datasets"} & (set(sys.modules) - before)


def test_mixed_schemas_leaks_and_other_kinds_of_files(tmp_path, tune):
    train = write(tmp_path / "train.jsonl", ROWS["Alpaca"][0], {"messages": TURNS, "tools": [{"name": "f"}]})
    (tmp_path / "val.csv").write_text("instruction,input,output\nred,,blue\nred,,cat\n")
    out = tune("data", "show", train, "--validation", tmp_path / "val.csv").out
    assert "the rows are of several formats: split the file" in out
    assert "1 rows have tools or call them" in out
    assert "format      Alpaca, 2 rows" in out
    assert "format      OpenAI messages, 1 rows, the first in line 2: " in out
    out = tune("data", "show", train, "--validation", write(tmp_path / "v.jsonl", ROWS["Alpaca"][0])).out
    assert f"1 rows of {tmp_path / 'v.jsonl'} are in {train} too, the first in line 1" in out
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "long.csv").write_text('a,b\n\n"c\nd",e\nf,g,h\n')
    (tmp_path / "mac.csv").write_bytes(b"a,b\rc,d\r")
    for path, said in (
        ("empty.jsonl", "the file is empty"), ("no.jsonl", "there is no file"),
        ("mac.csv", "line 1: it cannot be read"), ("long.csv", "line 5: it has 3 fields and the header has 2"),
    ):  # fmt: skip
        assert said in tune("data", "show", tmp_path / path).err
    (tmp_path / "one.json").write_text("[3")
    (tmp_path / "cut.parquet").write_bytes(b"PAR1")
    assert "not a Parquet file, or not the whole" in tune("data", "show", tmp_path / "cut.parquet").err
    with pytest.raises(UserError, match=r"one.json: no JSON"):
        scan(tmp_path / "one.json", everything=True)


def test_a_file_with_a_tokenizer(tokenizer, tmp_path, tune, monkeypatch):
    path = write(tmp_path / "rows.jsonl", *[{"messages": TURNS}] * 3)
    arguments = ["show", path, "--tokenizer", tokenizer, "--examples", 1, "packed=true", "--max-seq-len", 128]
    out = tune("data", *arguments).out
    assert "dataset: 3 rows\n" in out
    assert "1 of up to 128 tokens" in out
    assert "2 rows have the tokens of an earlier row" in out
    trained = out.partition("--- row 0")[2].partition("\n")[2].partition("[[")[2].partition("]]")[0]
    assert "blue" in trained
    assert "red" not in trained
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert "\x1b[32m" in tune("data", *arguments).out
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in tune("data", *arguments).out


def test_a_config(tokenizer, tmp_path, tune):
    pairs = [{"instruction": "red", "input": "", "output": word} for word in ("blue", "cat", "red cat")]
    out = tune(
        "data", "show", "smol/135M_lora_single_device", f"tokenizer.path={tokenizer}",
        f"dataset.data_files={write(tmp_path / 'a.jsonl', *pairs)}", "batch_size=1", "gradient_accumulation_steps=1",
        "dataset_val={_component_: torchtune.datasets.alpaca_dataset, source: "
        f"{write(tmp_path / 'b.jsonl', *pairs[:1])}}}", "--all",
    ).out  # fmt: skip
    assert "dataset: 3 rows" in out
    assert "leaks       1 rows of dataset_val are in dataset too" in out
    assert "steps       3" in out


def test_a_histogram_counts_every_value():
    values = [1, 2, 3, 250, 999, 1000, 5000]
    lines = histogram(values, "tokens per row").splitlines()
    assert lines[0] == "tokens per row: 1 to 5,000, half have at most 250"
    assert sum(int(line.split()[-1]) for line in lines[1:]) == len(values)


def test_images_are_shown_by_size(tokenizer, tmp_path, tune):
    for i, size in enumerate([(30, 20), (8, 9)]):
        photo(*size).save(tmp_path / f"{i}.png")
    turns = [{"from": "human", "value": "<image> red"}, {"from": "gpt", "value": "blue"}]
    rows = [{"conversations": turns, "image": f"{i}.png"} for i in (0, 1, 1)]
    data = {
        "_component_": "torchtune.datasets.multimodal.multimodal_chat_dataset",
        "source": str(write(tmp_path / "rows.jsonl", *rows)),
        "image_tag": "<image>",
        "image_dir": str(tmp_path),
    }
    transform = "torchtune.models.llama3_2_vision.llama3_2_vision_transform"
    ranks = write_ranks(tmp_path / "tokenizer.model")
    out = tune(
        "data", "show", "llama3_2/1B_full_single_device", f"tokenizer._component_={transform}",
        f"tokenizer.path={ranks}", "tokenizer.image_size=28", f"dataset={json.dumps(data)}", "--examples", 3,
    ).out  # fmt: skip
    assert "images      3\n" in out
    assert "duplicates  1 rows" in out  # the same words of another image are another row
    assert out.count("<image 20x30>red<|eot_id|>") == 1
    assert out.count("<image 9x8>red<|eot_id|>") == 2
    assert "blue<|eot_id|>]]" in out
