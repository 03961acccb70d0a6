"""What rows say beside their texts reaches the tokens of every dataset: tools, calls, system prompts, empty answers."""

import csv
import json

import pytest

from tests.tiny import OPENAI, write_lines
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, DataError
from torchtune.datasets import (
    SFTTransform,
    alpaca_dataset,
    chat_dataset,
    format_of,
    instruct_dataset,
    kto_dataset,
    preference_dataset,
    prompt_dataset,
    report,
    scan,
)
from torchtune.tokenizers import hf_tokenizer
from torchtune.tokenizers._protocols import MessageTransform

# Tools and calls as JSON, as the templates of Qwen 2.5 and Llama 3.1 write them.
TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for turn in messages %}<|im_start|>{{ turn.role }}\n{{ turn.content }}{% for call in turn.tool_calls or [] %}"
    "<call>{{ call.function.name }} {{ call.function.arguments | tojson }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SCHEMA = {"type": "object", "properties": {"town": {"type": "string", "default": None, "enum": ["Rome", None]}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
SHOWN = (
    '<|im_start|>tools\n{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", '
    '"properties": {"town": {"type": "string", "default": null, "enum": ["Rome", null]}}}}}\n<|im_end|>\n'
)
QUESTION = {"role": "user", "content": "Is it warm?"}


@pytest.fixture(scope="module")
def with_tools(tokenizer_folder):
    return hf_tokenizer(str(tokenizer_folder), chat_template=TEMPLATE)


def calling(arguments, name="weather"):
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def text_of(tokenizer, tokens):
    return tokenizer.decode([token for token in tokens if token != CROSS_ENTROPY_IGNORE_IDX], skip_special_tokens=False)


def chat(tokenizer, rows, **settings):
    return chat_dataset(tokenizer, source=rows, **OPENAI, **settings)


ARGUMENTS = {"town": "Rome", "day": 1, "hour": 1.0, "zone": None, "list": [None]}
WRITTEN = '<call>weather {"town": "Rome", "day": 1, "hour": 1.0, "zone": null, "list": [null]}</call><|im_end|>'


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)], ids=["tools", "tools as text"])
@pytest.mark.parametrize("arguments", [ARGUMENTS, json.dumps(ARGUMENTS)], ids=["arguments", "arguments as text"])
@pytest.mark.parametrize("streaming", [False, True], ids=["prepared", "streamed"])
def test_texts_and_objects_give_the_same_tokens(with_tools, tmp_path, tools, arguments, streaming):
    """A second row with other arguments and tools adds nothing to the first one."""
    text_row = {
        "messages": [QUESTION, calling({"x": "a"}, "other")],
        "tools": [{"type": "function", "function": {"name": "other"}}],
    }
    path = write_lines(
        tmp_path / "rows.jsonl", [{"messages": [QUESTION, calling(arguments)], "tools": tools}, text_row]
    )
    options = {"streaming": True} if streaming else {}
    rows = chat(with_tools, str(path), **options)
    texts = [text_of(with_tools, rows[index]["tokens"]) for index in range(2)]
    expected = f"{SHOWN}<|im_start|>user\nIs it warm?<|im_end|>\n<|im_start|>assistant\n{WRITTEN}\n"
    assert expected in texts
    if not streaming:
        assert text_of(with_tools, rows[0]["labels"]) == WRITTEN


def test_fields_of_other_rows_of_a_table_are_left_out(with_tools):
    """Every mapping of a table has the fields of all rows."""
    import datasets

    rows = [
        {"messages": [QUESTION, calling({"town": "Rome"})], "tools": TOOLS},
        {"messages": [QUESTION, calling({"day": 2}, "calendar")], "tools": None},
    ]
    first, second = (text_of(with_tools, row["tokens"]) for row in chat(with_tools, datasets.Dataset.from_list(rows)))
    assert '<call>weather {"town": "Rome"}</call>' in first
    assert '<call>calendar {"day": 2}</call>' in second
    assert "tools" not in second


def test_unreadable_arguments_are_refused_by_row(with_tools, tmp_path):
    rows = [[QUESTION, calling("{}")], [QUESTION, calling('{"town": Rome}')]]
    path = write_lines(tmp_path / "rows.jsonl", [{"messages": turns} for turns in rows])
    with pytest.raises(DataError, match=r"row 1: the arguments of the call of 'weather' are not JSON .*line 2"):
        chat(with_tools, str(path))
    assert len(chat(with_tools, str(path), on_bad_row="skip")) == 1


def test_pairs_and_labelled_answers_have_tools_and_calls(with_tools):
    pair = {
        "prompt": [QUESTION],
        "chosen": [calling('{"town": "Rome"}')],
        "rejected": [calling({"town": "Oslo"})],
        "tools": TOOLS,
    }
    (row,) = preference_dataset(with_tools, source=[pair])
    for side, town in (("chosen", "Rome"), ("rejected", "Oslo")):
        assert text_of(with_tools, row[f"{side}_input_ids"]).startswith(SHOWN)
        assert text_of(with_tools, row[f"{side}_labels"]) == f'<call>weather {{"town": "{town}"}}</call><|im_end|>'
    answers = [
        {"prompt": [QUESTION], "completion": [calling({"town": town})], "label": label, "tools": json.dumps(TOOLS)}
        for town, label in (("Rome", True), ("Oslo", False))
    ]
    good, bad = kto_dataset(with_tools, source=answers)
    assert '"Rome"' in text_of(with_tools, good["labels"])
    assert '"Oslo"' in text_of(with_tools, bad["labels"])
    assert text_of(with_tools, bad["tokens"]).startswith(SHOWN)


