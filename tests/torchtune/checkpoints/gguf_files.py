"""Tiny GGUF files as llama.cpp's converter lays them out, made with the gguf package's writer."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from tests.torchtune.checkpoints.reference_bpe import PATTERNS, texts
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


def train_vocabulary(kind: str, size: int = 318) -> Vocabulary:
    """Merges learned from random texts, cut as ``kind`` cuts them."""
    tokenizer = Tokenizer(models.BPE())
    cut = pre_tokenizers.Split(__import__("tokenizers").Regex(PATTERNS[kind]), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(200, [], seed=9), trainer)
    vocab = tokenizer.get_vocab()
    merges = [tuple(pair) for pair in __import__("json").loads(tokenizer.to_str())["model"]["merges"]]
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
    config, arch = hf.config, shape.partition("_")[0]
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
    vocabulary = vocabulary or train_vocabulary(pre or "gpt-2")
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
            layer, short = "", module
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
