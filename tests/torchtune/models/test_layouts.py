"""Layouts of our own against ``apply_chat_template`` of the same tokenizer, row by row."""

from pathlib import Path
from typing import Any

import pytest

from tests.torchtune.models.named_layouts import ROWS, Row
from tests.torchtune.tokenizers.chat_case import Turns
from tests.torchtune.tokenizers.chat_checks import expected_plain, messages_of, replaced, truth_of
from tests.torchtune.tokenizers.chat_conversations import conversations, exchange
from torchtune.tokenizers import StreamDecoder

COUNT = 60


@pytest.fixture(scope="module", params=ROWS, ids=lambda row: row.case.name)
def row(request: pytest.FixtureRequest) -> Row:
    return request.param


@pytest.fixture(scope="module")
def folder(row: Row, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(row.case.name)
    row.write(folder, row.case)
    return folder


@pytest.fixture
def ours(row: Row, folder: Path) -> Any:
    return row.ours(folder)


@pytest.fixture
def theirs(folder: Path) -> Any:
    """The tokenizer of ``transformers``, from the same folder."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder)


def turns_for(row: Row, turns: Turns) -> Turns:
    """The turns as the row's rules leave them."""

    def text(content: str) -> str:
        content = content.rstrip(" ") if row.rstrip else content
        return content or ("filled" if row.fill else "")

    if row.needs_system and turns[0]["role"] != "system":
        turns = [{"role": "system", "content": "Be short."}, *turns]
    ruled_turns = []
    for turn in turns:
        content = turn["content"]
        if not turn.get("tool_calls"):
            content = text(content)
        ruled_turns.append({**turn, "content": content})
    return ruled_turns


def ours_of(row: Row, turns: Turns) -> list[Any]:
    messages = messages_of(turns)
    for message in messages:
        message.role = row.roles.get(message.role, message.role)
    return messages


def test_ids_and_masks_of_conversations_are_as_published(row, folder, ours, theirs):
    parsing = None if row.parses is None else row.parses(folder)
    spelled = 0
    for name, messages, tools in conversations(row.case, COUNT):
        turns = turns_for(row, messages)
        text = "".join(piece for piece, _ in truth_of(row.case, turns, tools))
        assert theirs.apply_chat_template(turns, tools=tools, tokenize=False, **row.case.switches) == text, (
            f"wrong truth: {turns}"
        )
        expected = row.finish(expected_plain(row.case, turns, tools, theirs._tokenizer), ours)
        tool_entry = {} if tools is None else {"tools": tools}
        assert ours.tokenize_messages(ours_of(row, turns), **tool_entry) == expected, f"{name}: {turns}"
        reference_ids = theirs.apply_chat_template(turns, tools=tools, return_dict=False, **row.case.switches)
        parsed = row.finish((reference_ids, []), ours)[0]
        if replaced(turns, row.case.special, ["" for _ in row.case.special]) == turns:
            assert parsed == expected[0], f"{name}: {turns}"
            continue
        spelled += 1
        if parsing is not None:
            assert parsing.tokenize_messages(ours_of(row, turns))[0] == parsed, f"{name}: {turns}"
    assert spelled >= 5, "conversations whose texts spell control tokens"


def test_every_turn_trains_its_end(row, ours):
    tokens, mask = ours.tokenize_messages(ours_of(row, exchange("one", "two", "three", "four", "five", "six")))
    num_trained_runs = 0
    was_masked = True
    for masked in mask:
        num_trained_runs += was_masked and not masked
        was_masked = masked
    assert num_trained_runs == 3
    trained = [token for token, masked in zip(tokens, mask, strict=True) if not masked]
    ends = {*ours.stop_tokens, *(ours.special_tokens[end] for end in row.case.ends)}
    assert sum(token in ends for token in trained) == 3


def test_prompt_of_inference_leaves_the_last_turn_open(row, ours, theirs):
    for texts in (("one", "two", "three", ""), ("你好", "")):
        turns = turns_for(row, exchange(*texts))
        turns[-1]["content"] = ""
        prompt = ours({"messages": ours_of(row, turns)}, inference=True)["tokens"]
        expected = theirs.apply_chat_template(
            turns[:-1], add_generation_prompt=True, return_dict=False, **row.case.switches
        )
        assert prompt == expected
    with pytest.warns(FutureWarning, match="use add_end_tokens"):
        assert ours.tokenize_messages(ours_of(row, turns), add_eos=False)[0] == prompt


def test_long_row_is_cut_and_its_new_end_is_masked(row, ours):
    """The end that stands where the text was cut is not trained on."""
    messages = ours_of(row, exchange("red " * 8, "blue " * 8))
    tokens, mask = ours.tokenize_messages(messages)
    for ours.max_seq_len in (1, 4, len(tokens) - 7):
        length = ours.max_seq_len
        cut = tokens[:length]
        cut_mask = mask[:length]
        if row.case.name != "gemma":  # whose template has no end of the sequence
            cut[-1] = ours.eos_id
            cut_mask[-1] = True
        ours.truncation_type = "right"
        assert ours.tokenize_messages(messages) == (cut, cut_mask)
        ours.truncation_type = "left"
        assert ours.tokenize_messages(messages) == (tokens[-length:], mask[-length:])
        assert len(ours({"messages": messages}, inference=True)["tokens"]) == length


def test_decoding_token_by_token_gives_whole_characters(row, ours):
    texts = set()
    for _, turns, _ in conversations(row.case, COUNT):
        texts |= {turn["content"] for turn in turns}
    for text in texts:
        stream = StreamDecoder(ours)
        tokens = ours.encode(text, add_bos=False, add_eos=False)
        parts = [stream.put(token) for token in tokens]
        assert "".join(parts) + stream.end() == ours.decode(tokens), text
        assert not any("\ufffd" in part for part in parts), text