def test_pairs_with_different_prompts_are_refused(with_tools):
    asked = {"role": "user", "content": "Is it cold?"}
    answer, second_answer = ({"role": "assistant", "content": text} for text in ("Yes.", "No."))
    row = {"chosen": [QUESTION, answer], "rejected": [asked, second_answer]}
    with pytest.raises(DataError, match=r"row 0: .* different prompts: they first differ in turn 0"):
        preference_dataset(with_tools, source=[row])


def test_prompts_have_tools_and_a_system_prompt(with_tools):
    rows = [{"prompt": [QUESTION, calling('{"town": "Rome"}')], "tools": json.dumps(TOOLS), "system": "Be brief."}]
    (prompt,) = prompt_dataset(with_tools, source=rows)
    assert text_of(with_tools, prompt["tokens"]) == (
        f"{SHOWN}<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nIs it warm?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    # What is trained on matters to training only.
    prompt_dataset(with_tools, source=[{"prompt": [{**QUESTION, "train": True}]}])
    assert prompt["row"]["answer"] == '{"arguments": {"town": "Rome"}, "name": "weather"}'


def test_an_answer_that_says_nothing_needs_a_setting(with_tools):
    empty = {"role": "assistant", "content": " "}
    full = {"role": "assistant", "content": "Yes."}
    for turns in ([QUESTION, empty], [QUESTION, empty, QUESTION, full], [QUESTION, full, QUESTION, empty]):
        with pytest.raises(DataError, match=r"of the assistant is empty, .* with allow_empty_answers=true"):
            chat(with_tools, [{"messages": turns}])
        assert len(chat(with_tools, [{"messages": turns}], allow_empty_answers=True)) == 1
    chat(with_tools, [{"messages": [QUESTION, {**empty, "weight": 0}, QUESTION, full]}])
    chat(with_tools, [{"messages": [QUESTION, calling({})]}])
    for build, row in (
        (alpaca_dataset, {"instruction": "Is it warm?", "output": ""}),
        (instruct_dataset, {"input": "Is it warm?", "output": "\n"}),
        (preference_dataset, {"prompt": "Is it warm?", "chosen": "Yes.", "rejected": ""}),
    ):
        with pytest.raises(DataError, match=r"is empty.*allow_empty_answers=true"):
            build(with_tools, source=[row])
        assert len(build(with_tools, source=[row], allow_empty_answers=True)) == 1


def test_any_order_of_turns_needs_a_setting(with_tools):
    answer = {"role": "assistant", "content": "Yes."}
    system = {"role": "developer", "content": "Be brief."}
    for turns in ([QUESTION, QUESTION, answer], [QUESTION, answer, system, QUESTION, answer]):
        with pytest.raises(DataError, match="allow_any_order=true leaves the order to the chat template"):
            chat(with_tools, [{"messages": turns}])
        (row,) = chat(with_tools, [{"messages": turns}], allow_any_order=True)
        assert text_of(with_tools, row["tokens"]).count("Is it warm?") == 2
        assert set(text_of(with_tools, row["labels"]).split("<|im_end|>")) == {"Yes.", ""}
    with pytest.raises(DataError, match="allow_any_order=true"):
        SFTTransform(lambda row: row, with_tools)({"messages": [QUESTION, QUESTION, answer]})


def test_tokenizer_masks_mappings_as_datasets_do(with_tools):
    turns = [{"role": "system", "content": "Be brief."}, QUESTION, {"role": "assistant", "content": "Yes."}]

    def trained(turns):
        row = with_tools({"messages": turns})
        return text_of(
            with_tools, [token for token, masked in zip(row["tokens"], row["mask"], strict=True) if not masked]
        )

    assert trained(turns) == "Yes.<|im_end|>"
    assert trained([turns[0], {**QUESTION, "masked": False}, turns[2]]) == "Is it warm?<|im_end|>Yes.<|im_end|>"
    assert trained([QUESTION, {**turns[2], "masked": True}, QUESTION, turns[2]]) == "Yes.<|im_end|>"


def test_conversational_completions_and_sharegpt_pairs_are_named():
    row = {"prompt": [QUESTION], "completion": [calling({})]}
    assert format_of(row).kind == "conversational prompts with completions"
    assert format_of(row).reader == "instruct_dataset column_map.input=prompt column_map.output=completion"
    assert format_of({**row, "label": True}).reader == "kto_dataset"
    pair = {"turns": [{"from": "human", "value": "a"}], "chosen": {"from": "gpt", "value": "b"}, "rejected": "c"}
    assert format_of(pair).reader.endswith("column_map.prompt=turns")
    request = {"input": {"messages": [QUESTION]}, "preferred_output": [calling({})], "non_preferred_output": []}
    assert format_of(request).reader.startswith("preference_dataset column_map.chosen=preferred_output")


@pytest.mark.parametrize(
    ("row", "reader"),
    [
        # The columns of LLaMA-Factory.
        (
            {"instruction": "a", "input": "", "chosen": "b", "rejected": "c"},
            "preference_dataset column_map.chosen=chosen column_map.rejected=rejected column_map.prompt=instruction",
        ),
        (
            {"instruction": "a", "input": "", "output": "b", "kto_tag": False},
            "kto_dataset column_map.prompt=instruction column_map.completion=output column_map.label=kto_tag",
        ),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "kto_tag": True},
            "kto_dataset masking_strategy=train_on_last column_map.completion=conversations column_map.label=kto_tag",
        ),
        ({"prompt": [QUESTION]}, "prompt_dataset"),
        (
            {"input": [QUESTION], "output": [calling({})]},
            "instruct_dataset column_map.input=input column_map.output=output",
        ),
        (
            {"earlier": [QUESTION], "messages": [QUESTION, calling({})]},
            "chat_dataset conversation_column=messages conversation_style=openai",
        ),
        (
            {"id": "1", "talk": json.dumps([QUESTION, calling({})])},
            "chat_dataset conversation_column=talk conversation_style=openai",
        ),
        ({"note": '[{"role": cut'}, "text_completion_dataset column=note"),
    ],
)
def test_formats_of_other_libraries_are_named(row, reader):
    assert format_of(row).reader == reader


