"""``tune data show`` says what a file holds and what a run sees of it."""

import json
import sys

import pytest

from tests.tiny import write_lines, write_tokenizer
from tests.torchtune.models.tokenizer_files import write_ranks
from tests.torchtune.modules.transforms.test_vision import photo
from torchtune.datasets import SAMPLE, format_of, histogram, scan
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
    lines = []
    for row in rows:
        lines.append(row if isinstance(row, str) else json.dumps(row))
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


@pytest.fixture
def tokenizer(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHTUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    (tmp_path / "tokenizer").mkdir()
    write_tokenizer(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


@pytest.mark.parametrize("kind", ROWS)
def test_format_of_a_row_is_recognized(kind):
    row, reader = ROWS[kind]
    assert format_of(row).kind == kind
    assert format_of(row).reader == reader


@pytest.mark.parametrize(
    ("row", "reader"),
    [
        ({"chosen": "blue", "rejected": "cat"}, "preference_dataset"),
        (
            {"input": "red", "preferred_output": "blue", "non_preferred_output": "cat"},
            "preference_dataset column_map.chosen=preferred_output column_map.rejected=non_preferred_output "
            "column_map.prompt=input",
        ),
        ({"completion": "blue", "label": "false"}, "kto_dataset"),
        ({"x": "red"}, "text_completion_dataset column=x"),
        ({"x": "red", "y": "blue"}, ""),
        ({"prompt": [{"role": "user", "content": "red"}]}, "prompt_dataset"),
        ({"text": "red", "label": "good"}, "classification_dataset"),
    ],
)
def test_rows_without_further_columns_have_a_format(row, reader):
    assert format_of(row).reader == reader


def test_broken_rows_are_named_by_line(tmp_path, tune):
    before = set(sys.modules)
    rows = [TURNS, TURNS[:1], TURNS, TURNS[::-1], [TURNS[0], TURNS[0]], [{"role": "user"}]]
    rows += [[{"role": "robot", "content": "red"}, TURNS[1]], [{"role": "user", "content": 5}, TURNS[1]]]
    first, *later_rows = [{"messages": turns} for turns in rows]
    path = write(
        tmp_path / "rows.jsonl", first, later_rows[0], "", '{"messages": [', *later_rows[1:4], "[1]", *later_rows[4:]
    )
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


def test_mixed_formats_and_leaks_are_reported(tmp_path, tune):
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
    for path, message in (
        ("empty.jsonl", "the file is empty"), ("no.jsonl", "there is no file"),
        ("mac.csv", "line 1: a line ends with a carriage return alone"),
    ):  # fmt: skip
        assert message in tune("data", "show", tmp_path / path).err
    assert "long.csv:5: it has 3 fields and the header has 2" in tune("data", "show", tmp_path / "long.csv").out
    (tmp_path / "one.json").write_text("[3")
    (tmp_path / "cut.parquet").write_bytes(b"PAR1")
    assert "not a Parquet file, or not the whole" in tune("data", "show", tmp_path / "cut.parquet").err
    with pytest.raises(UserError, match=r"one.json: no JSON"):
        scan(tmp_path / "one.json", everything=True)


def test_file_with_a_tokenizer_is_shown_with_its_trained_tokens(tokenizer, tmp_path, tune, monkeypatch):
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


def test_texts_that_the_chat_template_leaves_out_are_counted(tokenizer, tmp_path, tune):
    thoughtful = [TURNS[0], {**TURNS[1], "reasoning_content": "because"}]
    path = write(tmp_path / "rows.jsonl", {"messages": TURNS}, {"messages": thoughtful})
    out = tune("data", "show", path, "--tokenizer", tokenizer).out
    assert "template    the chat template drops the reasoning of 1 of 2 rows\n" in out
    (tmp_path / "plain.jsonl").write_text(json.dumps({"messages": TURNS}) + "\n")
    assert "drops" not in tune("data", "show", tmp_path / "plain.jsonl", "--tokenizer", tokenizer).out


def test_datasets_of_a_config_are_shown(tokenizer, tmp_path, tune):
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


def rows_of(out, name):
    """Return the text behind a name at the beginning of a line."""
    return next(line for line in out.splitlines() if line.startswith(name)).removeprefix(name).strip()


def test_rows_that_train_the_same_are_duplicates_and_leaks(tmp_path, tune):
    rows = []
    for number, answer in enumerate(("blue", "blue", "blue", "cat")):
        rows.append({"id": number, "note": str(number), "input": "red", "output": answer})
    train = write(tmp_path / "a.jsonl", *rows)
    held = write(tmp_path / "b.jsonl", {"output": "cat", "input": "red"})
    out = tune("data", "show", train, "--validation", held).out
    assert "2 rows are the same as an earlier one, the first in line 2 (as line 1)" in out
    assert f"1 rows of {held} are in {train} too" in out
    for first, second in (
        ({"id": 1, "messages": TURNS}, {"id": 2, "messages": TURNS}),
        ({"id": 1, "prompt": "red", "chosen": "a", "rejected": "b"}, {"prompt": "red", "chosen": "a", "rejected": "b"}),
        ({"url": "x", "text": "red"}, {"url": "y", "text": "red"}),
        ({"url": "x", **ROWS["Alpaca"][0]}, {"url": "y", **ROWS["Alpaca"][0]}),
        ({"id": 1, "prompt": "red"}, {"id": 2, "prompt": "red"}),
    ):
        assert "1 rows are the same" in tune("data", "show", write(train, first, second)).out
    different = {"messages": TURNS, "tools": [{"name": "f"}]}
    assert "none: no row" in tune("data", "show", write(train, {"messages": TURNS}, different)).out


def test_columns_that_no_format_names_are_listed_and_can_be_chosen(tokenizer, tmp_path, tune):
    (tmp_path / "faq.csv").write_text("no,asked,said\n1,red cat,blue\n")
    command = ["data", "show", tmp_path / "faq.csv"]
    out = tune(*command).out
    assert rows_of(out, "columns") == "no, asked, said, 1 rows"
    assert "column_map.input=... column_map.output=..." in out
    tuned = [*command, "--tokenizer", tokenizer, "--examples", 1]
    assert "no dataset reads rows of these columns: name them" in tune(*tuned).err
    assert "[[blue" in tune(*tuned, "column_map.input=asked", "column_map.output=said").out
    assert "[[blue" in tune(*tuned, "column_map={input: asked, output: said}").out
    text = tune(*tuned, "_component_=torchtune.datasets.text_completion_dataset", "column=said").out
    assert "[[lue" in text or "[[blue" in text
    assert "asked" not in text.partition("--- row 0")[2]
    assert "'nothing'" in tune(*tuned, "column_map.input=nothing", "column_map.output=said").err
    assert "add --tokenizer" in tune(*command, "column=said").err
    (tmp_path / "faq.csv").write_text("asked;said\nred cat;blue\n")
    assert "the header is one column, 'asked;said': set delimiter=';'" in tune(*command).err
    assert rows_of(tune(*command, "delimiter=;").out, "columns") == "asked, said, 1 rows"
    assert "[[blue" in tune(*tuned, "delimiter=;", "column_map.input=asked", "column_map.output=said").out


def test_tokenizer_settings_are_applied(tokenizer, tmp_path, tune):
    path = write(tmp_path / "rows.jsonl", {"messages": [TURNS[0], {"role": "assistant", "content": "blue " * 20}]})
    out = tune("data", "show", path, "--tokenizer", tokenizer, "tokenizer.max_seq_len=40").out
    assert "1 rows have max_seq_len=40 tokens or were truncated to it" in out
    result = tune("data", "show", path, "--tokenizer", tokenizer, "tokenizer.max_seq_length=20")
    assert result.code == 2
    assert "max_seq_length" in result.err
    result = tune("data", "show", path, "--tokenizer", tokenizer, "batch_size=2")
    assert result.code == 2
    assert "batch_size" in result.err


def test_texts_with_labels_are_read_for_a_classifier(tokenizer, tmp_path, tune):
    (tmp_path / "mail.csv").write_text("text,label\nred cat,blue\nred,cat\n")
    out = tune("data", "show", tmp_path / "mail.csv", "--tokenizer", tokenizer).out
    assert "labeled texts (classification), 2 rows: torchtune.datasets.classification_dataset\n" in out
    assert "instruct_dataset column_map.input=text column_map.output=label trains labels that are texts" in out
    assert "2 classes in 2 rows (single_label_classification): blue 1, cat 1" in out
    answers = "_component_=torchtune.datasets.instruct_dataset", "column_map.input=text", "column_map.output=label"
    assert "[[blue" in tune("data", "show", tmp_path / "mail.csv", "--tokenizer", tokenizer, *answers).out


@pytest.mark.parametrize("label", [3, True, 0.5, ["red", "blue"], []])
def test_label_of_any_type_is_one_of_a_classifier(label, tmp_path, tune):
    path = write(tmp_path / "mail.jsonl", {"text": "red", "label": label})
    assert "torchtune.datasets.classification_dataset" in tune("data", "show", path).out


@pytest.mark.parametrize("label", [None, {"red": 1}, [None]])
def test_value_that_is_no_label_is_beside_a_raw_text(label, tmp_path, tune):
    path = write(tmp_path / "mail.jsonl", {"text": "red", "label": label})
    assert "raw text, 1 rows: torchtune.datasets.text_completion_dataset" in tune("data", "show", path).out


def test_file_without_usable_rows_is_refused(tmp_path, tune):
    path = write(tmp_path / "rows.jsonl", '{"messages": [', "[1]")
    result = tune("data", "show", path)
    assert result.code == 2
    assert "none of its 2 rows can be used" in result.err
    assert f"{path}:1: no JSON" in result.out
    assert tune("data", "show", write(path, {"messages": TURNS[:1]}, {"messages": TURNS[::-1]})).code == 2
    assert tune("data", "show", write(path, '{"messages": [', {"messages": TURNS})).code == 0


def test_file_of_another_kind_is_refused_as_a_data_file(tmp_path, tune):
    """It is no config either, and a message on YAML would say nothing to the owner of a spreadsheet."""
    (tmp_path / "rows.xlsx").write_bytes(b"PK\3\4\0\0")
    for options in ([], ["--tokenizer", tmp_path]):
        result = tune("data", "show", tmp_path / "rows.xlsx", *options)
        assert result.code == 2
        assert "a file of this kind is not read: use .json, .jsonl" in result.err


@pytest.mark.parametrize("column", ["messages", "conversations"])
def test_text_in_the_column_of_a_conversation_is_no_raw_text(column, tmp_path, tune):
    """Python's printed lists, as pandas writes them into tables, would be trained on as texts, brackets and all."""
    result = tune("data", "show", write(tmp_path / "rows.jsonl", {column: str(TURNS)}))
    assert f"the turns in column '{column}' are not JSON" in result.out
    assert "raw text" not in result.out


def test_bad_row_is_named_and_is_no_second_format(tmp_path, tune):
    path = tmp_path / "rows.jsonl"
    for bad, reason in (
        ({"messages": []}, "column 'messages' holds a conversation without turns"),
        ({"messages": "x"}, "column 'messages' holds str, not a list of turns"),
        ({}, "the row has no columns"),
        ({"id": 3}, "none of the columns id holds a text or turns"),
    ):
        out = tune("data", "show", write(path, bad, {"messages": TURNS})).out
        assert f"{path}:1: {reason}" in out
        assert rows_of(out, "format").startswith("OpenAI messages, 1 rows: ")
        assert "split the file" not in out
        assert "name those that are read" not in out


def test_values_that_no_dataset_reads_are_named(tokenizer, tmp_path, tune):
    path = write(tmp_path / "rows.jsonl", {"input": "red", "output": 5})
    reason = "no dataset reads them: row 1: column 'output' holds int, not a text: correct the rows"
    assert reason in tune("data", "show", path).out
    error = tune("data", "show", path, "--tokenizer", tokenizer).err
    assert "no dataset reads its rows: row 1: column 'output' holds int, not a text" in error


def test_folders_and_compressed_files_are_shown_as_runs_read_them(tokenizer, tmp_path, tune):
    import gzip

    import datasets

    rows = [{"input": "red", "output": "blue"}, {"input": "cat", "output": "2.50"}]
    written = "".join(json.dumps(row) + "\n" for row in rows).encode()
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(written))
    (tmp_path / "list.jsonl").write_text(json.dumps(rows, indent=2))
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "a.csv").write_text("input,output\nred,blue\ncat,2.50\n")
    table = datasets.Dataset.from_list(rows)
    table.save_to_disk(str(tmp_path / "saved"))
    table.to_parquet(str(tmp_path / "rows.parquet"))
    for name in ("rows.jsonl.gz", "list.jsonl", "parts", "saved", "rows.parquet"):
        out = tune("data", "show", tmp_path / name, "--tokenizer", tokenizer).out
        assert "2 rows, " in out, name
        assert "[[2.50<|im_end|>]]" in out, name
    (tmp_path / "parts" / "a.csv").write_text("input;output\nred;blue\ncat;2.50\n")
    assert "2 rows, " in tune("data", "show", tmp_path / "parts", "delimiter=;").out
    assert "delimiter is not a setting of a file" in tune("data", "show", tmp_path / "rows.parquet", "delimiter=;").err
    (tmp_path / "rows.xlsx").write_text("x")
    assert tune("data", "show", tmp_path / "rows.xlsx").code == 2


