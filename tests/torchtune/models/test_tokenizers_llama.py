"""Llama's tokenizers: ids, layouts, masks."""

from pathlib import Path
from typing import Any

import pytest

from tests.torchtune.models.tokenizer_files import write_ranks, write_sentencepiece
from torchtune.data import DataError, Message, mask_messages
from torchtune.models.llama2._prompt_template import Llama2ChatTemplate
from torchtune.models.llama2._tokenizer import Llama2Tokenizer, llama2_tokenizer
from torchtune.models.llama3._tokenizer import LLAMA3_SPECIAL_TOKENS, Llama3Tokenizer, llama3_tokenizer
from torchtune.tokenizers import SentencePieceBaseTokenizer, StreamDecoder, TikTokenBaseTokenizer

CHAT = [
    Message("system", "You are a helpful assistant."),
    Message("user", "What is the sky?"),
    Message("assistant", "blue"),
    Message("user", "And the cat?"),
    Message("assistant", "small"),
]
mask_messages(CHAT, "train_on_assistant")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_ranks(tmp_path_factory.mktemp("llama3") / "tokenizer.model")


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_sentencepiece(tmp_path_factory.mktemp("llama2") / "tokenizer.model")


def parse_llama3(tokenizer: Llama3Tokenizer, text: str) -> list[int]:
    """Token ids of a layout that is written with its special tokens in it."""
    return tokenizer.tt_model.tt_model.encode(text, allowed_special="all")


LLAMA3_CHAT = (
    "<|begin_of_text|>"
    "<|start_header_id|>system<|end_header_id|>\n\nYou are a helpful assistant.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nWhat is the sky?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nblue<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nAnd the cat?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nsmall"
)


def test_llama3_special_tokens() -> None:
    assert len(LLAMA3_SPECIAL_TOKENS) == 257
    assert sorted(LLAMA3_SPECIAL_TOKENS.values()) == list(range(128000, 128257))
    assert LLAMA3_SPECIAL_TOKENS["<|eot_id|>"] == 128009
    assert LLAMA3_SPECIAL_TOKENS["<|reserved_special_token_2|>"] == 128013
    assert LLAMA3_SPECIAL_TOKENS["<|reserved_special_token_244|>"] == 128255


def test_llama3_layout(ranks: str) -> None:
    tokenizer = llama3_tokenizer(ranks)
    tokens, mask = tokenizer.tokenize_messages(CHAT)
    assert tokens == parse_llama3(tokenizer, LLAMA3_CHAT + "<|eot_id|><|end_of_text|>")
    trained = tokenizer.decode([t for t, m in zip(tokens, mask, strict=True) if not m], False, False)
    assert trained == "".join(
        f"<|start_header_id|>assistant<|end_header_id|>\n\n{text}<|eot_id|>" for text in ("blue", "small")
    )
    assert mask[0] is True
    assert mask[-1] is True
    assert tokenizer.stop_tokens == [128001, 128009, 128008]
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (128000, 128001, 128004)
    assert tokenizer.vocab_size == 128256


def test_llama3_inference_leaves_the_last_turn_open(ranks: str) -> None:
    tokenizer = llama3_tokenizer(ranks)
    sample = tokenizer({"messages": CHAT, "other": 1}, inference=True)
    assert sample.keys() == {"tokens", "mask", "other"}
    assert sample["tokens"] == parse_llama3(tokenizer, LLAMA3_CHAT)
    assert sample["tokens"] == tokenizer.tokenize_messages(CHAT, add_end_tokens=False)[0]
    with pytest.warns(FutureWarning, match="use add_end_tokens"):
        assert tokenizer.tokenize_messages(CHAT, add_eos=False)[0] == sample["tokens"]


def test_llama3_tools_and_images(ranks: str) -> None:
    tokenizer = Llama3Tokenizer(ranks)
    messages = [
        Message("user", [{"type": "image", "content": "x"}, {"type": "text", "content": " What is it? "}]),
        Message("assistant", "look()", ipython=True, eot=False),
        Message("ipython", "a cat", eot=False),
        Message("assistant", "cat"),
    ]
    expected = (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n<|image|>What is it?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n<|python_tag|>look()<|eom_id|>"
        "<|start_header_id|>ipython<|end_header_id|>\n\na cat<|eom_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\ncat<|eot_id|><|end_of_text|>"
    )
    assert tokenizer.tokenize_messages(messages)[0] == parse_llama3(tokenizer, expected)
    # A row would have the token of the image, but not the image.
    with pytest.raises(DataError, match="Llama3Tokenizer takes text only: use the transform of a vision model"):
        tokenizer({"messages": messages})


