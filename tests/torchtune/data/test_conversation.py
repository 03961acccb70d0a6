"""Whatever a row says about its conversation is read, from every format, or refused with a sentence."""

import json

import pytest

from torchtune.data import (
    AlpacaToMessages,
    ChosenRejectedToMessages,
    DataError,
    InputOutputToMessages,
    Message,
    OpenAIToMessages,
    ShareGPTToMessages,
    as_messages,
    mask_messages,
    validate_messages,
)
from torchtune.datasets import LabelledAnswerToMessages

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"town": {"type": "string", "default": None, "enum": ["a", None]}},
        },
    },
}
QUESTION = {"role": "user", "content": "Is it warm?"}
ANSWER = {"role": "assistant", "content": "Yes."}


def call(arguments, name="weather", **fields):
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **fields}


def calling(arguments, **fields):
    return {"role": "assistant", "content": "", "tool_calls": [call(arguments)], **fields}


def openai(*turns, **columns):
    return OpenAIToMessages()({"messages": list(turns), **columns})


# Format -> function that reads a question with its answer, and columns, in this format.
READERS = {
    "openai": lambda **columns: OpenAIToMessages()({"messages": [QUESTION, ANSWER], **columns}),
    "sharegpt": lambda **columns: ShareGPTToMessages()(
        {"conversations": [{"from": "human", "value": "Is it warm?"}, {"from": "gpt", "value": "Yes."}], **columns}
    ),
    "instruct": lambda **columns: InputOutputToMessages()({"input": "Is it warm?", "output": "Yes.", **columns}),
    "alpaca": lambda **columns: AlpacaToMessages()({"instruction": "Is it warm?", "output": "Yes.", **columns}),
    "labelled": lambda **columns: LabelledAnswerToMessages()(
        {"prompt": "Is it warm?", "completion": "Yes.", "label": True, **columns}
    ),
    "pairs": lambda **columns: ChosenRejectedToMessages()(
        {"prompt": "Is it warm?", "chosen": "Yes.", "rejected": "No.", **columns}
    ),
}


def messages_of(sample):
    return sample["messages"] if "messages" in sample else sample["chosen"]


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
@pytest.mark.parametrize(
    "tools",
    [[WEATHER], json.dumps([WEATHER]), [json.dumps(WEATHER)], json.dumps(WEATHER), [WEATHER["function"]]],
    ids=["list", "text", "texts", "text of one", "functions"],
)
def test_tools_are_read_from_every_format(reader, tools):
    assert reader(tools=tools)["tools"] == [WEATHER]
    assert "tools" not in reader(tools=None)
    assert "tools" not in reader(tools=[])
    assert "tools" not in reader(tools="")


def test_older_function_fields_become_tools_and_calls():
    functions = [WEATHER["function"]]
    older = {
        "role": "assistant",
        "content": None,
        "function_call": {"name": "weather", "arguments": '{"town": "Rome"}'},
    }
    result = {"role": "function", "name": "weather", "content": "31"}
    sample = openai(QUESTION, older, result, ANSWER, functions=functions)
    assert sample["tools"] == [WEATHER]
    _, turn, reply, _ = sample["messages"]
    assert turn.extra == {"tool_calls": [call({"town": "Rome"})]}
    assert (turn.ipython, reply.role, reply.extra) == (True, "tool", {"name": "weather"})
    validate_messages(sample["messages"])
    with pytest.raises(DataError, match="both tools and functions"):
        openai(QUESTION, ANSWER, functions=functions, tools=[WEATHER])


