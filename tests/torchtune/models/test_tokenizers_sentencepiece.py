"""Mistral's and Gemma's tokenizers: ids, layouts, masks."""

import random
from pathlib import Path

import pytest

from tests.torchtune.models.tokenizer_files import write_sentencepiece
from torchtune.data import DataError, Message, mask_messages
from torchtune.models.gemma import GemmaTokenizer, gemma_tokenizer
from torchtune.models.mistral import MistralChatTemplate, MistralTokenizer, mistral_tokenizer
from torchtune.tokenizers import StreamDecoder

TEXTS = [
    "What is the sky?", "blue", "red green\n\nblue", "Grüße naïve", "你好 Привет", "🙂🙂", "a<s>b</s>c", "x [INST] y",
    "<start_of_turn>user", "a<end_of_turn>b<end_of_turn>", "1 < 2", "<bos><eos>",
]  # fmt: skip
GEMMA_LAYOUT = {
    "user": ("<start_of_turn>user\n", "<end_of_turn>\n"),
    "assistant": ("<start_of_turn>model\n", "<end_of_turn>\n"),
}


def exchanges(seed: int) -> list[tuple[str, str]]:
    rng = random.Random(seed)
    return [(rng.choice(TEXTS), rng.choice(TEXTS)) for _ in range(rng.randint(1, 3))]


def conversation(pairs: list[tuple[str, str]]) -> list[Message]:
    messages = [Message(role, text) for pair in pairs for role, text in zip(("user", "assistant"), pair, strict=True)]
    mask_messages(messages, "train_on_assistant")
    return messages


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_sentencepiece(tmp_path_factory.mktemp("mistral") / "tokenizer.model")


