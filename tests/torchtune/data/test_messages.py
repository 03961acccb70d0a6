"""Messages, masks, prompt templates and rows to messages."""

import pytest

from torchtune.data import (
    AlpacaToMessages,
    ChatMLTemplate,
    ChosenRejectedToMessages,
    DataError,
    GrammarErrorCorrectionTemplate,
    InputOutputToMessages,
    MaskingStrategy,
    Message,
    OpenAIToMessages,
    PromptTemplate,
    QuestionAnswerTemplate,
    ShareGPTToMessages,
    SummarizeTemplate,
    as_messages,
    format_content_with_images,
    mask_messages,
    validate_messages,
)
from torchtune.utils import UserError


def roles(messages):
    return [(message.role, message.text_content, message.masked) for message in messages]


def test_message_holds_text_media_and_flags():
    message = Message(
        "user", [{"type": "text", "content": "a"}, {"type": "image", "content": 1}, {"type": "text", "content": "b"}]
    )
    assert (message.text_content, message.contains_media, message.get_media()) == ("ab", True, [1])
    assert Message("user", "a").content == [{"type": "text", "content": "a"}]
    copy = Message.from_dict({"role": "assistant", "content": "a", "masked": True, "ipython": True, "eot": False})
    assert (copy.masked, copy.ipython, copy.eot) == (True, True, False)
    for role, content in (("user", "a"), ("assistant", [{"type": "image", "content": 1}])):
        with pytest.raises(ValueError, match="Only a text turn of the assistant"):
            Message(role, content, ipython=True)
    assert issubclass(DataError, UserError)
    assert issubclass(DataError, ValueError)


@pytest.mark.parametrize(
    ("strategy", "masked"),
    [
        ("train_on_all", [True, False, False, False, False, False]),
        (MaskingStrategy.TRAIN_ON_ASSISTANT, [True, True, False, True, False, True]),
        ("train_on_last", [True, True, True, True, False, True]),
    ],
)
def test_masking_strategies_select_the_trained_turns(strategy, masked):
    messages = [Message(role, "a") for role in ("system", "user", "assistant", "user", "assistant", "user")]
    mask_messages(messages, strategy)
    assert [message.masked for message in messages] == masked


def test_media_are_never_trained_on():
    messages = [Message("user", [{"type": "image", "content": 1}]), Message("assistant", "a")]
    mask_messages(messages, "train_on_all")
    assert [message.masked for message in messages] == [True, False]
    with pytest.raises(DataError, match="train_on_all, train_on_assistant, train_on_last, not 'x'"):
        mask_messages(messages, "x")


@pytest.mark.parametrize(
    ("turns", "words"),
    [
        (["user"], "at least 2 turns"),
        (["user", "system"], "turn 1 is a system turn"),
        (["user", "user"], "turn 1 is a second user turn"),
        (["assistant", "user"], "turn 0 of the assistant follows nothing"),
        (["system", "assistant"], "turn 1 of the assistant follows system"),
        (["user", "assistant", "tool"], "turn 2 is a tool's answer"),
    ],
)
def test_invalid_order_of_turns_is_refused(turns, words):
    with pytest.raises(DataError, match=words):
        validate_messages([Message(role, "a") for role in turns])


def test_tool_answer_must_follow_a_call():
    call = Message("assistant", "f()", ipython=True)
    validate_messages(
        [Message("user", "a"), call, Message("ipython", "b"), Message("ipython", "c"), Message("assistant", "d")]
    )
    structured = Message("assistant", "", extra={"tool_calls": [1]})
    validate_messages([Message("user", "a"), structured, Message("tool", "b"), Message("assistant", "d")])