def test_llama3_decoding(ranks: str) -> None:
    tokenizer = Llama3Tokenizer(ranks)
    tokens = parse_llama3(tokenizer, LLAMA3_CHAT + "<|eot_id|><|end_of_text|>red")
    assert tokenizer.decode(tokens) == "You are a helpful assistant.What is the sky?blueAnd the cat?small"
    assert tokenizer.decode(tokens, truncate_at_eos=False).endswith("smallred")
    assert tokenizer.decode(tokens, skip_special_tokens=False) == LLAMA3_CHAT + "<|eot_id|>"


def test_llama3_text_cannot_forge_special_tokens(ranks: str) -> None:
    tokenizer = Llama3Tokenizer(ranks)
    ids = tokenizer.encode("a<|eot_id|>b", add_bos=True, add_eos=True)
    assert [i for i in ids if i >= 128000] == [128000, 128001]
    assert tokenizer.encode("", add_bos=True, add_eos=True) == []


@pytest.mark.parametrize("length", [1, 2, 7, 20])
def test_llama3_truncation(ranks: str, length: int) -> None:
    whole, mask = Llama3Tokenizer(ranks).tokenize_messages(CHAT)
    tokens, cut = Llama3Tokenizer(ranks, max_seq_len=length).tokenize_messages(CHAT)
    assert tokens == [*whole[: length - 1], 128001]
    assert cut == [*mask[: length - 1], True]
    tokens, cut = Llama3Tokenizer(ranks, max_seq_len=length, truncation_type="left").tokenize_messages(CHAT)
    assert (tokens, cut) == (whole[-length:], mask[-length:])
    last = [token for token, hidden in zip(whole, mask, strict=True) if not hidden][-1]
    tokens, cut = Llama3Tokenizer(ranks, max_seq_len=len(whole) - 1).tokenize_messages(CHAT)
    assert (tokens, cut) == (whole[:-1], mask[:-1]), "only the unlabelled end of the sequence is cut"
    assert (tokens[-1], cut[-1]) == (last, False) == (128009, False)
    assert len(Llama3Tokenizer(ranks, max_seq_len=length)({"messages": CHAT}, inference=True)["tokens"]) == length


def test_llama3_prompt_template(ranks: str) -> None:
    tokenizer = llama3_tokenizer(ranks, prompt_template="torchtune.data.QuestionAnswerTemplate")
    text = tokenizer.decode(tokenizer.tokenize_messages(CHAT[1:3])[0], skip_special_tokens=False)
    assert "\n\nQuestion:What is the sky?Answer:<|eot_id|>" in text
    plain = llama3_tokenizer(ranks, prompt_template={"user": ["x ", " y"]})
    assert "xWhat is the sky?y" in plain.decode(plain.tokenize_messages(CHAT[1:3])[0])


def test_llama3_custom_special_tokens(ranks: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"lacks .*<\|eot_id\|>"):
        Llama3Tokenizer(ranks, special_tokens={"<|begin_of_text|>": 500})
    names = [
        f"<|{n}|>" for n in "begin_of_text end_of_text start_header_id end_header_id eom_id eot_id python_tag".split()
    ]
    import json

    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps({"added_tokens": [{"content": n, "id": 500 + i} for i, n in enumerate(names)]}))
    tokenizer = llama3_tokenizer(ranks, special_tokens_path=str(file))
    assert tokenizer.stop_tokens == [501, 505, 504]
    assert tokenizer.pad_id == 501
    assert tokenizer.vocab_size == 507


def test_long_runs_are_encoded_in_pieces(ranks: str) -> None:
    tokenizer = Llama3Tokenizer(ranks)
    for text in ("a" * 60_000, " " * 60_000, "ab " * 200_000):
        assert tokenizer.decode(tokenizer.encode(text, False, False)) == text


