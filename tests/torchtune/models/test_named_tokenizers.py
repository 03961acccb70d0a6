"""Tokenizers of the families, beside what the table of layouts compares: ids, tools, images, decoding, files."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.torchtune.models.tokenizer_files import write_bpe, write_ranks, write_sentencepiece, write_tekken
from tests.torchtune.tokenizers.chat_conversations import TOOLS, call
from tests.torchtune.tokenizers.chat_templates_mistral import CONTROL
from torchtune.data import ChatMLTemplate, DataError, Message, mask_messages
from torchtune.models.gemma import GemmaChatTemplate, GemmaTokenizer, gemma_tokenizer
from torchtune.models.llama2 import Llama2Tokenizer
from torchtune.models.llama3 import LLAMA3_SPECIAL_TOKENS, Llama3Tokenizer, llama3_tokenizer
from torchtune.models.mistral import (
    MistralChatTemplate,
    MistralInstructTokenizer,
    MistralTokenizer,
    mistral_instruct_tokenizer,
    mistral_tokenizer,
)
from torchtune.models.phi3 import PHI3_SPECIAL_TOKENS, Phi3MiniTokenizer
from torchtune.models.phi4 import PHI4_SPECIAL_TOKENS, Phi4Tokenizer, phi4_tokenizer
from torchtune.models.qwen2 import QWEN2_SPECIAL_TOKENS, Qwen2Tokenizer, qwen2_tokenizer
from torchtune.models.qwen2_5 import QWEN2_5_SPECIAL_TOKENS, Qwen2_5Tokenizer
from torchtune.models.qwen3 import QWEN3_SPECIAL_TOKENS, Qwen3Tokenizer, qwen3_tokenizer
from torchtune.tokenizers import (
    CL100K_PATTERN,
    GPT2BaseTokenizer,
    SentencePieceBaseTokenizer,
    StreamDecoder,
    TekkenTokenizer,
    TikTokenBaseTokenizer,
)

CHAT = [Message("system", "Be short."), Message("user", "red?"), Message("assistant", "a colour")]
mask_messages(CHAT, "train_on_assistant")
IMAGE = Message("user", [{"type": "image", "content": 1}])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizers")
    for version in ("v3", "v7", "v11", "vx"):
        write_tekken(folder / f"{version}.json", CONTROL, version, pattern=CL100K_PATTERN)
    write_sentencepiece(folder / "third.model", control_symbols=CONTROL[3:10])
    ids = {"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3}
    markers = ["<start_of_turn>", "<end_of_turn>"]
    write_sentencepiece(folder / "gemma.model", user_defined_symbols=markers, add_dummy_prefix=False, **ids)
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> str:
    return write_ranks(folder / "ranks.model")


@pytest.fixture(scope="module")
def pieces(folder: Path) -> str:
    return write_sentencepiece(folder / "pieces.model")


@pytest.fixture(scope="module")
def merges(folder: Path) -> tuple[str, str]:
    return write_bpe(folder)


def text_of(tokenizer: Any, messages: list[Message], **settings: Any) -> str:
    """The text of a conversation, with its special tokens."""
    tokens, _ = tokenizer.tokenize_messages(messages, **settings)
    base = tokenizer.base if isinstance(tokenizer, MistralInstructTokenizer) else tokenizer
    return base.decode(tokens, skip_special_tokens=False)


def write_special(path: Path, names: list[str], first: int) -> str:
    entries = [{"content": name, "id": first + i} for i, name in enumerate(names)]
    path.write_text(json.dumps({"added_tokens": entries}))
    return str(path)


@pytest.mark.parametrize(
    ("table", "first", "last", "known"),
    [
        (LLAMA3_SPECIAL_TOKENS, 128000, 128256, {"<|eot_id|>": 128009, "<|reserved_special_token_2|>": 128013}),
        (PHI3_SPECIAL_TOKENS, 32000, 32010, {"<|end|>": 32007}),
        (
            PHI4_SPECIAL_TOKENS,
            100256,
            100351,
            {f"<|dummy_{i}|>": 100256 + j for i, j in ((0, 0), (1, 5), (3, 7), (4, 11), (12, 19), (13, 21), (87, 95))},
        ),
        (QWEN2_SPECIAL_TOKENS, 151643, 151645, {"<|im_end|>": 151645}),
        (QWEN2_5_SPECIAL_TOKENS, 151643, 151664, {"<tool_call>": 151657}),
        (QWEN3_SPECIAL_TOKENS, 151643, 151668, {"<think>": 151667}),
    ],
)
def test_special_tokens_have_their_published_ids(table, first, last, known):
    assert sorted(table.values()) == list(range(first, last + 1))
    assert {name: table[name] for name in known} == known


def test_special_ids_and_vocabulary_sizes_are_the_published_ones(folder, ranks, pieces, merges):
    """Beginning, end, padding and where answers end; and the rows of an embedding."""
    for tokenizer, ids, stop, size in (
        (Llama3Tokenizer(ranks), (128000, 128001, 128004), [128001, 128009, 128008], 128256),
        (Llama2Tokenizer(pieces), (1, 2, 0), [2], None),
        (GemmaTokenizer(str(folder / "gemma.model")), (2, 1, 0), [1], None),
        (Phi3MiniTokenizer(pieces), (1, 32000, 32000), [32000, 32007], 32011),
        (phi4_tokenizer(*merges), (100257, 100265, 100349), [100265], 100352),
        (Qwen2Tokenizer(*merges), (None, 151645, 151643), [151645, 151643], 151646),
        (Qwen2_5Tokenizer(*merges), (None, 151645, 151643), [151645, 151643], 151665),
        (Qwen3Tokenizer(*merges), (None, 151645, 151643), [151645, 151643], 151669),
    ):
        assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == ids
        assert tokenizer.stop_tokens == stop
        assert size is None or tokenizer.vocab_size == size
        text = tokenizer.encode("red 你好")
        assert text == [*[ids[0]] * (ids[0] is not None), *tokenizer.encode("red 你好", False, False), ids[1]]
        assert tokenizer.decode(text).removesuffix("<|im_end|>") == "red 你好"


# Llama


def test_llama3_writes_tool_calls_answers_and_images(ranks):
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
    tokens = tokenizer.tokenize_messages(messages)[0]
    assert tokens == tokenizer.tt_model.tt_model.encode(expected, allowed_special="all")
    assert tokenizer.decode(tokens) == "What is it?look()a catcat"
    assert tokenizer.decode([*tokens, *tokenizer.encode("red", False, False)], truncate_at_eos=False).endswith("catred")
    assert tokenizer.decode(tokens, skip_special_tokens=False) == expected.removesuffix("<|end_of_text|>")
    # A row would have the token of the image, but not the image.
    with pytest.raises(DataError, match="Llama3Tokenizer takes text only"):
        tokenizer({"messages": messages})


def test_llama3_cuts_an_end_that_is_not_trained_on_first(ranks):
    untruncated, mask = Llama3Tokenizer(ranks).tokenize_messages(CHAT)
    assert Llama3Tokenizer(ranks, max_seq_len=len(untruncated) - 1).tokenize_messages(CHAT) == (
        untruncated[:-1],
        mask[:-1],
    )
    assert (untruncated[-2], mask[-2]) == (128009, False)
    assert Llama3Tokenizer(ranks).encode("", add_bos=True, add_eos=True) == []


def test_llama3_takes_a_prompt_template_and_other_special_tokens(ranks, tmp_path):
    tokenizer = llama3_tokenizer(ranks, prompt_template="torchtune.data.QuestionAnswerTemplate")
    assert "\n\nQuestion:red?Answer:<|eot_id|>" in text_of(tokenizer, CHAT)
    assert "xred?y" in text_of(llama3_tokenizer(ranks, prompt_template={"user": ["x ", " y"]}), CHAT)
    with pytest.raises(DataError, match=r"lacks .*<\|eot_id\|>"):
        Llama3Tokenizer(ranks, special_tokens={"<|begin_of_text|>": 500})
    names = "begin_of_text end_of_text start_header_id end_header_id eom_id eot_id python_tag".split()
    special = write_special(tmp_path / "tokenizer.json", [f"<|{name}|>" for name in names], 500)
    tokenizer = llama3_tokenizer(ranks, special_tokens_path=special)
    assert (tokenizer.stop_tokens, tokenizer.pad_id, tokenizer.vocab_size) == ([501, 505, 504], 501, 507)


def test_text_longer_than_the_limit_of_the_encoder_comes_back(ranks):
    tokenizer = Llama3Tokenizer(ranks)
    for text in ("a" * 60_000, " " * 60_000, "ab " * 200_000):
        assert tokenizer.decode(tokenizer.encode(text, False, False)) == text


def test_stream_that_ends_inside_a_character_ends_with_a_replacement(ranks):
    tokenizer = Llama3Tokenizer(ranks)
    stream = StreamDecoder(tokenizer)
    assert stream.put(tokenizer.encode("🙂", False, False)[0]) == ""
    assert set(stream.end()) == {"\ufffd"}


def test_tool_calls_and_images_without_a_layout_are_refused(pieces, ranks):
    called = Message("assistant", "", extra={"tool_calls": [{"function": {"name": "f", "arguments": {}}}]})
    for tokenizer in (Llama2Tokenizer(pieces), Llama3Tokenizer(ranks)):
        with pytest.raises(DataError, match="tool_calls"):
            tokenizer.tokenize_messages([CHAT[1], called])
    answer = Message("assistant", "I look.", extra=called.extra)  # trained without the call
    for tokenizer in (Phi3MiniTokenizer(pieces), Llama3Tokenizer(ranks)):
        with pytest.raises(DataError, match="tool_calls"):
            tokenizer.tokenize_messages([CHAT[1], answer])
        masked = Message("assistant", "I look.", masked=True, extra=called.extra)
        assert all(tokenizer.tokenize_messages([CHAT[1], masked, CHAT[1]])[1][:4])
    for tokenizer in (Llama2Tokenizer(pieces), Phi3MiniTokenizer(pieces)):
        with pytest.raises(DataError, match="image"):
            tokenizer.tokenize_messages([IMAGE])


# Mistral


def test_mistral_has_no_system_turn(pieces):
    with pytest.raises(DataError, match="no system turn"):
        MistralTokenizer(pieces).tokenize_messages(CHAT)
    template = mistral_tokenizer(pieces, prompt_template="torchtune.models.mistral.MistralChatTemplate").prompt_template
    assert isinstance(template, MistralChatTemplate)


def test_version_of_a_mistral_file_chooses_the_layout(folder):
    third, seventh, later = (mistral_instruct_tokenizer(str(folder / f"{v}.json")) for v in ("v3", "v7", "v11"))
    assert (third.version, seventh.version, later.version) == (3, 7, 11)
    with_turn = "<s>[SYSTEM_PROMPT]Be short.[/SYSTEM_PROMPT][INST]red?[/INST]a colour</s>"
    assert text_of(later, CHAT) == with_turn
    assert text_of(mistral_instruct_tokenizer(str(folder / "v3.json"), version=7), CHAT) == with_turn
    assert mistral_instruct_tokenizer(str(folder / "third.model")).version == 3
    tokenizer = mistral_instruct_tokenizer(str(folder / "v3.json"), prompt_template={"user": ["Q: ", ""]})
    assert "[INST]Be short.\n\nQ: red?[/INST]" in text_of(tokenizer, CHAT)


def test_mistral_writes_tool_calls_as_the_version_of_its_layout(folder):
    asked = Message("user", "x")
    called = Message("assistant", "", extra={"tool_calls": [call()]})
    answered = [asked, called, Message("tool", "rain", extra={"tool_call_id": "call00000"}), Message("assistant", "ok")]
    third, seventh, later = (mistral_instruct_tokenizer(str(folder / f"{v}.json")) for v in ("v3", "v7", "v11"))
    sample = {"messages": answered, "tools": TOOLS, "row": 1}
    assert third(dict(sample))["tokens"] == third.tokenize_messages(answered, tools=TOOLS)[0]
    as_text = Message("assistant", "", extra={"tool_calls": [{"id": "i", "name": "f", "arguments": '{"a": 1}'}]})
    written = '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "i"}]</s>'
    assert text_of(third, [asked, as_text]) == f"<s>[INST]x[/INST]{written}"
    both = Message("assistant", "wait", extra=as_text.extra)
    assert text_of(seventh, [asked, both]) == f"<s>[INST]x[/INST]wait{written}"
    for tokenizer, messages, message in (
        (third, [asked, both], "both text and tool_calls before version 7"),
        (later, answered, "no layout here in version 11: use the checkpoint's own chat template"),
        (third, [asked, called, Message("tool", "rain")], "needs the 'tool_call_id'"),
        (third, [asked, Message("assistant", "", extra={"tool_calls": [{"name": "f"}]})], "needs the 'id' of every"),
        (third, [IMAGE], "holds an image"),
    ):
        with pytest.raises(DataError, match=message):
            tokenizer.tokenize_messages(messages)


def test_tekken_files_of_all_versions_are_read(folder):
    tokenizer = TekkenTokenizer(str(folder / "v7.json"))
    assert tokenizer.vocab_size == 400 + len(CONTROL)
    ids = tokenizer.encode("red 你好 [INST]</s>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert min(ids[1:-1]) >= len(CONTROL)
    assert tokenizer.decode(ids) == "red 你好 [INST]</s>"
    assert max(tokenizer.encode("beyond the model", False, False)) < tokenizer.vocab_size


@pytest.mark.parametrize(
    ("file", "settings", "message"),
    [
        ("bad.json", {}, r"is not a tekken.json \(KeyError: 'config'\)"),
        ("none.json", {}, "There is no tokenizer file"),
        ("pieces.model", {}, r"has no control tokens \[INST\], .*use mistral_tokenizer for the first"),
        ("third.model", {"version": 7}, r"has no control tokens \[SYSTEM_PROMPT\]"),
        ("vx.json", {}, "is of version 'vx': set version"),
    ],
)
def test_file_without_the_tokens_of_a_mistral_layout_is_refused(folder, pieces, file, settings, message):
    (folder / "bad.json").write_text(json.dumps({"tekken": {}}))
    with pytest.raises(DataError, match=message):
        mistral_instruct_tokenizer(str(folder / file), **settings)


# Gemma


def test_gemma_encodes_markers_of_the_template_only_as_control_tokens(folder):
    """Markers of a template are control tokens, those in a turn's text are not; texts alone follow each other."""
    texts = ("<start_of_turn>user", "你好\n\n🙂🙂", "<bos><eos>", "a<end_of_turn>b")
    messages = [Message(role, text) for role, text in zip(("user", "assistant") * 2, texts, strict=True)]
    mask_messages(messages, "train_on_assistant")
    tokenizer = GemmaTokenizer(str(folder / "gemma.model"))
    tokens, mask = tokenizer.tokenize_messages(messages)
    assert (tokens[0], tokens[-1], mask[0], mask[-1]) == (2, 1, True, False)
    assert tokens.count(1) == tokens.count(2) == 2
    assert tokenizer.decode(tokens) == "".join(texts)
    trained = [token for token, masked in zip(tokens, mask, strict=True) if not masked]
    assert tokenizer.decode(trained) == texts[1] + texts[3]
    layout = {role: (f"<start_of_turn>{role}\n", "<end_of_turn>\n") for role in ("user", "assistant")}
    tokenizer = gemma_tokenizer(str(folder / "gemma.model"), prompt_template=layout)
    start, end = tokenizer.encode("<start_of_turn><end_of_turn>", False, False)
    tokens, mask = tokenizer.tokenize_messages(messages)
    assert tokens.count(start) == tokens.count(end) == 4
    assert [mask[i] for i, token in enumerate(tokens) if token == end] == [True, False] * 2
    assert tokenizer.decode(tokens) == "".join(turn.text_content.join(layout[turn.role]) for turn in messages)


