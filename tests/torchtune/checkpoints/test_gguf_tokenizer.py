"""Tokenizers out of GGUF files against byte-pair encoding from its published rules."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from tests.torchtune.checkpoints.gguf_files import OWN, SPECIAL, write_gguf
from tests.torchtune.checkpoints.reference_bpe import ReferenceBPE, texts
from torchtune.checkpoints import gguf_to_hf


@pytest.mark.parametrize("add_bos", [False, True], ids=["", "bos"])
@pytest.mark.parametrize("pre", ["smollm", "llama-bpe", "qwen2", "default", "gpt-2"])
def test_ids(pre: str, add_bos: bool, tmp_path: Path) -> None:
    made = write_gguf(
        tmp_path / "x.gguf", pre=pre, extra={"tokenizer.ggml.add_bos_token": add_bos}, num_hidden_layers=1
    )
    folder = gguf_to_hf(made.path, tmp_path / "hf")
    vocabulary = made.vocabulary
    reference = ReferenceBPE(
        vocabulary.tokens, vocabulary.merges, pre, [*SPECIAL, *OWN], bos=SPECIAL[1] if add_bos else None
    )
    plain, fast = Tokenizer.from_file(str(folder / "tokenizer.json")), AutoTokenizer.from_pretrained(folder)
    examples = texts(600, [*SPECIAL, *OWN], seed=len(pre))
    expected = [reference.encode(text) for text in examples]
    assert sum(map(len, expected)) > 10_000
    for text, ids in zip(examples, expected, strict=True):
        assert plain.encode(text).ids == ids, text
        assert fast(text).input_ids == ids, text
        if pre != "qwen2":  # which composes characters first
            assert fast.decode(ids[add_bos:], skip_special_tokens=False) == text
    assert {fast.convert_ids_to_tokens(index) for index in fast.all_special_ids} <= set(SPECIAL)
    assert (fast.bos_token, fast.eos_token, fast.pad_token) == (SPECIAL[1], SPECIAL[2], SPECIAL[0])
