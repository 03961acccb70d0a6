"""Qwen 3, the dense models.

Norms of queries and keys replace the biases of Qwen 2, and heads have 128 channels whatever the width
(https://arxiv.org/abs/2505.09388).
"""

from collections.abc import Mapping
from dataclasses import replace

from torchtune._lazy import former_package
from torchtune.data import Message, PromptTemplateInterface
from torchtune.models._builders import model_builders
from torchtune.models._hf_config import QWEN3
from torchtune.models._spec import family
from torchtune.models._tokenizer_builder import tokenizer_builder
from torchtune.models._weight_names import GGUF, HF_HALF
from torchtune.models.qwen2 import (
    DEFAULT_QWEN2_TOKENIZER_BPE_CACHE_SIZE,
    ENDOFTEXT,
    IM_END,
    qwen_components,
)
from torchtune.models.qwen2_5 import QWEN2_5_SPECIAL_TOKENS, Qwen2_5Tokenizer
from torchtune.tokenizers import text_only

SPEC = family("qwen3", QWEN3, HF_HALF, formats={"gguf": GGUF}, model_types=("QWEN3",))

_0_6B = QWEN3.describe(
    vocab_size=151_936,
    num_layers=28,
    embed_dim=1024,
    intermediate_dim=3072,
    max_seq_len=32_768,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    rope_base=1_000_000.0,
    norm_eps=1e-6,
    tie_word_embeddings=True,
)
_1_7B = replace(_0_6B, embed_dim=2048, intermediate_dim=6144)
_4B = replace(_0_6B, num_layers=36, embed_dim=2560, intermediate_dim=9728, num_heads=32)
_8B = replace(_4B, embed_dim=4096, intermediate_dim=12_288, tie_word_embeddings=False)
_14B = replace(_8B, num_layers=40, embed_dim=5120, intermediate_dim=17_408, num_heads=40)
_32B = replace(_8B, num_layers=64, embed_dim=5120, intermediate_dim=25_600, num_heads=64)
_LONG = 40_960  # context of the instruct models

SIZES = {
    "qwen3_0_6b_base": _0_6B,
    "qwen3_0_6b_instruct": replace(_0_6B, max_seq_len=_LONG),
    "qwen3_1_7b_base": _1_7B,
    "qwen3_1_7b_instruct": replace(_1_7B, max_seq_len=_LONG),
    "qwen3_4b_base": _4B,
    "qwen3_4b_instruct": replace(_4B, max_seq_len=_LONG),
    "qwen3_8b_base": _8B,
    "qwen3_8b_instruct": replace(_8B, max_seq_len=_LONG),
    "qwen3_14b_base": _14B,
    "qwen3_14b_instruct": replace(_14B, max_seq_len=_LONG),
    "qwen3_32b": replace(_32B, max_seq_len=_LONG),
}
BUILDERS = model_builders(__name__, "Qwen3", SPEC, SIZES)
qwen3_0_6b_base = BUILDERS["qwen3_0_6b_base"]
lora_qwen3_0_6b_base = BUILDERS["lora_qwen3_0_6b_base"]
qlora_qwen3_0_6b_base = BUILDERS["qlora_qwen3_0_6b_base"]
qwen3_0_6b_instruct = BUILDERS["qwen3_0_6b_instruct"]
lora_qwen3_0_6b_instruct = BUILDERS["lora_qwen3_0_6b_instruct"]
qlora_qwen3_0_6b_instruct = BUILDERS["qlora_qwen3_0_6b_instruct"]
qwen3_1_7b_base = BUILDERS["qwen3_1_7b_base"]
lora_qwen3_1_7b_base = BUILDERS["lora_qwen3_1_7b_base"]
qlora_qwen3_1_7b_base = BUILDERS["qlora_qwen3_1_7b_base"]
qwen3_1_7b_instruct = BUILDERS["qwen3_1_7b_instruct"]
lora_qwen3_1_7b_instruct = BUILDERS["lora_qwen3_1_7b_instruct"]
qlora_qwen3_1_7b_instruct = BUILDERS["qlora_qwen3_1_7b_instruct"]
qwen3_4b_base = BUILDERS["qwen3_4b_base"]
lora_qwen3_4b_base = BUILDERS["lora_qwen3_4b_base"]
qlora_qwen3_4b_base = BUILDERS["qlora_qwen3_4b_base"]
qwen3_4b_instruct = BUILDERS["qwen3_4b_instruct"]
lora_qwen3_4b_instruct = BUILDERS["lora_qwen3_4b_instruct"]
qlora_qwen3_4b_instruct = BUILDERS["qlora_qwen3_4b_instruct"]
qwen3_8b_base = BUILDERS["qwen3_8b_base"]
lora_qwen3_8b_base = BUILDERS["lora_qwen3_8b_base"]
qlora_qwen3_8b_base = BUILDERS["qlora_qwen3_8b_base"]
qwen3_8b_instruct = BUILDERS["qwen3_8b_instruct"]
lora_qwen3_8b_instruct = BUILDERS["lora_qwen3_8b_instruct"]
qlora_qwen3_8b_instruct = BUILDERS["qlora_qwen3_8b_instruct"]
qwen3_14b_base = BUILDERS["qwen3_14b_base"]
lora_qwen3_14b_base = BUILDERS["lora_qwen3_14b_base"]
qlora_qwen3_14b_base = BUILDERS["qlora_qwen3_14b_base"]
qwen3_14b_instruct = BUILDERS["qwen3_14b_instruct"]
lora_qwen3_14b_instruct = BUILDERS["lora_qwen3_14b_instruct"]
qlora_qwen3_14b_instruct = BUILDERS["qlora_qwen3_14b_instruct"]
qwen3_32b = BUILDERS["qwen3_32b"]
lora_qwen3_32b = BUILDERS["lora_qwen3_32b"]
qlora_qwen3_32b = BUILDERS["qlora_qwen3_32b"]

