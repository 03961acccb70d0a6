"""Qwen 2.5's tokenizer."""

from torchtune.data import Message
from torchtune.models._tokenizer_builders import tokenizer_builder, with_defaults
from torchtune.models.qwen2._tokenizer import (
    IM_END,
    IM_START,
    QWEN2_SPECIAL_TOKENS,
    Qwen2Tokenizer,
)
from torchtune.tokenizers import text_only

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