def test_gemma_chat_template_ends_turns_and_refuses_other_roles(folder, pieces):
    path = "torchtune.models.gemma.GemmaChatTemplate"
    tokenizer = gemma_tokenizer(str(folder / "gemma.model"), prompt_template=path)
    (end,) = tokenizer.encode("<end_of_turn>", False, False)
    assert tokenizer.stop_tokens == [end, 1]
    begun = tokenizer({"messages": [Message("user", "one"), Message("assistant", " two ")]}, inference=True)["tokens"]
    assert tokenizer.decode(begun).endswith("<start_of_turn>model\ntwo")
    document = tokenizer.encode_text("one <end_of_turn> two")
    assert (document[0], document[-1], document.count(end)) == (tokenizer.bos_id, tokenizer.eos_id, 0)
    assert tokenizer.decode(document) == "one <end_of_turn> two"
    for message, what in ((Message("tool", "x"), "a turn of 'tool'"), (IMAGE, "an image")):
        with pytest.raises(DataError, match=f"no place for {what}"):
            tokenizer.tokenize_messages([message])
    with pytest.raises(DataError, match="no token <end_of_turn>"):
        gemma_tokenizer(pieces, prompt_template=path)


def test_gemma_chat_template_loses_no_system_message():
    template = GemmaChatTemplate()
    question = Message("user", "red?")
    formatted = template([Message("system", "Be short."), Message("system", "Be kind."), question])
    assert formatted[0].text_content == "<start_of_turn>user\nBe short.\n\nBe kind.\n\nred?<end_of_turn>\n"
    with pytest.raises(DataError, match="system message without a later turn of the user"):
        template([question, Message("system", "Be short.")])