COMPONENTS = qwen_components(__name__, "qwen3", "Qwen 3", SPEC, "before_rope")
qwen3 = COMPONENTS["qwen3"]
lora_qwen3 = COMPONENTS["lora_qwen3"]


QWEN3_SPECIAL_TOKENS = {
    **QWEN2_5_SPECIAL_TOKENS,
    "<tool_response>": 151665,
    "</tool_response>": 151666,
    "<think>": 151667,
    "</think>": 151668,
}


class Qwen3Tokenizer(Qwen2_5Tokenizer):
    """Byte-level BPE with Qwen 3's special tokens and Qwen 2.5's chat format.

    It has the arguments of :class:`torchtune.models.qwen2.Qwen2Tokenizer`, and ``thinking``.

    Args:
        thinking: ``None`` does not change the reasoning of turns. ``True`` and ``False`` follow Qwen 3's chat template:
            reasoning (``<think>`` in the text, or the field ``reasoning_content``) remains only after the last
            question, and a last turn without reasoning gets an empty block. ``False`` also starts a generated turn with
            an empty block, which disables reasoning.
    """

    def __init__(
        self,
        path: str,
        merges_file: str | None,
        special_tokens: Mapping[str, int] = QWEN3_SPECIAL_TOKENS,
        max_seq_len: int | None = None,
        *,
        prompt_template: PromptTemplateInterface | None = None,
        errors: str = "replace",
        unk_token: str | None = None,
        bos_token: str | None = None,
        eos_token: str = IM_END,
        pad_token: str | None = ENDOFTEXT,
        bpe_cache_size: int = DEFAULT_QWEN2_TOKENIZER_BPE_CACHE_SIZE,
        truncation_type: str = "right",
        parse_special_tokens: bool = False,
        thinking: bool | None = None,
    ) -> None:
        super().__init__(
            path,
            merges_file,
            special_tokens,
            max_seq_len,
            prompt_template=prompt_template,
            errors=errors,
            unk_token=unk_token,
            bos_token=bos_token,
            eos_token=eos_token,
            pad_token=pad_token,
            bpe_cache_size=bpe_cache_size,
            truncation_type=truncation_type,
            parse_special_tokens=parse_special_tokens,
        )
        self.thinking = thinking

    def _prepare(self, messages: list[Message], closed: bool) -> tuple[list[Message], list[str]]:
        """Return the turns to write, and the reasoning that the layout adds before each turn's text.

        ``closed``: the last turn is complete, for training; otherwise a model continues it.
        """
        if self.thinking is None:
            return messages, [""] * len(messages)
        last = len(messages) - 1
        last_question = last  # without a question, no reasoning is written
        for i, message in enumerate(messages):  # responses of tools are in turns of the user, too
            text = message.text_content
            is_tool_response = text.startswith("<tool_response>") and text.endswith("</tool_response>")
            if message.role == "user" and not is_tool_response:
                last_question = i
        prepared = list(messages)
        beginnings = [""] * len(messages)  # what comes before the text of each turn: its reasoning
        for i, message in enumerate(messages):
            is_complete = closed or i < last
            if message.role != "assistant" or not is_complete:
                continue
            reasoning, text = _split_reasoning(message, text_only(message, type(self).__name__))
            # Reasoning about earlier questions is left out; the last turn has a block even without reasoning.
            if i > last_question and (i == last or reasoning):
                reasoning = reasoning.strip("\n")
                beginnings[i] = f"<think>\n{reasoning}\n</think>\n\n"
                text = text.lstrip("\n")
            prepared[i] = Message("assistant", text, message.masked, message.ipython, message.eot, message.extra)
        if self.thinking is False and not closed and messages:
            is_generated = messages[-1].role == "assistant" and not messages[-1].text_content
            if is_generated:  # an empty block disables reasoning
                beginnings[-1] = "<think>\n\n</think>\n\n"
        return prepared, beginnings


def _split_reasoning(message: Message, text: str) -> tuple[str, str]:
    """Split a turn into its reasoning (from the field or the text) and the remaining text, as Qwen's template."""
    reasoning = message.extra.get("reasoning_content")
    if isinstance(reasoning, str):
        return reasoning, text
    if "</think>" not in text:
        return "", text
    parts = text.split("</think>")
    reasoning = parts[0].rstrip("\n").split("<think>")[-1].lstrip("\n")
    return reasoning, parts[-1].lstrip("\n")


qwen3_tokenizer = tokenizer_builder(Qwen3Tokenizer, "qwen3_tokenizer", "Qwen 3")

__all__ = ["SPEC", *BUILDERS, *COMPONENTS, "Qwen3Tokenizer", "qwen3_tokenizer"]
__getattr__, __path__ = former_package(__name__)