@pytest.mark.parametrize(
    ("tools", "words"),
    [("[{", "tools are not JSON"), (5, "list of tool definitions, not int"), ([5], "a tool must be a mapping")],
)
def test_broken_tools_are_refused(tools, words):
    with pytest.raises(DataError, match=f"column 'tools': .*{words}"):
        openai(QUESTION, ANSWER, tools=tools)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ('{"town": "Rome"}', {"town": "Rome"}),
        ('{"town":"Rome"}', {"town": "Rome"}),
        ({"n": 1, "x": 1.0, "none": None, "list": [], "nested": {"none": None}}, None),
        ('{"n": 1, "x": 1.0, "none": null, "big": 12345678901234567890}', None),
        ("", {}), (" ", {}), (None, {}), ({}, {}), ("{}", {}),
    ],
)  # fmt: skip
def test_call_arguments_become_a_mapping(written, read):
    (turn,) = as_messages([calling(written)])
    read = (json.loads(written) if isinstance(written, str) else written) if read is None else read
    assert json.dumps(turn.extra["tool_calls"][0]["function"]["arguments"]) == json.dumps(read)


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        ([call('{"town": Rome')], "arguments of the call of 'weather' are not JSON"),
        ([call("[1]")], "must be a mapping, or the JSON text of one, not list"),
        ([call('{"degrees": [1, NaN]}')], "the call of 'weather' have the number nan, which is not JSON"),
        ([call({"range": {"to": float("inf")}})], "have the number inf"),
        ([call('"\\"doubly\\""')], "not str"),
        ([{"type": "function"}], "must have a 'function'"),
        ([call({}, name=None)], "must have a 'name', not nothing"),
        ([7], "a tool call must be a mapping"),
        ("[{", "tool_calls are not JSON"),
        ({"name": "weather"}, "tool_calls must be a list of calls, not dict"),
    ],
)
def test_broken_calls_are_refused(calls, words):
    with pytest.raises(DataError, match=words):
        as_messages([{"role": "assistant", "content": "", "tool_calls": calls}])


def test_all_forms_of_a_call_give_the_same_tokens():
    expected = [call({"town": "Rome"})]
    for calls in (
        expected,
        json.dumps(expected),
        json.dumps([call('{"town": "Rome"}')]),
        [{"name": "weather", "arguments": {"town": "Rome"}}],
        [call({"town": "Rome"}, id=None)],
    ):
        (turn,) = as_messages([{"role": "assistant", "content": None, "tool_calls": calls}])
        assert (turn.extra, turn.text_content) == ({"tool_calls": expected}, "")
    identified = {"id": "c1", "name": "weather", "arguments": "{}"}
    assert as_messages([{**ANSWER, "tool_calls": [identified]}])[0].extra["tool_calls"] == [call({}, id="c1")]
    assert as_messages([{**ANSWER, "tool_calls": []}])[0].extra == {}


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
@pytest.mark.parametrize("name", ["system", "system_prompt"])
def test_a_system_column_is_the_system_turn(reader, name):
    first, second, *_ = messages_of(reader(**{name: "Be brief."}))
    assert (first.role, first.text_content, first.masked) == ("system", "Be brief.", True)
    assert second.role == "user"
    for nothing in (None, ""):
        assert messages_of(reader(**{name: nothing}))[0].role == "user"
    with pytest.raises(DataError, match=f"column '{name}' holds int"):
        reader(**{name: 5})


def test_different_system_prompts_are_refused():
    system_turn = {"role": "developer", "content": "Be brief."}
    assert len(openai(system_turn, QUESTION, ANSWER, system="Be brief.")["messages"]) == 3
    with pytest.raises(DataError, match="column 'system' and the system turn are different system prompts"):
        openai(system_turn, QUESTION, ANSWER, system="Be long.")
    with pytest.raises(DataError, match="column 'system' and column 'system_prompt' are different"):
        openai(QUESTION, ANSWER, system="Be long.", system_prompt="Be brief.")
    replaced = OpenAIToMessages(new_system_prompt="New.")(
        {"messages": [system_turn, QUESTION, ANSWER], "system": "Be long."}
    )
    assert [turn.text_content for turn in replaced["messages"]] == ["New.", "Is it warm?", "Yes."]
    named = InputOutputToMessages(column_map={"input": "system", "output": "answer"})
    assert [turn.role for turn in named({"system": "a", "answer": "b"})["messages"]] == ["user", "assistant"]


