"""GGUF files: as a folder that transformers loads, with its tokenizer, read directly, damaged."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Regex, Tokenizer, models
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split
from transformers import AutoTokenizer, GPT2Tokenizer, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter

from tests.torchtune.checkpoints.gguf_files import OWN, SPECIAL, Vocabulary, texts, write_gguf
from tests.torchtune.checkpoints.small import close, in_transformers, logits, read, refusal, same_bits, stored
from torchtune.checkpoints import CheckpointError, FullModelHFCheckpointer, GGUFFile, gguf_to_hf
from torchtune.checkpoints._gguf import pre_tokenizers
from torchtune.checkpoints._quantize import _pre_tokenizer_name
from torchtune.models import build
from torchtune.modules import TransformerDecoder


def on_meta(path: Path) -> TransformerDecoder:
    """Our model of a GGUF file."""
    file = GGUFFile(path)
    with torch.device("meta"):
        return build(file.description, file.spec)


SHAPES = ["llama", "llama_tied", "qwen2", "qwen2_tied", "qwen3"]
QUANTIZATIONS = ["F32", "F16", "BF16", "Q8_0", "Q4_1", "Q4_0", "Q5_1"]
TRIED = [*((shape, "F32") for shape in SHAPES), *(("llama", quantization) for quantization in QUANTIZATIONS[1:])]


@pytest.mark.parametrize(("shape", "quantization"), TRIED)
def test_converted_folder_is_read_by_transformers(shape, quantization, tmp_path):
    gguf_model = write_gguf(tmp_path / "x.gguf", shape, quantization)
    folder = gguf_to_hf(gguf_model.path, tmp_path / "hf", torch.float32)
    again = in_transformers(folder)
    assert type(again) is type(gguf_model.hf)
    assert again.config.tie_word_embeddings == gguf_model.hf.config.tie_word_embeddings
    assert again.generation_config.eos_token_id == 2
    assert (again.config.bos_token_id, again.config.eos_token_id, again.config.pad_token_id) == (1, 2, 0)
    torch.testing.assert_close(logits(again), logits(gguf_model.hf), atol=1e-5, rtol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == (
        "<|im_start|>hi<|im_end|>"
    )


def test_gguf_is_converted_to_bf16_by_default(tmp_path):
    gguf_model = write_gguf(tmp_path / "x.gguf", quantization="Q8_0")
    folder = gguf_to_hf(gguf_model.path, tmp_path / "hf")
    assert {tensor.dtype for tensor in stored(folder).values()} == {torch.bfloat16}
    assert read(folder / "config.json")["dtype"] == "bfloat16"


@pytest.mark.parametrize("shape", ["llama_tied", "qwen2"])
def test_gguf_file_is_loaded_without_conversion(shape, tmp_path):
    (tmp_path / "in").mkdir()
    gguf_model = write_gguf(tmp_path / "in" / "x.gguf", shape, "Q8_0")
    (tmp_path / "in" / "holiday.txt").write_text("no part of the model")
    checkpointer = FullModelHFCheckpointer(tmp_path / "in", ["x.gguf"], output_dir=tmp_path / "out")
    model = on_meta(gguf_model.path)
    checkpointer.load_model(model)
    close(logits(model.eval()), logits(gguf_model.hf))
    saved = checkpointer.save("epoch_0", model)
    folder = gguf_to_hf(gguf_model.path, tmp_path / "hf", torch.float32)
    assert same_bits(stored(saved), stored(folder))
    files = {path.name for path in folder.iterdir()}
    assert {path.name for path in saved.iterdir()} == files | {".complete"}
    for name in files - {"model.safetensors"}:
        assert read(saved / name) == read(folder / name), name
    close(logits(in_transformers(saved)), logits(gguf_model.hf))


def test_llama3_scaling_factors_are_restored(tmp_path, monkeypatch):
    """llama.cpp keeps Llama 3.1's scaling as one divisor a frequency."""
    import gguf

    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    written = gguf.GGUFWriter.write_header_to_file
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(hidden_size=64, num_attention_heads=4, rope_parameters=scaling, max_position_embeddings=256)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 500_000.0 ** (-torch.arange(0, 16, 2).float() / 16)

    def with_frequencies(self: Any) -> None:
        self.add_tensor("rope_freqs.weight", (plain / scaled).numpy())
        written(self)

    monkeypatch.setattr(gguf.GGUFWriter, "write_header_to_file", with_frequencies)
    gguf_model = write_gguf(tmp_path / "x.gguf", rope_parameters=scaling, max_position_embeddings=20_000)
    again = in_transformers(gguf_to_hf(gguf_model.path, tmp_path / "hf", torch.float32))
    assert again.config.rope_parameters["rope_type"] == "llama3"
    positions = torch.arange(19_000, 19_024).expand(2, -1)
    tokens = torch.randint(3, 320, (2, 24))
    with torch.no_grad():
        close(*(model(tokens, position_ids=positions).logits for model in (again, gguf_model.hf)))


def refused(path: Path, output: Path) -> str:
    """The message with which a file is refused, both ways of reading it."""
    message = refusal(gguf_to_hf, path, output)
    assert not output.exists()
    with pytest.raises(CheckpointError, match=path.name):
        FullModelHFCheckpointer(path.parent, [path.name]).load_model(on_meta(path))
    return message


