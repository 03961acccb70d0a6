"""Layouts that are written turn by turn."""

import pytest

from tests.torchtune.models.tokenizer_files import write_bpe
from torchtune.data import Message
from torchtune.tokenizers import IM_END, IM_START, ChatMLTurns, tokenize_messages_no_special_tokens

END_OF_TEXT = "<|endoftext|>"


@pytest.fixture
def tokenizer(tmp_path):
    vocab, merges = write_bpe(tmp_path)
    return ChatMLTurns(
        vocab,
        merges,
        {END_OF_TEXT: 1000, IM_START: 1001, IM_END: 1002},
        pattern=r"\S+|\s+",
        bos_token=None,
        eos_token=END_OF_TEXT,
        pad_token=None,
        max_seq_len=None,
        prompt_template=None,
        truncation_type="right",
        parse_special_tokens=False,
    )


@pytest.mark.parametrize("is_masked", [False, True])
def test_end_of_a_chatml_conversation_is_trained_on_like_its_last_turn(tokenizer, is_masked):
    chat = [Message("user", "red?", masked=not is_masked), Message("assistant", "blue", masked=is_masked)]
    tokens, mask = tokenizer.tokenize_messages(chat)
    assert tokens[-1] == tokenizer.eos_id
    assert mask[-1] is is_masked
    open_tokens, open_mask = tokenizer.tokenize_messages(chat, add_end_tokens=False)
    assert (open_tokens, open_mask) == (tokens[:-1], mask[:-1])
    assert tokenizer.im_end_id not in open_tokens[-2:]


class Letters:
    """A tokenizer of letters."""

    max_seq_len = None
    stop_tokens = ()

    def encode(self, text, **_):
        return list(map(ord, text))


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        ({"bos_id": 1, "eos_id": 2}, [1, 97, 98, 2, 1, 99, 100, 2]),
        ({"bos_id": 1, "eos_id": 2, "is_open": True}, [1, 97, 98, 2, 1, 99, 100]),
        ({"bos_id": 1, "eos_id": 2, "begins_once": True}, [1, 97, 98, 2, 99, 100, 2]),
        ({"bos_id": 1}, [1, 97, 98, 1, 99, 100]),
        ({"eos_id": 2}, [97, 98, 2, 99, 100, 2]),
    ],
)
def test_answers_without_special_tokens_end_and_begin_as_asked(settings, tokens):
    turns = [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, "abcd", strict=True)]
    ids, mask = tokenize_messages_no_special_tokens(Letters(), turns, **settings)
    assert ids == tokens
    trained = [token for token, is_masked in zip(ids, mask, strict=True) if not is_masked]
    assert trained == [token for token in tokens if token in (98, 100, settings.get("eos_id"))]