def test_json_text_conversations_of_a_table_are_recognized(with_tools, tmp_path):
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["id", "talk"], ["1", json.dumps([QUESTION, calling({"town": "Rome"})])]])
    (row,) = chat_dataset(with_tools, source=str(path))
    assert '<call>weather {"town": "Rome"}</call>' in with_tools.decode(row["tokens"], skip_special_tokens=False)
    assert [row_format.kind for row_format in scan(path, everything=True).formats] == ["OpenAI messages"]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [QUESTION, {"role": "assistant", "content": ""}]},
        {"instruction": "a", "output": ""},
        {"prompt": "a", "completion": "", "label": True},
        {"prompt": "a", "chosen": " ", "rejected": "b"},
        {"prompt": [QUESTION], "completion": [{"role": "assistant", "content": ""}]},
    ],
)
def test_empty_answers_of_a_file_are_counted(tmp_path, row):
    path = write_lines(
        tmp_path / "rows.jsonl", [{**row, "messages": [QUESTION, calling({})]} if "messages" in row else row, row]
    )
    lines = "\n".join(report(scan(path, everything=True)))
    count, first = (1, 2) if "messages" in row else (2, 1)
    assert (
        f"{count} rows have an answer that says nothing, the first in line {first}: they are refused, unless" in lines
    )


def test_a_tokenizer_reads_rows_as_datasets_do(with_tools):
    turns = [QUESTION, calling('{"town": "Rome"}')]
    row = with_tools({"messages": turns, "tools": json.dumps(TOOLS)})
    assert row == with_tools({"messages": [QUESTION, calling({"town": "Rome"})], "tools": TOOLS})
    expected = (
        f"{SHOWN}<|im_start|>user\nIs it warm?<|im_end|>\n<|im_start|>assistant\n"
        '<call>weather {"town": "Rome"}</call><|im_end|>\n'
    )
    assert text_of(with_tools, row["tokens"]) == expected
    assert with_tools.render_template(turns, tools=json.dumps(TOOLS)) == expected


class NoTools(MessageTransform):
    def tokenize_messages(self, messages, add_end_tokens=True):
        return [1, 2], [True, False]


def test_tools_that_a_tokenizer_does_not_write_are_logged_once(caplog):
    row = {"messages": [QUESTION, calling({})], "tools": TOOLS}
    for _ in range(2):
        assert NoTools()(dict(row))["tokens"] == [1, 2]
    assert caplog.text.count("Rows have tools, which a NoTools does not write into the prompt") == 1


def test_a_file_is_judged_by_the_settings_of_its_dataset(tmp_path):
    turns = [{"role": "system", "content": "a"}, QUESTION, QUESTION, {"role": "assistant", "content": "Yes."}]
    path = write_lines(tmp_path / "rows.jsonl", [{"messages": turns}, {"messages": turns[1:], "system": "b"}])
    refused = scan(path, everything=True).problems
    assert [number for number, reason in refused if "allow_any_order=true" in reason] == [1, 2]
    assert not scan(path, everything=True, chosen={"allow_any_order": True}).problems
    path = write_lines(tmp_path / "two.jsonl", [{"messages": [*turns[:2], turns[-1]], "system": "b"}])
    assert "new_system_prompt, which replaces both" in scan(path, everything=True).problems[0][1]
    assert not scan(path, everything=True, chosen={"new_system_prompt": "c"}).problems