def test_conversations_of_two_formats_are_shown_as_one_dataset_reads_them(tokenizer, tmp_path, tune):
    sharegpt = [{"from": "human", "value": "red"}, {"from": "gpt", "value": "one bird"}]
    path = write(tmp_path / "rows.jsonl", {"messages": TURNS}, {"conversations": sharegpt})
    out = tune("data", "show", path, "--tokenizer", tokenizer).out
    assert "torchtune.datasets.chat_dataset reads all of them, without conversation_column and" in out
    assert "split the file" not in out
    assert "[[one bird<|im_end|>]]" in out


def test_format_is_that_of_the_shown_split(tokenizer, tmp_path, tune):
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder / "train.jsonl", {"messages": TURNS}, {"messages": TURNS})
    write(folder / "test.jsonl", {"instruction": "red", "output": "one bird"})
    out = tune("data", "show", folder, "--tokenizer", tokenizer, "split=test").out
    assert f"{folder}: 1 rows" in out
    assert "format      Alpaca, 1 rows" in out
    assert "one bird<|im_end|>]]" in out


def test_a_row_that_the_model_cannot_read_is_named(tokenizer, tmp_path, tune):
    from tests.tiny import write_checkpoint

    write_checkpoint(tokenizer)
    config = json.loads((tokenizer / "config.json").read_text())
    (tokenizer / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 32}))
    long = [TURNS[0], {"role": "assistant", "content": "red blue " * 40}]
    path = write(tmp_path / "rows.jsonl", {"messages": TURNS}, {"messages": long})
    command = ["data", "show", path, "--tokenizer", tokenizer]
    result = tune(*command)
    assert result.code == 2
    assert "row 1: it has more tokens than the 32 that the model reads" in result.err
    assert f"row 1 is {path}, line 2" in result.err
    assert "dropped     1 rows" in tune(*command, "on_bad_row=skip").out
    assert "1 rows have max_seq_len=32 tokens" in tune(*command, "tokenizer.max_seq_len=32").out