# Phi


def test_phi_writes_its_turns_and_refuses_other_roles_and_tokens(pieces, merges, tmp_path):
    phi3 = Phi3MiniTokenizer(pieces)
    assert phi3.decode(phi3.tokenize_messages(CHAT)[0]) == "\nBe short.\n\nred?\n\na colour\n"
    assert phi3.tokenize_messages(CHAT, ignore_system_prompt=True) == phi3.tokenize_messages(CHAT[1:])
    with pytest.raises(DataError, match="turn of 'ipython', only for system, user, assistant"):
        phi3.tokenize_messages([Message("ipython", "x")])
    with pytest.raises(DataError, match=r"lacks <\|endoftext\|>, "):
        Phi3MiniTokenizer(str(tmp_path / "x"), special_tokens={"<|end|>": 1})
    phi4: Phi4Tokenizer = phi4_tokenizer(*merges)
    assert phi4.decode(phi4.tokenize_messages(CHAT)[0]) == "systemBe short.userred?assistanta colour"
    special = write_special(tmp_path / "tokenizer.json", ["<|im_end|>"], 500)
    with pytest.raises(DataError, match=r"lacks <\|endoftext\|>, <\|im_start\|>, <\|im_sep\|>"):
        phi4_tokenizer(*merges, special)


# Qwen