def test_prompt_templates_add_text_around_turns():
    chat = [Message("system", "s"), Message("user", "u"), Message("assistant", "")]
    text = "".join(message.text_content for message in ChatMLTemplate()(chat))
    assert text == "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"
    for template, expected in (
        (GrammarErrorCorrectionTemplate, "Correct this to standard English: u\n---\nCorrected: "),
        (SummarizeTemplate, "Summarize this dialogue:\nu\n---\nSummary:\n"),
        (QuestionAnswerTemplate, "Question: u\n\nAnswer: "),
    ):
        formatted = template()(chat)
        assert formatted[1].text_content == expected
        assert formatted[0].text_content == "s"
    assert PromptTemplate({"user": ("<", ">")})(chat)[1].content[0] == {"type": "text", "content": "<"}
    assert chat[1].text_content == "u"


def test_alpaca_rows_become_prompt_and_answer():
    row = {"instruction": "Add.", "input": "1 and 2", "output": "3"}
    user, answer = AlpacaToMessages()(row)["messages"]
    assert user.text_content.endswith("\n\n### Instruction:\nAdd.\n\n### Input:\n1 and 2\n\n### Response:\n")
    assert user.text_content.startswith("Below is an instruction that describes a task, paired with an input")
    assert (user.masked, answer.masked, answer.text_content) == (False, False, "3")
    for empty in ({**row, "input": ""}, {**row, "input": None}, {"instruction": "Add.", "output": "3"}):
        text = AlpacaToMessages()(empty)["messages"][0].text_content
        assert text.endswith("completes the request.\n\n### Instruction:\nAdd.\n\n### Response:\n")
    braces = AlpacaToMessages()({"instruction": "{x}", "output": "3"})["messages"][0]
    assert "{x}" in braces.text_content


def test_input_and_output_columns_become_turns():
    transform = InputOutputToMessages(column_map={"input": "q", "output": "a"}, new_system_prompt="s")
    assert roles(transform({"q": "1", "a": "2"})["messages"]) == [
        ("system", "s", True),
        ("user", "1", True),
        ("assistant", "2", False),
    ]
    with_image = InputOutputToMessages(column_map={"input": "q", "output": "a", "image": "i"}, image_dir="/x")
    user = with_image({"q": "1", "a": "2", "i": "p.png"})["messages"][0]
    assert [str(image) for image in user.get_media()] == ["/x/p.png"]


def test_sharegpt_turns_become_messages():
    turns = [{"from": "system", "value": "s"}, {"from": "human", "value": "h"}, {"from": "gpt", "value": "g"}]
    assert roles(ShareGPTToMessages()({"conversations": turns})["messages"]) == [
        ("system", "s", True),
        ("user", "h", True),
        ("assistant", "g", False),
    ]
    replaced = ShareGPTToMessages(new_system_prompt="n")({"conversations": turns})["messages"]
    assert roles(replaced)[0] == ("system", "n", True)
    assert len(replaced) == 3
    image = [{"from": "human", "value": "what is <image>?"}, {"from": "gpt", "value": "g"}]
    user = ShareGPTToMessages()({"conversations": image, "image": "x.png"})["messages"][0]
    assert [item["type"] for item in user.content] == ["text", "image", "text"]
    with pytest.raises(DataError, match="'conversations' holds nothing"):
        ShareGPTToMessages()({"conversations": None})
    with pytest.raises(DataError, match="without turns"):
        ShareGPTToMessages()({"conversations": []})


def test_openai_turns_keep_tool_calls_and_reasoning():
    call = {"function": {"name": "f", "arguments": {"a": 1, "unused": None}}}
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "q"}], "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "r", "name": "f"},
        {"role": "assistant", "content": "a", "reasoning_content": "think"},
    ]
    sample = OpenAIToMessages()({"messages": turns, "tools": [{"name": "f"}]})
    user, calling, tool, answer = sample["messages"]
    assert sample["tools"] == [{"name": "f"}]
    assert (user.text_content, user.extra) == ("q", {})
    assert (calling.ipython, calling.eot) == (True, False)
    assert calling.extra == {"tool_calls": [call]}
    assert (tool.eot, tool.extra) == (False, {"name": "f"})
    assert (answer.eot, answer.extra) == (True, {"reasoning_content": "think"})
    validate_messages(sample["messages"])
    with pytest.raises(DataError, match="has no content"):
        OpenAIToMessages()({"messages": [{"role": "user", "content": None}]})
    with pytest.raises(DataError, match="'robot' is not a role"):
        OpenAIToMessages()({"messages": [{"role": "robot", "content": "a"}]})


