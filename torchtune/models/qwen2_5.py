"""Qwen 2.5.

Qwen 2's architecture in more sizes, and a tokenizer with tool calls (https://arxiv.org/abs/2412.15115).
"""

from dataclasses import replace

from torchtune._lazy import former_package
from torchtune.data import Message
from torchtune.models._builders import model_builders
from torchtune.models._tokenizer_builder import tokenizer_builder, with_defaults
from torchtune.models.qwen2 import (
    IM_END,
    IM_START,
    QWEN2_SPECIAL_TOKENS,
    Qwen2Tokenizer,
    qwen2_size,
)
from torchtune.models.qwen2 import SIZES as QWEN2
from torchtune.models.qwen2 import SPEC as QWEN2_SPEC
from torchtune.tokenizers import text_only

SPEC = replace(QWEN2_SPEC, name="qwen2_5")

_1_5B = QWEN2["qwen2_1_5b"]
_7B = QWEN2["qwen2_7b"]
_14B = replace(_7B, num_layers=48, embed_dim=5120, intermediate_dim=13_824, num_heads=40, num_kv_heads=8)
_32B = replace(_14B, num_layers=64, intermediate_dim=27_648)
_72B = replace(_7B, num_layers=80, embed_dim=8192, intermediate_dim=29_568, num_heads=64, num_kv_heads=8)
_LONG = 131_072  # context of the base models

SIZES = {
    "qwen2_5_0_5b": QWEN2["qwen2_0_5b"],
    "qwen2_5_1_5b_base": replace(_1_5B, max_seq_len=_LONG),
    "qwen2_5_1_5b_instruct": _1_5B,
    "qwen2_5_3b": qwen2_size(
        num_layers=36, embed_dim=2048, intermediate_dim=11_008, num_heads=16, num_kv_heads=2, tie_word_embeddings=True
    ),
    "qwen2_5_7b_base": replace(_7B, max_seq_len=_LONG),
    "qwen2_5_7b_instruct": _7B,
    # Base models from 14B on have another eps of norms than their instruct models.
    "qwen2_5_14b_base": replace(_14B, max_seq_len=_LONG, norm_eps=1e-5),
    "qwen2_5_14b_instruct": _14B,
    "qwen2_5_32b_base": replace(_32B, max_seq_len=_LONG, norm_eps=1e-5),
    "qwen2_5_32b_instruct": _32B,
    "qwen2_5_72b_base": replace(_72B, max_seq_len=_LONG, norm_eps=1e-5),
    "qwen2_5_72b_instruct": _72B,
}
BUILDERS = model_builders(__name__, "Qwen2.5", SPEC, SIZES)
qwen2_5_0_5b = BUILDERS["qwen2_5_0_5b"]
lora_qwen2_5_0_5b = BUILDERS["lora_qwen2_5_0_5b"]
qlora_qwen2_5_0_5b = BUILDERS["qlora_qwen2_5_0_5b"]
qwen2_5_1_5b_base = BUILDERS["qwen2_5_1_5b_base"]
lora_qwen2_5_1_5b_base = BUILDERS["lora_qwen2_5_1_5b_base"]
qlora_qwen2_5_1_5b_base = BUILDERS["qlora_qwen2_5_1_5b_base"]
qwen2_5_1_5b_instruct = BUILDERS["qwen2_5_1_5b_instruct"]
lora_qwen2_5_1_5b_instruct = BUILDERS["lora_qwen2_5_1_5b_instruct"]
qlora_qwen2_5_1_5b_instruct = BUILDERS["qlora_qwen2_5_1_5b_instruct"]
qwen2_5_3b = BUILDERS["qwen2_5_3b"]
lora_qwen2_5_3b = BUILDERS["lora_qwen2_5_3b"]
qlora_qwen2_5_3b = BUILDERS["qlora_qwen2_5_3b"]
qwen2_5_7b_base = BUILDERS["qwen2_5_7b_base"]
lora_qwen2_5_7b_base = BUILDERS["lora_qwen2_5_7b_base"]
qlora_qwen2_5_7b_base = BUILDERS["qlora_qwen2_5_7b_base"]
qwen2_5_7b_instruct = BUILDERS["qwen2_5_7b_instruct"]
lora_qwen2_5_7b_instruct = BUILDERS["lora_qwen2_5_7b_instruct"]
qlora_qwen2_5_7b_instruct = BUILDERS["qlora_qwen2_5_7b_instruct"]
qwen2_5_14b_base = BUILDERS["qwen2_5_14b_base"]
lora_qwen2_5_14b_base = BUILDERS["lora_qwen2_5_14b_base"]
qlora_qwen2_5_14b_base = BUILDERS["qlora_qwen2_5_14b_base"]
qwen2_5_14b_instruct = BUILDERS["qwen2_5_14b_instruct"]
lora_qwen2_5_14b_instruct = BUILDERS["lora_qwen2_5_14b_instruct"]
qlora_qwen2_5_14b_instruct = BUILDERS["qlora_qwen2_5_14b_instruct"]
qwen2_5_32b_base = BUILDERS["qwen2_5_32b_base"]
lora_qwen2_5_32b_base = BUILDERS["lora_qwen2_5_32b_base"]
qlora_qwen2_5_32b_base = BUILDERS["qlora_qwen2_5_32b_base"]
qwen2_5_32b_instruct = BUILDERS["qwen2_5_32b_instruct"]
lora_qwen2_5_32b_instruct = BUILDERS["lora_qwen2_5_32b_instruct"]
qlora_qwen2_5_32b_instruct = BUILDERS["qlora_qwen2_5_32b_instruct"]
qwen2_5_72b_base = BUILDERS["qwen2_5_72b_base"]
lora_qwen2_5_72b_base = BUILDERS["lora_qwen2_5_72b_base"]
qlora_qwen2_5_72b_base = BUILDERS["qlora_qwen2_5_72b_base"]
qwen2_5_72b_instruct = BUILDERS["qwen2_5_72b_instruct"]
lora_qwen2_5_72b_instruct = BUILDERS["lora_qwen2_5_72b_instruct"]
qlora_qwen2_5_72b_instruct = BUILDERS["qlora_qwen2_5_72b_instruct"]
# Compatibility: a config of earlier releases uses this name.
lora_qwen2_5_7b = BUILDERS["lora_qwen2_5_7b"] = BUILDERS["lora_qwen2_5_7b_instruct"]