def test_qwen_writes_tool_calls_and_answers_in_tags(merges):
    tools = [
        Message("user", "Where?"),
        Message("assistant", '{"name": "f"}', ipython=True),
        Message("ipython", "one"),
        Message("ipython", "two"),
        Message("assistant", "big"),
    ]
    for cls in (Qwen2_5Tokenizer, Qwen3Tokenizer):
        tokens, _ = cls(*merges).tokenize_messages(tools)
        assert cls(*merges).decode(tokens) == (
            "<|im_start|>user\nWhere?<|im_end|>\n"
            '<|im_start|>assistant\n<tool_call>\n{"name": "f"}\n</tool_call><|im_end|>\n'
            "<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\nbig<|im_end|>"
        )
        assert (151665 in tokens) == (cls is Qwen3Tokenizer)
    plain = Qwen2Tokenizer(*merges).tokenize_messages(tools)[0]
    assert Qwen2Tokenizer(*merges).decode(plain) == (
        '<|im_start|>user\nWhere?<|im_end|>\n<|im_start|>assistant\n{"name": "f"}<|im_end|>\nonetwo'
        "<|im_start|>assistant\nbig<|im_end|>"
    )


def test_qwen3_reads_reasoning_from_the_tags_of_a_text(merges):
    """As its published template: before the first closing tag and after the last opening one is the reasoning."""
    tokenizer = Qwen3Tokenizer(*merges, thinking=True)
    texts = {
        "<think>\nsky\n</think>\n\nblue": ("sky", "blue"),
        "first<think>sky</think>second</think>blue": ("sky", "blue"),
    }
    for text, (reasoning, answer) in texts.items():
        tokens, _ = tokenizer.tokenize_messages([Message("user", "Why?"), Message("assistant", text)])
        assert tokenizer.decode(tokens) == (
            f"<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n<think>\n{reasoning}\n</think>\n\n{answer}<|im_end|>"
        )