def test_chosen_and_rejected_become_two_conversations():
    row = {"chosen": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    row["rejected"] = [row["chosen"][0], {"role": "assistant", "content": "b"}]
    pair = ChosenRejectedToMessages(new_system_prompt="s")(row)
    assert roles(pair["chosen"]) == [("system", "s", True), ("user", "q", True), ("assistant", "a", False)]
    assert roles(pair["rejected"])[-1] == ("assistant", "b", False)
    with pytest.raises(DataError, match="there is no column 'rejected' among 'chosen'"):
        ChosenRejectedToMessages()({"chosen": row["chosen"]})


def test_image_tags_are_replaced_in_order():
    items = format_content_with_images("<i>a<i>b", image_tag="<i>", images=[1, 2])
    assert items == [
        {"type": "image", "content": 1},
        {"type": "text", "content": "a"},
        {"type": "image", "content": 2},
        {"type": "text", "content": "b"},
    ]
    with pytest.raises(DataError, match="2 '<i>' but 1 image"):
        format_content_with_images("<i>a<i>", image_tag="<i>", images=[1])


@pytest.mark.parametrize(
    ("part", "item"),
    [
        ({"type": "image_url", "image_url": {"url": "a.png"}}, {"type": "image", "content": "a.png"}),
        ({"type": "image", "image": "a.png"}, {"type": "image", "content": "a.png"}),
        ({"type": "image", "path": "a.png", "url": None}, {"type": "image", "content": "a.png"}),
        ({"type": "image", "url": "a.png"}, {"type": "image", "content": "a.png"}),
        ({"type": "image", "base64": "QQ=="}, {"type": "image", "content": "data:image;base64,QQ=="}),
        ({"type": "video", "video": ["a.png"], "fps": 2}, {"type": "video", "content": ["a.png"], "fps": 2}),
        ({"type": "text", "text": "a"}, {"type": "text", "content": "a"}),
        ({"type": "text", "content": "a", "text": None}, {"type": "text", "content": "a"}),
    ],
)
def test_content_parts_of_every_form_are_read(part, item):
    (message,) = as_messages([{"role": "user", "content": [part]}])
    assert message.content == [item]


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "image_url"}, "'image_url' with a 'url'"),
        ({"type": "image_url", "image_url": "a.png"}, "'image_url' with a 'url'"),
        ({"type": "image_url", "image_url": {}}, "'image_url' with a 'url'"),
        ({"type": "image"}, "'image', a 'path' or a 'url'"),
        ({"type": "video"}, "type 'video'"),
        ({"type": "text"}, "type 'text'"),
        ({"type": "text", "text": 3}, "holds int, not a text"),
        ("text", "type 'str'"),
        ({"text": "a"}, "type 'None'"),
    ],
)
def test_broken_content_parts_are_refused(part, words):
    with pytest.raises(DataError, match=words):
        as_messages([{"role": "user", "content": [part]}])


def test_extra_fields_of_a_turn_are_kept_beside_its_tool_calls():
    call = {"function": {"name": "weather", "arguments": {"town": "Rome"}}}
    turn = {"role": "assistant", "content": "", "extra": {"source": "forum", "tool_calls": [call]}, "id": 3}
    (message,) = as_messages([turn])
    assert message.extra.pop("tool_calls")[0]["function"]["name"] == "weather"
    assert message.extra == {"source": "forum", "id": 3}
