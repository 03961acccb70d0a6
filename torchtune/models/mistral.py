"""Mistral.

Llama's architecture with grouped queries (https://arxiv.org/abs/2310.06825). The first release, 7B v0.1, has sliding
windows in its ``config.json``; the sizes here have none.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from torchtune._lazy import former_package
from torchtune.data import DataError, Message, MessageLike, PromptTemplateInterface, Role, as_messages, with_tags
from torchtune.models._builders import classifier_builders, component_builders, model_builders
from torchtune.models._description import Description
from torchtune.models._hf_config import MISTRAL
from torchtune.models._spec import family
from torchtune.models._tokenizer_builder import tokenizer_builder, with_defaults
from torchtune.models._weight_names import GGUF, HF_INTERLEAVED, META
from torchtune.tokenizers import InstTurnsTokenizer, SentencePieceChatTokenizer

SPEC = family(
    "mistral", MISTRAL, HF_INTERLEAVED, formats={"meta": META, "gguf": GGUF}, model_types=("MISTRAL", "REWARD")
)

_7B = Description(
    vocab_size=32_000,
    num_layers=32,
    embed_dim=4096,
    intermediate_dim=14_336,
    max_seq_len=32_768,
    num_heads=32,
    num_kv_heads=8,
)
_NEMO = replace(
    _7B,
    vocab_size=131_072,
    num_layers=40,
    embed_dim=5120,
    head_dim=128,
    max_seq_len=131_072,
    rope_base=1e6,
)
_SMALL = replace(_NEMO, intermediate_dim=32_768, max_seq_len=32_768, rope_base=1e8)
_22B = replace(
    _SMALL, vocab_size=32_768, num_layers=56, embed_dim=6144, intermediate_dim=16_384, num_heads=48, rope_base=1e6
)

SIZES = {
    "mistral_7b": _7B,
    "mistral_7b_v0_3": replace(_7B, vocab_size=32_768, rope_base=1e6),
    "mistral_nemo_12b": _NEMO,
    "mistral_small_22b": _22B,
    "mistral_small_24b": _SMALL,
    "mistral_small_3_1_24b": replace(_SMALL, max_seq_len=131_072, rope_base=1e9),
    "ministral_8b": replace(_SMALL, num_layers=36, embed_dim=4096, intermediate_dim=12_288),
}
REWARD_SIZES = {"mistral_reward_7b": replace(SIZES["mistral_7b"], num_classes=1)}
BUILDERS = {
    **model_builders(__name__, "Mistral", SPEC, SIZES),
    **model_builders(__name__, "the reward model of Mistral", SPEC, REWARD_SIZES),
}
mistral_7b = BUILDERS["mistral_7b"]
lora_mistral_7b = BUILDERS["lora_mistral_7b"]
qlora_mistral_7b = BUILDERS["qlora_mistral_7b"]
mistral_7b_v0_3 = BUILDERS["mistral_7b_v0_3"]
lora_mistral_7b_v0_3 = BUILDERS["lora_mistral_7b_v0_3"]
qlora_mistral_7b_v0_3 = BUILDERS["qlora_mistral_7b_v0_3"]
mistral_nemo_12b = BUILDERS["mistral_nemo_12b"]
lora_mistral_nemo_12b = BUILDERS["lora_mistral_nemo_12b"]
qlora_mistral_nemo_12b = BUILDERS["qlora_mistral_nemo_12b"]
mistral_small_22b = BUILDERS["mistral_small_22b"]
lora_mistral_small_22b = BUILDERS["lora_mistral_small_22b"]
qlora_mistral_small_22b = BUILDERS["qlora_mistral_small_22b"]
mistral_small_24b = BUILDERS["mistral_small_24b"]
lora_mistral_small_24b = BUILDERS["lora_mistral_small_24b"]
qlora_mistral_small_24b = BUILDERS["qlora_mistral_small_24b"]
mistral_small_3_1_24b = BUILDERS["mistral_small_3_1_24b"]
lora_mistral_small_3_1_24b = BUILDERS["lora_mistral_small_3_1_24b"]
qlora_mistral_small_3_1_24b = BUILDERS["qlora_mistral_small_3_1_24b"]
ministral_8b = BUILDERS["ministral_8b"]
lora_ministral_8b = BUILDERS["lora_ministral_8b"]
qlora_ministral_8b = BUILDERS["qlora_ministral_8b"]
mistral_reward_7b = BUILDERS["mistral_reward_7b"]
lora_mistral_reward_7b = BUILDERS["lora_mistral_reward_7b"]
qlora_mistral_reward_7b = BUILDERS["qlora_mistral_reward_7b"]

COMPONENTS = component_builders(
    __name__,
    "mistral",
    "Mistral",
    SPEC,
    Description,
    ("vocab_size", "num_layers", "num_heads", "num_kv_heads", "embed_dim", "intermediate_dim", "max_seq_len"),
    attn_dropout=0.0,
    norm_eps=1e-5,
    rope_base=10_000,
)
COMPONENTS |= classifier_builders(__name__, COMPONENTS)
mistral = COMPONENTS["mistral"]
lora_mistral = COMPONENTS["lora_mistral"]
mistral_classifier = COMPONENTS["mistral_classifier"]
lora_mistral_classifier = COMPONENTS["lora_mistral_classifier"]


class MistralChatTemplate(PromptTemplateInterface):
    """``[INST] {user} [/INST] {assistant}``, without system messages."""

    template: ClassVar[dict[Role, tuple[str, str]]] = {
        "user": ("[INST] ", " [/INST] "),
        "assistant": ("", ""),
        "ipython": ("", ""),
    }

    def __call__(self, messages: Sequence[MessageLike], inference: bool = False) -> list[Message]:
        """Apply the template to messages. Raises :class:`DataError` for a system message."""
        messages = as_messages(messages)
        if any(message.role == "system" for message in messages):
            raise DataError(
                "Mistral's layout has no system turn: put its text into the first user turn, or leave it out."
            )
        return [with_tags(message, *self.template.get(message.role, ("", ""))) for message in messages]


class MistralTokenizer(SentencePieceChatTokenizer):
    """SentencePiece tokenizer with Mistral's prompt template.

    Args:
        path: path of ``tokenizer.model``.
        max_seq_len: maximum number of tokens; ``None``: no truncation.
        prompt_template: template of conversations; ``None`` concatenates the messages.
        truncation_type: ``"right"`` cuts the end of a long row, ``"left"`` the beginning.

    Raises:
        DataError: the file is missing or broken.
    """

    __init__ = with_defaults(SentencePieceChatTokenizer.__init__, prompt_template=MistralChatTemplate())


mistral_tokenizer = tokenizer_builder(MistralTokenizer, "mistral_tokenizer", "Mistral")


class MistralInstructTokenizer(InstTurnsTokenizer):
    """Tokenizer of Mistral's checkpoints since 7B v0.3, such as Nemo.

    It has the arguments of :func:`mistral_instruct_tokenizer`, but ``prompt_template`` is a template object.
    """


mistral_instruct_tokenizer = tokenizer_builder(
    MistralInstructTokenizer, "mistral_instruct_tokenizer", "Mistral 7B v0.3 and later checkpoints"
)

__all__ = [
    "SPEC",
    *BUILDERS,
    *COMPONENTS,
    "MistralChatTemplate",
    "MistralInstructTokenizer",
    "MistralTokenizer",
    "mistral_instruct_tokenizer",
    "mistral_tokenizer",
]
__getattr__, __path__ = former_package(__name__)