def test_qwens_text_parses_control_tokens_and_a_document_does_not(merges):
    tokenizer = Qwen2Tokenizer(*merges)
    assert tokenizer.decode(tokenizer.encode("e\u0301", add_eos=False)) == "é"
    assert tokenizer.encode("red<|im_end|>") == [*tokenizer.encode("red"), 151645]
    text = tokenizer.encode_text("red<|im_end|>", add_eos=False)
    assert max(text) < 151643
    assert tokenizer.decode(text) == "red<|im_end|>"


def test_builders_of_qwen_take_files_and_settings(merges, tmp_path):
    assert qwen2_tokenizer(merges[0]).tokenize_messages(CHAT) == qwen2_tokenizer(*merges).tokenize_messages(CHAT)
    assert isinstance(qwen3_tokenizer(*merges, errors="replace"), Qwen3Tokenizer)
    special = write_special(tmp_path / "tokenizer.json", list(QWEN2_SPECIAL_TOKENS), 600)
    assert qwen3_tokenizer(*merges, special_tokens_path=special).stop_tokens == [602, 600]
    with pytest.raises(DataError, match="writes ChatML itself"):
        Qwen2Tokenizer(*merges, prompt_template=ChatMLTemplate())
    with pytest.raises(DataError, match="prompt_template: 'user' needs two texts"):
        qwen2_tokenizer(*merges, prompt_template={"user": "x"})


