"""Rows of every format, and scores by name."""

import json

import pytest

from torchtune.evaluation import EvaluationError, check_scores, make_scores, read_eval_rows
from torchtune.evaluation._score_answers import scored_text, tool_format_of
from torchtune.generation import GenerationError
from torchtune.utils import UserError

USER = {"role": "user", "content": "2 + 2"}
ASSISTANT = {"role": "assistant", "content": "4"}
SHAREGPT = [{"from": "human", "value": "2 + 2"}, {"from": "gpt", "value": "4"}]


def rows_of(folder, *rows, **options):
    """Rows read from a file; a string is a line as it is."""
    lines = []
    for row in rows:
        lines.append(row if isinstance(row, str) else json.dumps(row))
    path = folder / "rows.jsonl"
    path.write_text("\n".join(lines))
    return read_eval_rows(path, **options)


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ({"messages": [USER, ASSISTANT]}, {}),
        ({"conversations": SHAREGPT}, {}),
        ({"conversations": json.dumps(SHAREGPT)}, {}),
        ({"turns": [USER, ASSISTANT], "note": "x"}, {"prompt": "turns"}),
        ({"prompt": "2 + 2", "answer": "4"}, {}),
        ({"prompt": [USER], "answer": "4"}, {}),
        ({"question": "2 + 2", "answer": "4"}, {}),
        ({"prompt": "2 + 2", "completion": "4"}, {}),
        ({"a": "2 + 2", "b": "4", "answer": "5"}, {"prompt": "a", "answer": "b"}),
        ({"messages": [USER, ASSISTANT], "answer": "4"}, {}),
    ],
)
def test_every_format_gives_the_question_and_the_right_answer(tmp_path, row, options):
    (eval_row,) = rows_of(tmp_path, row, **options)
    assert [(message.role, message.text_content) for message in eval_row.messages] == [("user", "2 + 2")]
    assert (eval_row.given, eval_row.row["answer"], eval_row.line) == ([USER], "4", 1)


@pytest.mark.parametrize("answer", [{"sum": 4}, [4], [], {}, 4], ids=str)
def test_a_right_answer_that_is_no_text_stays_as_it_is(answer, tmp_path):
    (eval_row,) = rows_of(tmp_path, {"prompt": "2 + 2", "answer": answer})
    assert (eval_row.row["answer"], eval_row.expects_call) == (answer, False)


def test_earlier_turns_and_the_system_prompt_are_in_the_prompt_up_to_the_limit(tmp_path):
    turns = [USER, ASSISTANT, {"role": "user", "content": "and 3?"}, {"role": "assistant", "content": "7"}]
    rows = rows_of(tmp_path, {"messages": turns}, "", {"messages": turns}, "no JSON", system="Be brief.", limit=2)
    assert [row.line for row in rows] == [1, 3]
    assert rows[0].given == [{"role": "system", "content": "Be brief."}, *turns[:3]]
    alpaca = {"instruction": "Add.", "input": "2 + 2", "output": "4"}
    (alpaca_row,) = rows_of(tmp_path, alpaca)
    assert "Add." in alpaca_row.messages[0].text_content
    assert "2 + 2" in alpaca_row.messages[0].text_content
    assert alpaca_row.row["answer"] == "4"


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([], {}, "there are no rows"),
        ([{"prompt": "a"}, "{"], {}, "line 2: no JSON"),
        ([{"prompt": "a", "image": "b.png", "images": ["c.png"]}], {}, "line 1: it has both image and images"),
        ([{"text": "a", "id": 1}], {}, "line 1: none of the columns text, id is a prompt"),
        ([{"prompt": "a"}], {"prompt": "b"}, "line 1: there is no column 'b' among prompt"),
        ([{"prompt": "a"}, {"prompt": "b", "x": 1}], {"answer": "x"}, "line 1: there is no column 'x'"),
        ([{"messages": []}], {}, "line 1"),
    ],
)
def test_invalid_row_is_refused_by_line(tmp_path, rows, options, message):
    with pytest.raises(UserError, match=message):
        rows_of(tmp_path, *rows, **options)


def test_conversation_without_a_question_is_refused(tmp_path):
    with pytest.raises(GenerationError, match="line 1: there is no turn to answer"):
        rows_of(tmp_path, {"messages": [ASSISTANT]})