def test_labeled_conversations_are_shown_as_such(tune, tmp_path):
    question = {"role": "user", "content": "Win money now!"}
    answer = {"role": "assistant", "content": "No."}
    rows = tmp_path / "rows.jsonl"
    write_lines(rows, [{"messages": [question], "label": "spam"}] * 2)
    report = tune("data", "show", rows)
    assert report.code == 0, report.err
    assert "labeled texts (classification), 2 rows" in report.out
    assert "torchtune.datasets.classification_dataset column=messages" in report.out
    write_lines(rows, [{"messages": [question, answer], "label": "spam"}] * 2)
    report = tune("data", "show", rows)
    assert "OpenAI messages, 2 rows: torchtune.datasets.chat_dataset" in report.out
    assert "classification_dataset column=messages trains a classifier on the column label" in report.out


def test_histogram_has_bins_of_a_round_width_and_bars_by_their_share():
    assert histogram([5, 15, 15, 25], "characters per row").splitlines() == [
        "characters per row: 5 to 25, half have at most 15",
        "          0 to         4   0",
        f"          5 to         9  {'#' * 16} 1",
        "         10 to        14   0",
        f"         15 to        19  {'#' * 32} 2",
        "         20 to        24   0",
        f"         25 to        29  {'#' * 16} 1",
    ]