# Files


@pytest.mark.parametrize(
    ("is_merges", "content", "message"),
    [
        (False, None, "There is no vocabulary file"),
        (True, None, "There is no merges file"),
        (False, '{"a": 1,', "is broken at line 1"),
        (False, "[1]", "holds no JSON object"),
        (True, "#version: 0.2\na b c\n", "broken at line 2"),
        (True, "zq qz\n", "take both files from the same checkpoint"),
    ],
)
def test_broken_vocabulary_or_merges_file_is_refused(merges, tmp_path, is_merges, content, message):
    bad = tmp_path / "bad"
    if content is not None:
        bad.write_text(content)
    with pytest.raises(DataError, match=message):
        qwen2_tokenizer(*((merges[0], str(bad)) if is_merges else (str(bad), merges[1])))


def test_broken_rank_file_is_refused(tmp_path):
    file = tmp_path / "tokenizer.model"
    with pytest.raises(DataError, match="There is no tokenizer file"):
        Llama3Tokenizer(str(file))
    for content, message in (("", "is empty"), ('YQ== 0\n{"version": 1}\n', "broken at line 2")):
        file.write_text(content)
        with pytest.raises(DataError, match=message):
            Llama3Tokenizer(str(file))
    with pytest.raises(DataError, match="is a folder"):
        Llama3Tokenizer(str(tmp_path))


def test_base_tokenizers_encode_and_decode_text(ranks, pieces, merges, tmp_path):
    tiktoken = TikTokenBaseTokenizer(ranks, "x", r"\w+|\s+|[^\w\s]+", 1000, 1001, {"<a>": 1000, "<b>": 1001})
    assert tiktoken.encode("red")[0] == 1000
    assert tiktoken.decode(tiktoken.encode("red blue")[1:]) == "red blue"
    assert tiktoken.vocab_size == 1002
    gpt2 = GPT2BaseTokenizer(*merges, bos_id=1, eos_id=2)
    ids = gpt2.encode("red blue 你好")
    assert (ids[0], ids[-1]) == (1, 2)
    assert gpt2.decode(ids[1:-1]) == "red blue 你好"
    assert gpt2.bpe("red").replace(" ", "") == "red"
    assert gpt2.vocab_size == 400
    sentencepiece = SentencePieceBaseTokenizer(pieces)
    assert sentencepiece.encode("red cat") == [1, *sentencepiece.encode("red cat", False, False), 2]
    assert sentencepiece.vocab_size == sentencepiece.spm_model.vocab_size()
    cat = sentencepiece.encode(" cat", False, False, trim_leading_whitespace=True)
    assert sentencepiece.encode("red", False, False) + cat == sentencepiece.encode("red cat", False, False)
    with pytest.raises(DataError, match="There is no tokenizer file"):
        SentencePieceBaseTokenizer(str(tmp_path / "no.model"))
    (tmp_path / "bad.model").write_bytes(b"nothing of the kind")
    with pytest.raises(DataError, match="is not a SentencePiece model"):
        SentencePieceBaseTokenizer(str(tmp_path / "bad.model"))