@pytest.mark.parametrize(
    ("name", "right", "answer", "value"),
    [
        ("exact", "4", " 4\n", 1.0),
        (r"exact:= (\d+)", "4", "1 = 1, so 2 + 2 = 4.", 1.0),
        ("number", "4.0", "It is 4", 1.0),
        ("number", str(1e-05), "so 10e-6", 1.0),  # what a row of JSON has
        ("number", "5", "from 3-5", 1.0),
        ("number", "-5", "3 - 8 = -5.", 1.0),
        ("json", '{"a": 1, "b": null}', '{"a": 1, "b": 2}', 0.5),
        ("tests.torchtune.evaluation.scores.half", "4", "4", 0.5),
    ],
)
def test_score_of_each_name_compares_as_documented(name, right, answer, value):
    (score,) = make_scores([name])
    assert list(score([{"answer": right}], [answer])) == [value]


def test_a_score_with_several_patterns_has_several_names():
    scores = make_scores(["exact", "regex:a", "regex:b"])
    assert [score.name for score in scores] == ["exact", "regex:a", "regex:b"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["exat"], "there is no score 'exat'; did you mean 'exact'"),
        (["regex"], "lacks its pattern"),
        (["regex:("], "is not a regular expression"),
        (["exact", "exact:a", "exact"], "'exact' is given twice"),
        (["no_such_module.score"], "no_such_module"),
        (["tests.torchtune.evaluation.scores.NUMBER"], "it is a float, not a function"),
    ],
)
def test_unknown_or_invalid_score_is_refused(names, message):
    with pytest.raises(EvaluationError, match=message):
        make_scores(names)


def test_rows_that_a_score_cannot_read_are_named_before_a_model_is_loaded(tmp_path):
    rows = rows_of(tmp_path, {"prompt": "a", "answer": "{}"}, {"prompt": "a", "answer": "b"}, {"prompt": "a"})
    check_scores(make_scores(["json"]), rows[:1], "rows.jsonl")
    with pytest.raises(EvaluationError, match="line 2: score 'json': column 'answer' is not a JSON object"):
        check_scores(make_scores(["json"]), rows, "rows.jsonl")
    with pytest.raises(EvaluationError, match="line 3: score 'exact': the row has no column 'answer'"):
        check_scores(make_scores(["exact"]), rows, "rows.jsonl")


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
CALL = {"type": "function", "function": {"name": "weather", "arguments": '{"town": "Rome", "day": 1}'}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RIGHT = '{"arguments": {"day": 1, "town": "Rome"}, "name": "weather"}'


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, CALLING], "tools": TOOLS},
        {"messages": [USER, CALLING], "tools": json.dumps(TOOLS)},
        {"prompt": [USER], "completion": [CALLING], "tools": TOOLS},
        {"prompt": "2 + 2", "answer": CALLING, "tools": TOOLS},
    ],
)
def test_a_right_answer_may_be_a_call_of_a_tool_of_the_row(tmp_path, row):
    (eval_row,) = rows_of(tmp_path, row)
    assert (eval_row.tools, eval_row.expects_call, eval_row.row["answer"]) == (TOOLS, True, RIGHT)
    assert eval_row.given == {"messages": [USER], "tools": TOOLS}
    written = '<tool_call>\n{"name": "weather", "arguments": {"town": "Rome", "day": 1}}\n</tool_call>'
    assert scored_text(eval_row, written, "hermes") == RIGHT
    for answer in ("\n\n", "", written.replace("1", "2"), written.replace("weather", "other"), "<tool_call>{"):
        assert scored_text(eval_row, answer, "hermes") != RIGHT
    (exact,) = make_scores(["exact"])
    texts = [scored_text(eval_row, text, "hermes") for text in (written, "\n\n")]
    assert list(exact([eval_row.row] * 2, texts)) == [1, 0]


def test_a_column_of_right_answers_is_preferred_to_a_call(tmp_path):
    (eval_row,) = rows_of(tmp_path, {"messages": [USER, CALLING], "answer": "4"})
    assert (eval_row.row["answer"], eval_row.expects_call) == ("4", False)


def test_calls_without_a_known_format_are_refused_by_row(tmp_path):
    rows = rows_of(tmp_path, {"prompt": "a", "answer": "b"}, {"messages": [USER, CALLING], "tools": TOOLS})
    assert tool_format_of(None, rows[:1], "rows.jsonl") is None
    with pytest.raises(EvaluationError, match=r"rows.jsonl, line 2: the right answer is a tool call, but the chat"):
        tool_format_of(None, rows, "rows.jsonl")


def test_a_system_column_is_part_of_the_prompt(tmp_path):
    row = {"question": "2 + 2", "answer": "4", "system": "Be brief."}
    (eval_row,) = rows_of(tmp_path, row, system="The setting is for other rows.")
    assert [(turn.role, turn.text_content) for turn in eval_row.messages] == [
        ("system", "Be brief."),
        ("user", "2 + 2"),
    ]