def test_broken_rank_files(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.model"
    with pytest.raises(DataError, match="There is no tokenizer file"):
        Llama3Tokenizer(str(file))
    file.write_text("")
    with pytest.raises(DataError, match="is empty"):
        Llama3Tokenizer(str(file))
    file.write_text('YQ== 0\n{"version": 1}\n')
    with pytest.raises(DataError, match="broken at line 2"):
        Llama3Tokenizer(str(file))
    with pytest.raises(DataError, match="is a folder"):
        Llama3Tokenizer(str(tmp_path))


def test_tiktoken_base(ranks: str) -> None:
    tokenizer = TikTokenBaseTokenizer(ranks, "x", r"\w+|\s+|[^\w\s]+", 1000, 1001, {"<a>": 1000, "<b>": 1001})
    assert tokenizer.encode("red")[0] == 1000
    assert tokenizer.decode(tokenizer.encode("red blue")[1:]) == "red blue"
    assert tokenizer.vocab_size == 1002


@pytest.mark.parametrize("text", ["你好 Привет 🙂 naïve", "plain", "", "🙂"])
def test_streaming_never_gives_half_a_character(ranks: str, text: str) -> None:
    tokenizer = Llama3Tokenizer(ranks)
    stream = StreamDecoder(tokenizer)
    parts = [stream.put(token) for token in tokenizer.encode(text, False, False)]
    assert "".join(parts) == text
    assert all("\ufffd" not in part for part in parts)
    assert stream.end() == ""
    stream.put(tokenizer.encode("🙂", False, False)[0])
    assert set(stream.end()) == {"\ufffd"}


# Llama 2


def tags(messages: list[Message]) -> str:
    return "".join(message.text_content for message in messages)


def test_llama2_template_says_the_system_prompt_once() -> None:
    formatted = Llama2ChatTemplate()(CHAT)
    assert [message.role for message in formatted] == ["user", "assistant", "user", "assistant"]
    assert tags(formatted) == (
        "[INST] <<SYS>>\nYou are a helpful assistant.\n<</SYS>>\n\nWhat is the sky? [/INST] blue"
        "[INST] And the cat? [/INST] small"
    )
    assert [message.masked for message in formatted] == [True, False, True, False]


def test_llama2_layout(pieces: str) -> None:
    tokenizer = llama2_tokenizer(pieces)
    tokens, mask = tokenizer.tokenize_messages(CHAT)
    bos, eos = 1, 2
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.stop_tokens) == (1, 2, 0, [2])
    assert tokens[0] == bos
    assert tokens.count(bos) == tokens.count(eos) == 2
    assert tokens[-1] == eos
    turns, turn = [], []
    for token in tokens:
        turn.append(token)
        if token == eos:
            turns.append(tokenizer.decode(turn))
            turn = []
    assert turns == [
        "[INST] <<SYS>>\nYou are a helpful assistant.\n<</SYS>>\n\nWhat is the sky? [/INST] blue",
        "[INST] And the cat? [/INST] small",
    ]
    trained = [token for token, masked in zip(tokens, mask, strict=True) if not masked]
    blue, small = (tokenizer.encode(text, add_bos=False, add_eos=True) for text in ("blue", "small"))
    assert trained == blue + small


def test_llama2_pieces_join_as_one_text(pieces: str) -> None:
    """Encoding part by part gives what encoding the whole turn gives."""
    tokenizer = Llama2Tokenizer(pieces)
    tokens, _ = tokenizer.tokenize_messages(CHAT[3:4], add_start_tokens=False, add_end_tokens=False)
    assert tokens == tokenizer.encode("[INST] And the cat? [/INST]", add_bos=False, add_eos=False)


def test_llama2_inference_and_truncation(pieces: str) -> None:
    tokenizer = Llama2Tokenizer(pieces)
    prompt = tokenizer({"messages": [*CHAT[:2], Message("assistant", "")]}, inference=True)["tokens"]
    assert tokenizer.eos_id not in prompt
    assert tokenizer.decode(prompt).endswith("[/INST]")
    whole, mask = tokenizer.tokenize_messages(CHAT)
    for length in (3, 10, 30):
        tokens, cut = Llama2Tokenizer(pieces, max_seq_len=length).tokenize_messages(CHAT)
        assert tokens == [*whole[: length - 1], 2]
        assert cut == [*mask[: length - 1], True], "the end that stands where the text was cut is not trained on"


def test_sentencepiece_base(pieces: str, tmp_path: Path) -> None:
    tokenizer = SentencePieceBaseTokenizer(pieces)
    assert tokenizer.encode("red cat") == [1, *tokenizer.encode("red cat", False, False), 2]
    assert tokenizer.decode(tokenizer.encode("red cat")) == "red cat"
    assert tokenizer.vocab_size == tokenizer.spm_model.vocab_size()
    joined = tokenizer.encode("red", False, False) + tokenizer.encode(
        " cat", False, False, trim_leading_whitespace=True
    )
    assert joined == tokenizer.encode("red cat", False, False)
    with pytest.raises(DataError, match="There is no tokenizer file"):
        SentencePieceBaseTokenizer(str(tmp_path / "no.model"))
    (tmp_path / "bad.model").write_bytes(b"nothing of the kind")
    with pytest.raises(DataError, match="is not a SentencePiece model"):
        SentencePieceBaseTokenizer(str(tmp_path / "bad.model"))


def test_text_tokenizers_refuse_what_they_have_no_layout_for(pieces: str, ranks: str) -> None:
    call: Any = Message("assistant", "", extra={"tool_calls": [{"function": {"name": "f", "arguments": {}}}]})
    for tokenizer in (Llama2Tokenizer(pieces), Llama3Tokenizer(ranks)):
        with pytest.raises(DataError, match="tool_calls"):
            tokenizer.tokenize_messages([CHAT[1], call])
    with pytest.raises(DataError, match="image"):
        Llama2Tokenizer(pieces).tokenize_messages([Message("user", [{"type": "image", "content": 1}])])
