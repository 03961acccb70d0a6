"""Tiny GGUF files as llama.cpp's converter lays them out, made with the gguf package's writer."""

import itertools
import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from tests.torchtune.checkpoints.small import hf_model

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
OWN = ["<tool>", "</tool>"]
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.down_proj": "ffn_down",
    "mlp.up_proj": "ffn_up",
}


@dataclass
class Vocabulary:
    """Tokens, kinds of tokens and merges."""

    tokens: list[str]
    merges: list[tuple[str, str]]
    own: list[str] = field(default_factory=lambda: list(OWN))

    @property
    def types(self) -> list[int]:
        kinds = dict.fromkeys(SPECIAL, gguf.TokenType.CONTROL) | dict.fromkeys(self.own, gguf.TokenType.USER_DEFINED)
        return [int(kinds.get(token, gguf.TokenType.NORMAL)) for token in self.tokens]


def texts(count: int, special: list[str], seed: int = 0) -> list[str]:
    """Texts that show where rules differ: digits, scripts, marks, runs of white space, contractions, special tokens."""
    rng = random.Random(seed)
    words = (
        "the The quick don't we'll I'M they're YOU'D x1y2 naïve café cafe\u0301 Straße 東京 こんにちは мир שלום مرحبا "
        "नमस्ते ไทย 한국어 한 \U0001d4b3\U0001d4ce 🤖 👩‍👩‍👧 ½ Ⅷ ٣٤٥ e=mc² foo_bar() {'a':[1,2]} "
        "https://x.org/?q=1&b=2 -> != … — ''' "
        "\u200b \u00a0 \u3000 \ufeff \u2028 \x00 \x7f ß ﬁ Å Å ' 's 'S '' \\n #!/bin/sh"
    ).split(" ")
    spaces = [" ", "  ", "   ", "\n", "\n\n", "\t", " \n ", "\r\n", "\r", "", "\x0b", "\u00a0 "]

    digits = [str(rng.randrange(10**size)) for size in range(1, 10)]
    parts = [*words, *special, *digits, *(f"-{first}.{second}%" for first, second in itertools.pairwise(digits))]
    for _ in range(40):
        foreign_word = "".join(chr(rng.randrange(0x370, 0xD7FF)) for _ in range(3))
        parts.append(foreign_word)
    examples = ["", " ", "\n", "0", "12345", " 12345", "a1", "1 2  3   4", "'", "'s's", *special]
    while len(examples) < count:
        num_words = rng.randint(1, 14)
        examples.append("".join(rng.choice(parts) + rng.choice(spaces) for _ in range(num_words)))
    return examples


def train_vocabulary(size: int = 318) -> Vocabulary:
    """Merges learned from random texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(200, [], seed=9), trainer)
    vocab = tokenizer.get_vocab()
    merges = [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    return Vocabulary([*sorted(vocab, key=vocab.get), *OWN], merges)


def _interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of llama's queries and keys as llama.cpp keeps them: the two halves of every head, by turns."""
    head_dim = weight.shape[0] // heads
    first, second = weight.reshape(heads, 2, head_dim // 2, *weight.shape[1:]).unbind(1)
    return torch.stack([first, second], dim=2).reshape(weight.shape)


@dataclass
class Made:
    """A GGUF file and the model of transformers that it stands for, its weights as they come out of the file."""

    path: Path
    hf: torch.nn.Module
    vocabulary: Vocabulary


def write_gguf(
    path: Path,
    shape: str = "llama",
    quantization: str = "F32",
    pre: str | None = "smollm",
    vocabulary: Vocabulary | None = None,
    extra: dict[str, Any] | None = None,
    **sizes: Any,
) -> Made:
    """Write a file from a random model of ``shape``; matrices are quantized, vectors stay float32."""
    hf = hf_model(shape, **{"hidden_size": 64, "intermediate_size": 96, **sizes})
    config = hf.config
    arch = shape.partition("_")[0]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if shape.startswith("qwen3"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    vocabulary = vocabulary or train_vocabulary()
    _write_tokenizer(writer, vocabulary, pre, extra or {})
    kind = gguf.GGMLQuantizationType[quantization]
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            module, _, leaf = name.rpartition(".")
            heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
            heads = heads.get(module.rpartition(".")[2]) if arch == "llama" else None
            values = parameter if heads is None else _interleaved(parameter, heads)
            array = values.detach().float().numpy()
            layer = ""
            short = module
            if module.startswith("model.layers."):
                _, _, number, short = module.split(".", 3)
                layer = f"blk.{number}."
            target = f"{layer}{_NAMES[short]}.{leaf}"
            if array.ndim < 2 or quantization == "F32":
                writer.add_tensor(target, np.ascontiguousarray(array))
                continue
            packed = gguf.quants.quantize(array, kind)
            writer.add_tensor(target, packed, raw_dtype=kind)
            # Quantization goes row by row, so the order of the rows does not matter to it.
            parameter.copy_(
                torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(parameter.numpy(), kind), kind))
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Made(path, hf.eval(), vocabulary)


def _write_tokenizer(writer: Any, vocabulary: Vocabulary, pre: str | None, extra: dict[str, Any]) -> None:
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    writer.add_token_merges([" ".join(pair) for pair in vocabulary.merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")
    for key, value in extra.items():
        add = writer.add_bool if isinstance(value, bool) else writer.add_string
        add(key, value)