QWEN2_5_SPECIAL_TOKENS = {
    **QWEN2_SPECIAL_TOKENS,
    "<|object_ref_start|>": 151646,
    "<|object_ref_end|>": 151647,
    "<|box_start|>": 151648,
    "<|box_end|>": 151649,
    "<|quad_start|>": 151650,
    "<|quad_end|>": 151651,
    "<|vision_start|>": 151652,
    "<|vision_end|>": 151653,
    "<|vision_pad|>": 151654,
    "<|image_pad|>": 151655,
    "<|video_pad|>": 151656,
    "<tool_call>": 151657,
    "</tool_call>": 151658,
    "<|fim_prefix|>": 151659,
    "<|fim_middle|>": 151660,
    "<|fim_suffix|>": 151661,
    "<|fim_pad|>": 151662,
    "<|repo_name|>": 151663,
    "<|file_sep|>": 151664,
}


class Qwen2_5Tokenizer(Qwen2Tokenizer):
    """Byte-level BPE with Qwen 2.5's chat format, including tool calls and tool responses.

    It has the arguments of :class:`torchtune.models.qwen2.Qwen2Tokenizer`.
    """

    __init__ = with_defaults(Qwen2Tokenizer.__init__, special_tokens=QWEN2_5_SPECIAL_TOKENS)

    def _turn(self, messages: list[Message], index: int, begun: str = "") -> str:
        message = messages[index]
        body = text_only(message, type(self).__name__)
        if message.role == "ipython":
            follows = index > 0 and messages[index - 1].role == "ipython"
            precedes = index + 1 < len(messages) and messages[index + 1].role == "ipython"
            before = "\n" if follows else f"{IM_START}user\n"
            after = "" if precedes else f"{IM_END}\n"
            return f"{before}<tool_response>\n{body}\n</tool_response>{after}"
        if message.role == "assistant" and message.ipython:
            body = f"<tool_call>\n{body}\n</tool_call>"
        return self._block(message.role, begun + body, is_open=self._stays_open(messages, index))


qwen2_5_tokenizer = tokenizer_builder(Qwen2_5Tokenizer, "qwen2_5_tokenizer", "Qwen 2.5")

__all__ = ["SPEC", *BUILDERS, "Qwen2_5Tokenizer", "qwen2_5_tokenizer"]
__getattr__, __path__ = former_package(__name__)