def test_roles_of_every_format_are_read():
    roles = {
        "developer": "system", "system": "system", "human": "user", "user": "user", "gpt": "assistant",
        "chatgpt": "assistant", "bing": "assistant", "model": "assistant", "assistant": "assistant",
        "function": "tool", "observation": "tool", "tool": "tool",
    }  # fmt: skip
    for name, role in roles.items():
        (turn,) = as_messages([{"role": name, "content": "a"}])
        (sharegpt_message,) = as_messages([{"from": name, "value": "a"}])
        assert (turn.role, sharegpt_message.role, turn.text_content) == (role, role, "a")
    for turn, word in (({"role": "x", "content": "a"}, "role"), ({"from": "x", "value": "a"}, "speaker")):
        with pytest.raises(DataError, match=f"'x' is not a {word}: use .*developer.*observation"):
            as_messages([turn])


def test_sharegpt_function_calls_become_tool_calls():
    """As in LLaMA-Factory: the value of a function_call is JSON, and tools are JSON text of bare functions."""
    turns = [
        {"from": "human", "value": "Is it warm?"},
        {"from": "function_call", "value": '{"name": "weather", "arguments": {"town": "Rome", "day": null}}'},
        {"from": "observation", "value": "31"},
        {"from": "gpt", "value": "Yes."},
    ]
    sample = ShareGPTToMessages()({"conversations": turns, "tools": json.dumps([WEATHER["function"]]), "system": "Hi."})
    assert [turn.role for turn in sample["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert sample["messages"][2].extra["tool_calls"] == [call({"town": "Rome", "day": None})]
    assert [turn.masked for turn in sample["messages"]] == [True, True, False, True, False]
    assert sample["tools"] == [WEATHER]
    validate_messages(sample["messages"])
    several = {"from": "function_call", "value": json.dumps([{"name": "weather", "arguments": {}}] * 2)}
    assert len(as_messages([several])[0].extra["tool_calls"]) == 2
    with pytest.raises(DataError, match="a turn that is a function call is not JSON"):
        as_messages([{"from": "function_call", "value": "weather(Rome)"}])


def test_history_is_earlier_turns():
    row = {"instruction": "And now?", "output": "c", "history": [["One?", "a"], ["Two?", "b"]]}
    messages = AlpacaToMessages()({**row, "system": "s"})["messages"]
    assert [turn.text_content for turn in messages[:5]] == ["s", "One?", "a", "Two?", "b"]
    assert messages[5].text_content.endswith("### Instruction:\nAnd now?\n\n### Response:\n")
    assert [turn.masked for turn in messages] == [True, *[False] * 6]
    assert len(AlpacaToMessages()({**row, "history": '[["One?", "a"]]'})["messages"]) == 4
    for nothing in ([], None, "", "[]"):
        assert len(AlpacaToMessages()({**row, "history": nothing})["messages"]) == 2
    for broken in ("One?", [["One?"]], [["One?", None]], [5]):
        with pytest.raises(DataError, match="column 'history'"):
            AlpacaToMessages()({**row, "history": broken})


@pytest.mark.parametrize("flag", [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"loss": False}, {"masked": True}])
def test_a_turn_that_is_left_out_is_not_trained_on(flag):
    turns = [QUESTION, {**ANSWER, **flag}, QUESTION, {**ANSWER, "weight": 1}]
    for strategy, masked in (("train_on_assistant", [1, 1, 1, 0]), ("train_on_all", [0, 1, 0, 0])):
        sample = OpenAIToMessages(masking_strategy=strategy)({"messages": turns})
        assert [turn.masked for turn in sample["messages"]] == list(map(bool, masked))
        assert sample["messages"][1].extra == {}
    flagged = [{"from": "human", "value": "a", "train": False}, {"from": "gpt", "value": "b", **flag}]
    assert all(turn.masked for turn in ShareGPTToMessages()({"conversations": flagged})["messages"])
    pair = {
        "chosen": [QUESTION, {**ANSWER, **flag}, QUESTION, ANSWER],
        "rejected": [QUESTION, ANSWER, QUESTION, calling({})],
    }
    assert [turn.masked for turn in ChosenRejectedToMessages()(pair)["chosen"]] == [True, True, True, False]


@pytest.mark.parametrize("given", [{"town": "Rome"}, ["Rome"], 7])
def test_the_input_of_an_instruction_is_a_text(given):
    with pytest.raises(DataError, match=r"column 'input' holds .*, not a text"):
        AlpacaToMessages()({"instruction": "Where?", "input": given, "output": "There."})


def test_a_chosen_input_column_must_be_there():
    transform = AlpacaToMessages(column_map={"instruction": "instruction", "input": "contxt", "output": "output"})
    row = {"instruction": "Where?", "context": "Rome", "output": "There."}
    with pytest.raises(DataError, match=r"no column 'contxt' .* did you mean 'context'"):
        transform(row)
    assert "Rome" in transform({**row, "contxt": "Rome"})["messages"][0].text_content
    assert "Input" not in transform({**row, "contxt": None})["messages"][0].text_content


@pytest.mark.parametrize("other", [{"input": "Rome"}, {"history": [["One?", "a"]]}])
def test_pairs_and_labelled_answers_lose_no_part_of_an_instruction(other):
    row = {"instruction": "Where?", "chosen": "There.", "rejected": "No.", "output": "There.", "kto_tag": True}
    pairs = ChosenRejectedToMessages(column_map={"chosen": "chosen", "rejected": "rejected", "prompt": "instruction"})
    answers = LabelledAnswerToMessages({"prompt": "instruction", "completion": "output", "label": "kto_tag"})
    for transform in (pairs, answers):
        transform({**row, "input": "", "history": []})
        with pytest.raises(DataError, match="belongs to column 'instruction' and is not read"):
            transform({**row, **other})


@pytest.mark.parametrize("field", ["weight", "loss_scale", "train", "training", "loss"])
def test_part_of_a_turn_is_taken_out_by_any_field_that_takes_out_a_turn(field):
    parts = [{"type": "text", "text": "On mat 1.", field: 1}, {"type": "text", "text": " Or not.", field: 0}]
    answer = openai(QUESTION, {**ANSWER, "content": parts})["messages"][1]
    assert [part.get("train") for part in answer.content] == [None, False]
    assert openai(QUESTION, {**ANSWER, field: 0})["messages"][1].masked


@pytest.mark.parametrize("field", ["train_detail", "training_detail"])
def test_ranges_of_characters_are_parts_of_a_turn(field):
    """Axolotl's documentation counts from 0, and the last character belongs to a range."""
    spans = [(0, 8, False), (9, 18, True), (19, 30, False)]
    detail = [{"begin_offset": first, "end_offset": last, "train": train} for first, last, train in spans]
    text = "I'm doing very well, thank you!"
    answer = openai(QUESTION, {"role": "assistant", "content": text, field: detail})["messages"][1]
    parts = [(part["content"], part.get("train", True)) for part in answer.content]
    assert parts == [("I'm doing", False), (" very well", True), (", thank you!", False)]
    assert answer.text_content == text
    asked = {**QUESTION, field: [{"begin_offset": 0, "end_offset": 1, "train": True}]}
    with pytest.raises(DataError, match="turn 0 of 'user' says that it is trained on"):
        openai(asked, ANSWER)
    gap = openai(QUESTION, {"role": "assistant", "content": text, field: detail[:1]})["messages"][1]
    assert [part.get("train", True) for part in gap.content] == [False, True]


@pytest.mark.parametrize(
    ("fields", "masked", "weight"),
    [
        ({"loss_scale": 0.5}, False, 0.5),
        ({"loss_scale": 0.0}, True, 0),
        ({"loss": False, "loss_scale": 2.0}, False, 2),
        ({"loss": True, "loss_scale": 0}, True, 0),
        ({"loss": False}, True, 1),
        ({"loss_scale": 0.5, "weight": 3}, False, 1.5),
    ],
)
def test_loss_scale_is_a_weight_that_counts_before_loss(fields, masked, weight):
    """As the documentation of ms-swift says."""
    answer = openai(QUESTION, {**ANSWER, **fields})["messages"][1]
    assert (answer.masked, answer.weight) == (masked, weight)
    assert not answer.extra


def test_field_that_looks_like_a_training_flag_is_warned_of(caplog):
    answer = openai(QUESTION, {**ANSWER, "sample_weight": 0})["messages"][1]
    assert (answer.masked, answer.weight) == (False, 1)
    assert "field 'sample_weight', which does not change what is trained on: only train, loss" in caplog.text


def test_unsupported_training_flags_are_refused():
    part = {"begin_offset": 0, "end_offset": 2, "train": False}
    for flag, words in (
        ({"masked": "false"}, "a turn has masked 'false': only true and false work"),
        ({"training": "no"}, "a turn has training 'no': only true and false work"),
        ({"loss_scale": -1}, "a turn has loss_scale -1: a weight is a number of at least 0"),
        (
            {"train_detail": [{**part, "end_offset": 99}]},
            "a turn of . characters has the train_detail .* first and last",
        ),
        ({"train_detail": [{**part, "begin_offset": -1}]}, "a turn of . characters has the train_detail"),
        ({"train_detail": [{**part, "train": "no"}]}, "a turn of . characters has the train_detail"),
        ({"train_detail": part}, "give a list of ranges with begin_offset, end_offset and train"),
        ({"content": [{"type": "text", "text": "So."}] * 2, "train_detail": [part]}, "its content is not one text"),
        ({"weight": -0.5}, "a turn has weight -0.5: a weight is a number of at least 0"),
        ({"weight": float("nan")}, "a turn has weight nan: a weight is a number"),
        ({"weight": "high"}, "a turn has weight 'high': a weight is a number"),
        ({"content": [{"type": "text", "text": "So.", "weight": 0.5}]}, "a part of a turn has weight 0.5: only whole"),
        ({"train": "yes"}, "a turn has train 'yes': only true and false work"),
    ):
        with pytest.raises(DataError, match=words):
            openai(QUESTION, {**ANSWER, **flag})
    asks = {**QUESTION, "train": True}
    with pytest.raises(DataError, match=r"turn 0 of 'user' .* but masking_strategy=train_on_ass"):
        openai(asks, ANSWER)
    trained = OpenAIToMessages(masking_strategy="train_on_all")({"messages": [asks, ANSWER]})["messages"]
    assert [turn.masked for turn in trained] == [False, False]
    # 1 is the weight of every turn that states none.
    assert [turn.masked for turn in openai({**QUESTION, "weight": 1}, ANSWER)["messages"]] == [True, False]


def test_weight_of_a_turn_is_read_in_every_format():
    weighted = openai(QUESTION, {**ANSWER, "weight": 0.5}, QUESTION, ANSWER)["messages"]
    assert [turn.weight for turn in weighted] == [1, 0.5, 1, 1]
    assert [turn.masked for turn in weighted] == [True, False, True, False]
    turns = [{"from": "human", "value": "a", "weight": 3}, {"from": "gpt", "value": "b", "weight": 2}]
    weighted = ShareGPTToMessages()({"conversations": turns})["messages"]
    assert [(turn.weight, turn.masked) for turn in weighted] == [(3, True), (2, False)]


def test_second_masking_strategy_replaces_the_first():
    turns = [dict(QUESTION), dict(ANSWER), dict(QUESTION), {**ANSWER, "weight": 0}]
    mask_messages(turns, "train_on_last")
    mask_messages(turns, "train_on_all")
    assert [turn["masked"] for turn in turns] == [False, False, False, True]


def test_only_turns_of_the_assistant_are_trained_on_by_default():
    messages = as_messages([{"role": "system", "content": "s"}, QUESTION, ANSWER, {**QUESTION, "masked": False}])
    assert [message.masked for message in messages] == [True, True, False, False]
    user_message = Message("user", "a")
    assert as_messages([user_message])[0] is user_message
    assert not user_message.masked


def test_pairs_keep_calls_tools_reasoning_and_names():
    named = {**QUESTION, "name": "Ann"}
    thinking = {**ANSWER, "reasoning_content": "It is 31."}
    row = {
        "prompt": [named],
        "chosen": [calling('{"town": "Rome"}')],
        "rejected": [thinking],
        "tools": json.dumps([WEATHER]),
    }
    pair = ChosenRejectedToMessages()(row)
    assert pair["tools"] == [WEATHER]
    assert pair["chosen"][0].extra == pair["rejected"][0].extra == {"name": "Ann"}
    assert pair["chosen"][1].extra == {"tool_calls": [call({"town": "Rome"})]}
    assert pair["rejected"][1].extra == {"reasoning_content": "It is 31."}
    good = LabelledAnswerToMessages()(
        {"prompt": [named], "completion": [calling("{}")], "label": True, "tools": [WEATHER]}
    )
    assert good["messages"][1].extra == {"tool_calls": [call({})]}
    assert good["tools"] == [WEATHER]


def test_an_earlier_answer_in_the_prompt_is_no_part_of_an_answer():
    """As in TRL: a bad answer does not unlearn the turns that it answers."""
    row = {"prompt": [QUESTION, ANSWER, QUESTION], "chosen": [ANSWER], "rejected": [calling({})]}
    answer = {"prompt": row["prompt"], "completion": [ANSWER], "label": False}
    for strategy, masked in (
        ("train_on_assistant", [True, True, True, False]),
        ("train_on_last", [True, True, True, False]),
        ("train_on_all", [False] * 4),
    ):
        pair = ChosenRejectedToMessages(masking_strategy=strategy)(row)
        labelled = LabelledAnswerToMessages(masking_strategy=strategy)(answer)
        for turns in (pair["chosen"], pair["rejected"], labelled["messages"]):
            assert [turn.masked for turn in turns] == masked
    full_pair = ChosenRejectedToMessages()({side: [*row["prompt"], *row[side]] for side in ("chosen", "rejected")})
    assert [turn.masked for turn in full_pair["chosen"]] == [True, False, True, False]


def test_pairs_in_sharegpt_format():
    """As in LLaMA-Factory: turns of the prompt, and one turn for each answer."""
    row = {
        "conversations": [{"from": "human", "value": "Is it warm?"}],
        "chosen": {"from": "gpt", "value": "Yes."},
        "rejected": {"from": "gpt", "value": "No."},
    }
    columns = {"prompt": "conversations", "chosen": "chosen", "rejected": "rejected"}
    pair = ChosenRejectedToMessages(column_map=columns)(row)
    assert [turn.text_content for turn in pair["chosen"]] == ["Is it warm?", "Yes."]
    assert [turn.text_content for turn in pair["rejected"]] == ["Is it warm?", "No."]


def test_both_answers_of_a_pair_are_to_one_prompt():
    read = ChosenRejectedToMessages()
    reply, other_reply = ({"role": "tool", "content": text} for text in ("31", "3"))
    system = {"role": "system", "content": "Be brief."}
    for chosen, rejected in (
        ([QUESTION, ANSWER], [QUESTION, calling({})]),
        (
            [QUESTION, calling({"town": "Rome"}), reply, ANSWER],
            [QUESTION, calling({"town": "Oslo"}), other_reply, ANSWER],
        ),
        ([QUESTION, calling({"town": "Rome"}), reply, ANSWER], [QUESTION, {**ANSWER, "content": "No."}]),
        ([system, QUESTION, ANSWER], [system, QUESTION, calling({})]),
    ):
        read({"chosen": chosen, "rejected": rejected})
    asked = {**QUESTION, "content": "Is it cold?"}
    for chosen, rejected, words in (
        ([QUESTION, ANSWER], [asked, ANSWER], "first differ in turn 0, where chosen has a turn of 'user'"),
        ([QUESTION, ANSWER], [system, QUESTION, ANSWER], "first differ in turn 0, where chosen has a turn of 'user'"),
        ([QUESTION, ANSWER, QUESTION, ANSWER], [QUESTION, ANSWER], "turn 2, where chosen has a turn of 'user'"),
        ([QUESTION, calling({}), reply, ANSWER], [QUESTION, calling({}), other_reply, ANSWER], "has a turn of 'tool'"),
    ):
        with pytest.raises(DataError, match=f"different prompts: they {words}|different prompts: .*{words}"):
            read({"chosen": chosen, "rejected": rejected})
    one_system = {"chosen": [system, QUESTION, ANSWER], "rejected": [QUESTION, calling({})]}
    ChosenRejectedToMessages(new_system_prompt="Both.")(one_system)
    read({**one_system, "system": "Be brief."})


def test_only_the_completion_of_a_conversational_row_is_trained_on():
    """The completion is trained on, as in TRL; an earlier answer in the prompt is not."""
    row = {"prompt": [QUESTION, ANSWER, QUESTION], "completion": [{**ANSWER, "content": "Still."}], "tools": [WEATHER]}
    columns = {"input": "prompt", "output": "completion"}
    sample = InputOutputToMessages(column_map=columns)(row)
    assert [turn.masked for turn in sample["messages"]] == [True, True, True, False]
    assert sample["tools"] == [WEATHER]
    everything = InputOutputToMessages(column_map=columns, masking_strategy="train_on_all")(row)
    assert not any(turn.masked for turn in everything["messages"])
    mixed = InputOutputToMessages(column_map=columns)({"prompt": "Is it warm?", "completion": [calling("{}")]})
    assert mixed["messages"][1].extra == {"tool_calls": [call({})]}
    for broken in (None, 5):
        with pytest.raises(DataError, match="not a text or a list of turns"):
            InputOutputToMessages(column_map=columns)({**row, "completion": broken})


def test_prompt_that_is_a_request_is_read():
    """As in OpenAI's format of preferences."""
    request = {"messages": [QUESTION], "tools": [WEATHER], "parallel_tool_calls": True}
    row = {"input": request, "preferred_output": [ANSWER], "non_preferred_output": [calling("{}")]}
    columns = {"prompt": "input", "chosen": "preferred_output", "rejected": "non_preferred_output"}
    pair = ChosenRejectedToMessages(column_map=columns)(row)
    assert [turn.role for turn in pair["chosen"]] == ["user", "assistant"]
    assert pair["tools"] == [WEATHER]
    labelled = LabelledAnswerToMessages()({"prompt": {**request, "system": "s"}, "completion": "Yes.", "label": 1})
    assert labelled["tools"] == [WEATHER]
    assert labelled["messages"][0].text_content == "s"
    with pytest.raises(DataError, match="holds dict, not a text or a list of turns"):
        LabelledAnswerToMessages()({"prompt": {"text": "a"}, "completion": "Yes.", "label": 1})


def test_variables_of_the_template_in_a_row_are_refused():
    with pytest.raises(DataError, match="'chat_template_kwargs' is of no effect"):
        openai(QUESTION, ANSWER, chat_template_kwargs={"enable_thinking": False})


def test_turns_may_be_json_text_as_in_tables():
    assert len(OpenAIToMessages()({"messages": json.dumps([QUESTION, ANSWER])})["messages"]) == 2
    for broken, words in (
        ("[{", "the turns in column 'messages' are not JSON"),
        ("Hi.", "holds str, not a list of turns"),
    ):
        with pytest.raises(DataError, match=words):
            OpenAIToMessages()({"messages": broken})


def test_results_of_tools_are_texts_or_parts():
    parts = [{"type": "text", "text": "31", "image": None}, {"type": "text", "text": " C"}]
    asked = [QUESTION, calling({})]
    assert openai(*asked, {"role": "tool", "content": parts}, ANSWER)["messages"][2].text_content == "31 C"
    with pytest.raises(DataError, match="content of a turn of 'tool' must be a text or a list, not dict"):
        openai(*asked, {"role": "tool", "content": {"degrees": 31}}, ANSWER)