def test_gguf_file_cut_anywhere_is_refused(tmp_path):
    gguf_model = write_gguf(tmp_path / "x.gguf", quantization="Q4_1", num_hidden_layers=1)
    content = gguf_model.path.read_bytes()
    rng = random.Random(0)
    cuts = [0, 1, 3, 4, 7, 8, 23, 24, 25, len(content) - 1, *(rng.randrange(len(content)) for _ in range(60))]
    path = tmp_path / "cut.gguf"
    for cut in cuts:
        path.write_bytes(content[:cut])
        assert "cut.gguf" in refused(path, tmp_path / "hf")


def test_gguf_file_with_flipped_bytes_is_refused_or_read(tmp_path):
    """Whatever the header says, the answer is a result or one sentence."""
    gguf_model = write_gguf(tmp_path / "x.gguf", num_hidden_layers=1)
    content = gguf_model.path.read_bytes()
    start = content.index(b"output_norm.weight") + 400
    rng = random.Random(0)
    path = tmp_path / "flipped.gguf"
    messages = []
    for _ in range(150):
        damaged = bytearray(content)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(min(start, len(content)))] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            gguf_to_hf(path, tmp_path / "hf")
        except CheckpointError as error:
            messages.append(str(error))
    assert len(messages) > 5
    assert all("flipped.gguf" in message for message in messages)


def test_missing_gguf_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"no file .*gone\.gguf"):
        gguf_to_hf(tmp_path / "gone.gguf", tmp_path / "hf")


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"llama.rope.scaling.type": "yarn"}, "yarn"),
        ({"tokenizer.ggml.pre": "tekken"}, "tekken"),
    ],
)
def test_gguf_metadata_that_cannot_be_expressed_is_refused(extra, words, tmp_path):
    pre = None if "tokenizer.ggml.pre" in extra else "smollm"
    gguf_model = write_gguf(tmp_path / "x.gguf", pre=pre, extra=extra)
    with pytest.raises(CheckpointError, match=words):
        gguf_to_hf(gguf_model.path, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_folder_of_several_gguf_files_is_refused(tmp_path):
    gguf_model = write_gguf(tmp_path / "a.gguf")
    write_gguf(tmp_path / "b.gguf")
    with pytest.raises(CheckpointError, match=r"holds 2 GGUF files .*: name one in checkpoint_files"):
        FullModelHFCheckpointer(tmp_path).load_model(on_meta(gguf_model.path))


def test_gguf_file_of_another_model_is_refused(tmp_path):
    (tmp_path / "in").mkdir()
    write_gguf(tmp_path / "in" / "x.gguf")
    smaller_model = write_gguf(tmp_path / "other.gguf", num_hidden_layers=2)
    with pytest.raises(CheckpointError, match=r"x\.gguf: .*blk\.2.*: check checkpoint_dir"):
        FullModelHFCheckpointer(tmp_path / "in", ["x.gguf"]).load_model(on_meta(smaller_model.path))


def reference_tokenizer(pre: str, vocabulary: Vocabulary) -> Tokenizer:
    kind = Qwen2Tokenizer if pre == "qwen2" else GPT2Tokenizer
    tokenizer = kind(
        vocab={token: index for index, token in enumerate(vocabulary.tokens)}, merges=vocabulary.merges
    )._tokenizer
    if pre == "llama-bpe":
        cut = Split(Regex(TikTokenConverter().pattern), behavior="isolated")
        tokenizer.pre_tokenizer = Sequence([cut, ByteLevel(add_prefix_space=False, use_regex=False)])
        tokenizer.model.ignore_merges = True
    if pre == "smollm":  # as in SmolLM2's tokenizer.json
        tokenizer.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in (*SPECIAL, *OWN)])
    return tokenizer


@pytest.mark.parametrize("add_bos", [False, True], ids=["", "bos"])
@pytest.mark.parametrize("pre", ["smollm", "llama-bpe", "qwen2", "default", "gpt-2"])
def test_tokenizer_of_a_gguf_file_has_the_original_ids(pre, add_bos, tmp_path):
    gguf_model = write_gguf(
        tmp_path / "x.gguf", pre=pre, extra={"tokenizer.ggml.add_bos_token": add_bos}, num_hidden_layers=1
    )
    folder = gguf_to_hf(gguf_model.path, tmp_path / "hf")
    plain = Tokenizer.from_file(str(folder / "tokenizer.json"))
    fast = AutoTokenizer.from_pretrained(folder)
    examples = texts(600, [*SPECIAL, *OWN], seed=len(pre))
    original = reference_tokenizer(pre, gguf_model.vocabulary)
    start = [1] if add_bos else []
    expected = [start + original.encode(text, add_special_tokens=False).ids for text in examples]
    assert sum(map(len, expected)) > 10_000
    for text, ids in zip(examples, expected, strict=True):
        assert plain.encode(text).ids == ids, text
        assert fast(text).input_ids == ids, text
        if pre != "qwen2":  # which composes characters first
            assert fast.decode(ids[add_bos:], skip_special_tokens=False) == text
    assert {fast.convert_ids_to_tokens(index) for index in fast.all_special_ids} <= set(SPECIAL)
    assert (fast.bos_token, fast.eos_token, fast.pad_token) == (SPECIAL[1], SPECIAL[2], SPECIAL[0])


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_pre_tokenizer_is_written_under_the_name_that_llama_cpp_has_for_it(pre):
    """Under ``default``, llama.cpp splits numbers and punctuation in another way than GPT-2's pre-tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers()[pre]()
    assert _pre_tokenizer_name(tokenizer) == pre