@pytest.fixture(scope="module")
def gemma_pieces(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_sentencepiece(
        tmp_path_factory.mktemp("gemma") / "tokenizer.model",
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        user_defined_symbols=["<start_of_turn>", "<end_of_turn>"],
        add_dummy_prefix=False,
    )


@pytest.mark.parametrize("seed", range(50))
def test_mistral_ids_and_mask(pieces: str, seed: int) -> None:
    """Every exchange is what the model's file makes of its whole text, between the beginning and the end."""
    tokenizer = MistralTokenizer(pieces)
    expected, mask = [], []
    for question, answer in exchanges(seed):
        prompt = tokenizer.encode(f"[INST] {question} [/INST]", add_eos=False)
        whole = tokenizer.encode(f"[INST] {question} [/INST] {answer}")
        assert whole[: len(prompt)] == prompt
        expected += whole
        mask += [True] * len(prompt) + [False] * (len(whole) - len(prompt))
    assert tokenizer.tokenize_messages(conversation(exchanges(seed))) == (expected, mask)


def test_mistral_end_of_turn_is_trained_and_inference_is_open(pieces: str) -> None:
    tokenizer = mistral_tokenizer(pieces)
    messages = conversation([("one", "two"), ("three", "four")])
    tokens, mask = tokenizer.tokenize_messages(messages)
    ends = [i for i, token in enumerate(tokens) if token == tokenizer.eos_id]
    assert len(ends) == 2
    assert not any(mask[i] for i in ends)
    open_turn = tokenizer({"messages": messages}, inference=True)["tokens"]
    assert open_turn == tokens[:-1], "earlier turns end as in training, the last one is open"
    prompt = tokenizer({"messages": conversation([("one", "")])}, inference=True)["tokens"]
    assert prompt == tokenizer.encode("[INST] one [/INST]", add_eos=False)
    with pytest.warns(FutureWarning, match="use add_end_tokens"):
        assert tokenizer.tokenize_messages(messages, add_eos=False)[0] == open_turn
    short = MistralTokenizer(pieces, max_seq_len=4).tokenize_messages(messages)
    assert short == ([*tokens[:3], tokenizer.eos_id], [True, True, True, True])


def test_mistral_has_no_system_turn(pieces: str) -> None:
    with pytest.raises(DataError, match="no system turn"):
        MistralTokenizer(pieces).tokenize_messages([Message("system", "x"), Message("user", "y")])
    template = mistral_tokenizer(pieces, prompt_template="torchtune.models.mistral.MistralChatTemplate").prompt_template
    assert isinstance(template, MistralChatTemplate)


@pytest.mark.parametrize("seed", range(50))
def test_gemma_ids_and_mask(gemma_pieces: str, seed: int) -> None:
    """The texts follow each other; without a layout of its own the end of the turn is the end of the sequence."""
    tokenizer = GemmaTokenizer(gemma_pieces)
    tokens, mask = tokenizer.tokenize_messages(conversation(exchanges(seed)))
    turns = exchanges(seed)
    assert (tokens[0], tokens[-1], mask[0], mask[-1]) == (2, 1, True, False)
    assert tokens.count(1) == tokens.count(2) == len(turns)
    assert tokenizer.decode(tokens) == "".join(question + answer for question, answer in turns)
    trained = [token for token, masked in zip(tokens, mask, strict=True) if not masked]
    assert tokenizer.decode(trained) == "".join(answer for _, answer in turns)


@pytest.mark.parametrize("seed", range(50))
def test_gemma_layout(gemma_pieces: str, seed: int) -> None:
    """The markers of a template are control tokens, those in a turn's text are not."""
    tokenizer = gemma_tokenizer(gemma_pieces, prompt_template=GEMMA_LAYOUT)
    start, end = tokenizer.encode("<start_of_turn><end_of_turn>", False, False)
    turns = exchanges(seed)
    tokens, mask = tokenizer.tokenize_messages(conversation(turns))
    assert tokens.count(start) == tokens.count(end) == 2 * len(turns)
    assert [mask[i] for i, token in enumerate(tokens) if token == end] == [True, False] * len(turns)
    assert tokenizer.decode(tokens) == "".join(
        f"<start_of_turn>user\n{q}<end_of_turn>\n<start_of_turn>model\n{a}<end_of_turn>\n" for q, a in turns
    )


def test_gemma_chat_template(gemma_pieces: str, pieces: str) -> None:
    """Beside what the table of layouts compares."""
    path = "torchtune.models.gemma.GemmaChatTemplate"
    tokenizer = gemma_tokenizer(gemma_pieces, prompt_template=path)
    (end,) = tokenizer.encode("<end_of_turn>", False, False)
    assert tokenizer.stop_tokens == [end, 1]
    begun = tokenizer({"messages": [Message("user", "one"), Message("assistant", " two ")]}, inference=True)["tokens"]
    assert tokenizer.decode(begun).endswith("<start_of_turn>model\ntwo")
    document = tokenizer.encode_text("one <end_of_turn> two")
    assert (document[0], document[-1], document.count(end)) == (tokenizer.bos_id, tokenizer.eos_id, 0)
    assert tokenizer.decode(document) == "one <end_of_turn> two"
    forged = [Message("user", " <end_of_turn> "), Message("assistant", "x")]
    assert tokenizer.tokenize_messages(forged)[0].count(end) == 2
    for message, what in (
        (Message("tool", "x"), "a turn of 'tool'"),
        (Message("user", [{"type": "image"}]), "an image"),
    ):
        with pytest.raises(DataError, match=f"no place for {what}"):
            tokenizer.tokenize_messages([message])
    with pytest.raises(DataError, match="has no token <end_of_turn>, which its template needs"):
        gemma_tokenizer(pieces, prompt_template=path)


def test_gemma_files(gemma_pieces: str, tmp_path: Path) -> None:
    tokenizer = gemma_tokenizer(gemma_pieces, max_seq_len=5)
    assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.bos_id, tokenizer.stop_tokens) == (0, 1, 2, [1])
    assert len(tokenizer({"messages": conversation([("one two three", "four")])})["tokens"]) == 5
    with pytest.raises(DataError, match="There is no tokenizer file"):
        gemma_tokenizer(str(tmp_path / "none.model"))


@pytest.mark.parametrize("text", TEXTS)
def test_streaming_never_gives_half_a_character(gemma_pieces: str, pieces: str, text: str) -> None:
    for tokenizer in (GemmaTokenizer(gemma_pieces), MistralTokenizer(pieces)):
        stream = StreamDecoder(tokenizer)
        parts = [stream.put(token) for token in tokenizer.encode(text, False, False)]
        assert "".join(parts) == text
        assert all("\ufffd" not in part for part in parts)
