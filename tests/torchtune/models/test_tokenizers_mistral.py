"""Mistral's tokenizers with control tokens: versions, tools, files."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.torchtune.models.tokenizer_files import write_ranks, write_sentencepiece, write_tekken
from tests.torchtune.tokenizers.chat_conversations import TOOLS, call
from tests.torchtune.tokenizers.chat_templates_mistral import CONTROL
from torchtune.data import DataError, Message, mask_messages
from torchtune.models.mistral import MistralInstructTokenizer, mistral_instruct_tokenizer
from torchtune.tokenizers import TekkenTokenizer
from torchtune.tokenizers._patterns import CL100K_PATTERN

CHAT = [Message("system", "Be short."), Message("user", "red?"), Message("assistant", "a colour")]
mask_messages(CHAT, "train_on_assistant")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tekken")
    for version in ("v3", "v7", "v11", "vx"):
        write_tekken(folder / f"{version}.json", CONTROL, version, pattern=CL100K_PATTERN)
    write_sentencepiece(folder / "first.model")
    write_sentencepiece(folder / "third.model", control_symbols=CONTROL[3:10])
    return folder


def shown(tokenizer: MistralInstructTokenizer, messages: list[Message], **settings: Any) -> str:
    tokens, _ = tokenizer.tokenize_messages(messages, **settings)
    return tokenizer.base.decode(tokens, skip_special_tokens=False)


def test_versions_of_the_layout(folder: Path) -> None:
    third, seventh, later = (mistral_instruct_tokenizer(str(folder / f"{v}.json")) for v in ("v3", "v7", "v11"))
    assert (third.version, seventh.version, later.version) == (3, 7, 11)
    assert shown(third, CHAT) == "<s>[INST]Be short.\n\nred?[/INST]a colour</s>"
    with_turn = "<s>[SYSTEM_PROMPT]Be short.[/SYSTEM_PROMPT][INST]red?[/INST]a colour</s>"
    assert shown(seventh, CHAT) == shown(later, CHAT) == with_turn
    assert shown(mistral_instruct_tokenizer(str(folder / "v3.json"), version=7), CHAT) == with_turn
    pieces = mistral_instruct_tokenizer(str(folder / "third.model"))
    assert pieces.version == 3
    assert pieces.decode(pieces.tokenize_messages(CHAT)[0]) == "Be short.\n\nred? a colour"


def test_tools(folder: Path) -> None:
    asked = Message("user", "x")
    called = Message("assistant", "", extra={"tool_calls": [call()]})
    answered = [asked, called, Message("tool", "rain", extra={"tool_call_id": "call00000"}), Message("assistant", "ok")]
    third, seventh, later = (mistral_instruct_tokenizer(str(folder / f"{v}.json")) for v in ("v3", "v7", "v11"))
    sample = {"messages": answered, "tools": TOOLS, "row": 1}
    assert third(dict(sample))["tokens"] == third.tokenize_messages(answered, tools=TOOLS)[0]
    assert shown(third, answered).endswith(
        '[TOOL_RESULTS]{"content": "rain", "call_id": "call00000"}[/TOOL_RESULTS]ok</s>'
    )
    assert shown(seventh, answered).endswith("[TOOL_RESULTS]call00000[TOOL_CONTENT]rain[/TOOL_RESULTS]ok</s>")
    as_text = Message("assistant", "", extra={"tool_calls": [{"id": "i", "name": "f", "arguments": '{"a": 1}'}]})
    written = '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "i"}]</s>'
    assert shown(third, [asked, as_text]) == f"<s>[INST]x[/INST]{written}"
    both = Message("assistant", "wait", extra=as_text.extra)
    assert shown(seventh, [asked, both]) == f"<s>[INST]x[/INST]wait{written}"
    with pytest.raises(DataError, match="both text and tool_calls before version 7"):
        third.tokenize_messages([asked, both])
    with pytest.raises(DataError, match="no layout here in version 11: use the checkpoint's own chat template"):
        later.tokenize_messages(answered)
    with pytest.raises(DataError, match="needs the 'tool_call_id'"):
        third.tokenize_messages([asked, called, Message("tool", "rain")])
    with pytest.raises(DataError, match="needs the 'id' of every tool call"):
        third.tokenize_messages([asked, Message("assistant", "", extra={"tool_calls": [{"name": "f"}]})])
    with pytest.raises(DataError, match="holds an image"):
        third.tokenize_messages([Message("user", [{"type": "image", "content": 1}])])


def test_truncation_and_open_turns(folder: Path) -> None:
    path = str(folder / "v3.json")
    whole, mask = mistral_instruct_tokenizer(path).tokenize_messages(CHAT)
    assert mask[whole.index(4) + 1 :] == [False] * (len(mask) - whole.index(4) - 1)
    for length in (3, len(whole) - 1):
        cut = mistral_instruct_tokenizer(path, max_seq_len=length).tokenize_messages(CHAT)
        assert cut == ([*whole[: length - 1], 2], [*mask[: length - 1], True])
    left = mistral_instruct_tokenizer(path, max_seq_len=4, truncation_type="left").tokenize_messages(CHAT)[0]
    assert left == whole[-4:]
    assert mistral_instruct_tokenizer(path)({"messages": CHAT}, inference=True)["tokens"] == whole[:-1]
    tokenizer = mistral_instruct_tokenizer(path, prompt_template={"user": ["Q: ", ""]})
    assert "[INST]Be short.\n\nQ: red?[/INST]" in shown(tokenizer, CHAT)


def test_tekken_files(folder: Path, tmp_path: Path) -> None:
    tokenizer = TekkenTokenizer(str(folder / "v7.json"))
    assert tokenizer.vocab_size == 400 + len(CONTROL)
    ids = tokenizer.encode("red 你好 [INST]</s>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert min(ids[1:-1]) >= len(CONTROL)
    assert tokenizer.decode(ids) == "red 你好 [INST]</s>"
    assert max(tokenizer.encode("beyond the model", False, False)) < tokenizer.vocab_size
    bad = tmp_path / "tokenizer.json"
    bad.write_text(json.dumps({"tekken": {}}))
    with pytest.raises(DataError, match=r"is not a tekken.json \(KeyError: 'config'\)"):
        mistral_instruct_tokenizer(str(bad))
    with pytest.raises(DataError, match="There is no tokenizer file"):
        mistral_instruct_tokenizer(str(tmp_path / "tekken.json"))
    with pytest.raises(DataError, match=r"has no control tokens \[INST\], .*use mistral_tokenizer for the first"):
        mistral_instruct_tokenizer(str(folder / "first.model"))
    with pytest.raises(DataError, match=r"has no control tokens \[SYSTEM_PROMPT\]"):
        mistral_instruct_tokenizer(str(folder / "third.model"), version=7)
    with pytest.raises(DataError, match="is of version 'vx': set version"):
        mistral_instruct_tokenizer(str(folder / "vx.json"))
    with pytest.raises(DataError, match="is a file of tiktoken's ranks, not a SentencePiece model"):
        mistral_instruct_tokenizer(write_ranks(tmp_path / "tokenizer.model"))