def test_only_the_first_rows_are_inspected_unless_all_are_asked_for(tmp_path):
    path = write(tmp_path / "rows.jsonl", *[{"text": "red"}] * (SAMPLE + 1))
    facts = scan(path, everything=False)
    assert (facts.rows, facts.read) == (SAMPLE + 1, SAMPLE)
    assert scan(path, everything=True).read == SAMPLE + 1


@pytest.mark.parametrize(
    ("row", "reader"),
    [
        ({"query": "red", "positive": "blue"}, "embedding_dataset"),
        ({"query": "red", "positive": "blue", "negatives": ["cat"]}, "embedding_dataset"),
        ({"anchor": "red", "positive": "blue"}, "column_map.query=anchor column_map.positive=positive"),
        (
            {"query": "red", "positive": "blue", "negative": "cat"},
            "column_map.positive=positive column_map.negatives=negative",
        ),
    ],
)
def test_columns_of_queries_with_passages_are_named_where_they_are_not_the_usual_ones(row, reader):
    assert format_of(row).kind == "queries with passages (embedding)"
    assert format_of(row).reader.endswith(reader)


def test_a_report_of_the_first_rows_says_so_beside_problems(tmp_path, tune, monkeypatch):
    monkeypatch.setattr("torchtune.datasets._file_report.SAMPLE", 3)
    turns_without_an_answer = {"messages": TURNS[:1]}
    path = write(tmp_path / "rows.jsonl", {"messages": TURNS}, *[turns_without_an_answer] * 2, {"messages": TURNS})
    assert "the first 3; --all looks into every row" in tune("data", "show", path).out
