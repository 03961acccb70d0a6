"""gpt-oss's tokenizer: what the table of layouts leaves out."""

import re

import pytest

from tests.torchtune.models.tokenizer_files import write_ranks
from tests.torchtune.tokenizers.chat_conversations import TOOLS, call
from torchtune.data import DataError, Message, mask_messages
from torchtune.models.gpt_oss import GptOssTokenizer, gpt_oss_tokenizer
from torchtune.models.gpt_oss._tokenizer import GPT_OSS_SPECIAL_TOKENS

CHAT = [Message("user", "red?"), Message("assistant", "a colour", extra={"reasoning_content": "easy"})]
mask_messages(CHAT, "train_on_assistant")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_ranks(tmp_path_factory.mktemp("gpt_oss") / "o200k_base.tiktoken")


def test_special_tokens() -> None:
    assert sorted(GPT_OSS_SPECIAL_TOKENS.values()) == list(range(199998, 201088))
    assert GPT_OSS_SPECIAL_TOKENS["<|call|>"] == 200012
    assert GPT_OSS_SPECIAL_TOKENS["<|reserved_201087|>"] == 201087


def test_settings(ranks: str) -> None:
    tokenizer = GptOssTokenizer(ranks)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (None, 200002, 199999)
    assert tokenizer.stop_tokens == [200002, 199999, 200012]
    assert tokenizer.vocab_size == 201088
    tokens, mask = tokenizer.tokenize_messages(CHAT)
    text = tokenizer.decode(tokens, skip_special_tokens=False)
    assert re.search(r"Current date: \d{4}-\d\d-\d\d\n\nReasoning: medium\n", text)
    trained = tokenizer.decode([t for t, m in zip(tokens, mask, strict=True) if not m], skip_special_tokens=False)
    assert trained == (
        "<|channel|>analysis<|message|>easy<|end|><|start|>assistant<|channel|>final<|message|>a colour<|return|>"
    )
    assert gpt_oss_tokenizer(ranks, max_seq_len=9).tokenize_messages(CHAT)[0] == [*tokens[:8], 200002]
    assert gpt_oss_tokenizer(ranks, reasoning_effort="high", current_date="x").system_text.count("high") == 1


def test_open_turns(ranks: str) -> None:
    tokenizer = gpt_oss_tokenizer(ranks)
    prompt = tokenizer({"messages": [CHAT[0], Message("assistant", "")]}, inference=True)["tokens"]
    assert tokenizer.decode(prompt, skip_special_tokens=False).endswith("red?<|end|><|start|>assistant")
    begun = tokenizer({"messages": [CHAT[0], Message("assistant", "a")]}, inference=True)["tokens"]
    shown = tokenizer.decode(begun[len(prompt) :], skip_special_tokens=False)
    assert shown == "<|channel|>final<|message|>a"


def test_what_has_no_place(ranks: str) -> None:
    tokenizer = gpt_oss_tokenizer(ranks)
    calling = Message("assistant", "", extra={"tool_calls": [call(), call(1)]})
    both = Message("assistant", "text", extra={"tool_calls": [call()], "thinking": "x"})
    for messages, match in (
        ([CHAT[0], calling], "one tool in this layout, not 2"),
        ([CHAT[0], both], "for its text or its reasoning, not for both"),
        ([CHAT[0], Message("tool", "rain")], "only after a turn with tool_calls"),
        ([Message("user", [{"type": "image", "content": 1}])], "text only"),
    ):
        with pytest.raises(DataError, match=match):
            tokenizer.tokenize_messages(messages)
    with pytest.raises(DataError, match="use the checkpoint's own chat template"):
        tokenizer({"messages": CHAT, "tools": TOOLS})
    with pytest.raises(DataError, match=r"special_tokens lacks <\|start\|>"):
        GptOssTokenizer(ranks, special_tokens={"<|end|>": 1})
