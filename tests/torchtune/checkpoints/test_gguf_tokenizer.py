"""Tokenizers out of GGUF files against those of transformers with the same vocabulary."""

import pytest
from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split
from transformers import AutoTokenizer, GPT2Tokenizer, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter

from tests.torchtune.checkpoints.gguf_files import OWN, SPECIAL, Vocabulary, texts, write_gguf
from torchtune.checkpoints import gguf_to_hf


def reference(pre: str, vocabulary: Vocabulary) -> Tokenizer:
    kind = Qwen2Tokenizer if pre == "qwen2" else GPT2Tokenizer
    made = kind(
        vocab={token: index for index, token in enumerate(vocabulary.tokens)}, merges=vocabulary.merges
    )._tokenizer
    if pre == "llama-bpe":
        cut = Split(Regex(TikTokenConverter().pattern), behavior="isolated")
        made.pre_tokenizer = Sequence([cut, ByteLevel(add_prefix_space=False, use_regex=False)])
        made.model.ignore_merges = True
    if pre == "smollm":  # as in SmolLM2's tokenizer.json
        made.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    made.add_tokens([AddedToken(token, normalized=False) for token in (*SPECIAL, *OWN)])
    return made


@pytest.mark.parametrize("add_bos", [False, True], ids=["", "bos"])
@pytest.mark.parametrize("pre", ["smollm", "llama-bpe", "qwen2", "default", "gpt-2"])
def test_ids(pre, add_bos, tmp_path):
    made = write_gguf(
        tmp_path / "x.gguf", pre=pre, extra={"tokenizer.ggml.add_bos_token": add_bos}, num_hidden_layers=1
    )
    folder = gguf_to_hf(made.path, tmp_path / "hf")
    plain, fast = Tokenizer.from_file(str(folder / "tokenizer.json")), AutoTokenizer.from_pretrained(folder)
    examples = texts(600, [*SPECIAL, *OWN], seed=len(pre))
    theirs, start = reference(pre, made.vocabulary), [1] if add_bos else []
    expected = [start + theirs.encode(text, add_special_tokens=False).ids for text in examples]
    assert sum(map(len, expected)) > 10_000
    for text, ids in zip(examples, expected, strict=True):
        assert plain.encode(text).ids == ids, text
        assert fast(text).input_ids == ids, text
        if pre != "qwen2":  # which composes characters first
            assert fast.decode(ids[add_bos:], skip_special_tokens=False) == text
    assert {fast.convert_ids_to_tokens(index) for index in fast.all_special_ids} <= set(SPECIAL)
    assert (fast.bos_token, fast.eos_token, fast.pad_token) == (SPECIAL[1], SPECIAL[2], SPECIAL[0])
