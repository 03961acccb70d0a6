"""Llama 2.

The decoder that other families modify: norms before attention and feed-forward, SwiGLU, and RoPE
(https://arxiv.org/abs/2307.09288).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from torchtune._lazy import former_package
from torchtune.data import Message, MessageLike, PromptTemplateInterface, Role, as_messages, with_tags
from torchtune.models._builders import classifier_builders, component_builders, model_builders
from torchtune.models._description import Description
from torchtune.models._hf_config import LLAMA
from torchtune.models._spec import family
from torchtune.models._tokenizer_builder import tokenizer_builder, with_defaults
from torchtune.models._weight_names import GGUF, HF_INTERLEAVED, META
from torchtune.tokenizers import SentencePieceChatTokenizer

SPEC = family("llama2", LLAMA, HF_INTERLEAVED, formats={"meta": META, "gguf": GGUF}, model_types=("LLAMA2", "REWARD"))

_COMMON = {
    "vocab_size": 32_000,
    "max_seq_len": 4096,
}

SIZES = {
    "llama2_7b": Description(
        **_COMMON, num_layers=32, embed_dim=4096, intermediate_dim=11_008, num_heads=32, num_kv_heads=32
    ),
    "llama2_13b": Description(
        **_COMMON, num_layers=40, embed_dim=5120, intermediate_dim=13_824, num_heads=40, num_kv_heads=40
    ),
    "llama2_70b": Description(
        **_COMMON, num_layers=80, embed_dim=8192, intermediate_dim=28_672, num_heads=64, num_kv_heads=8
    ),
}
REWARD_SIZES = {"llama2_reward_7b": replace(SIZES["llama2_7b"], num_classes=1)}
BUILDERS = {
    **model_builders(__name__, "Llama 2", SPEC, SIZES),
    **model_builders(__name__, "the reward model of Llama 2", SPEC, REWARD_SIZES),
}
llama2_7b = BUILDERS["llama2_7b"]
lora_llama2_7b = BUILDERS["lora_llama2_7b"]
qlora_llama2_7b = BUILDERS["qlora_llama2_7b"]
llama2_13b = BUILDERS["llama2_13b"]
lora_llama2_13b = BUILDERS["lora_llama2_13b"]
qlora_llama2_13b = BUILDERS["qlora_llama2_13b"]
llama2_70b = BUILDERS["llama2_70b"]
lora_llama2_70b = BUILDERS["lora_llama2_70b"]
qlora_llama2_70b = BUILDERS["qlora_llama2_70b"]
llama2_reward_7b = BUILDERS["llama2_reward_7b"]
lora_llama2_reward_7b = BUILDERS["lora_llama2_reward_7b"]
qlora_llama2_reward_7b = BUILDERS["qlora_llama2_reward_7b"]

COMPONENTS = component_builders(
    __name__,
    "llama2",
    "Llama 2",
    SPEC,
    Description,
    ("vocab_size", "num_layers", "num_heads", "num_kv_heads", "embed_dim", "max_seq_len"),
    attn_dropout=0.0,
    intermediate_dim=None,
    norm_eps=1e-5,
    rope_base=10_000.0,
)
COMPONENTS |= classifier_builders(__name__, COMPONENTS)
llama2 = COMPONENTS["llama2"]
lora_llama2 = COMPONENTS["lora_llama2"]
llama2_classifier = COMPONENTS["llama2_classifier"]
lora_llama2_classifier = COMPONENTS["lora_llama2_classifier"]


class Llama2ChatTemplate(PromptTemplateInterface):
    """``[INST] <<SYS>>\\n{system}\\n<</SYS>>\\n\\n{user} [/INST] {assistant}``.

    The system message is part of the next user turn.
    """

    template: ClassVar[dict[Role, tuple[str, str]]] = {
        "system": ("<<SYS>>\n", "\n<</SYS>>\n\n"),
        "user": ("[INST] ", " [/INST] "),
        "assistant": ("", ""),
        "ipython": ("", ""),
    }

    def __call__(self, messages: Sequence[MessageLike], inference: bool = False) -> list[Message]:
        """Apply the template to messages; system messages are merged into the next user turn."""
        system: list[dict[str, Any]] = []
        formatted = []
        for message in as_messages(messages):
            if message.role == "system":
                system = with_tags(message, *self.template["system"]).content
                continue
            if message.role == "user":
                content = [*system, *message.content]
                system = []
                message = Message(role="user", content=content, masked=message.masked, eot=message.eot)
            formatted.append(with_tags(message, *self.template.get(message.role, ("", ""))))
        return formatted


class Llama2Tokenizer(SentencePieceChatTokenizer):
    """SentencePiece tokenizer with Llama 2's prompt template.

    Args:
        path: path of ``tokenizer.model``.
        max_seq_len: maximum number of tokens; ``None``: no truncation.
        prompt_template: template of conversations; ``None`` concatenates the messages.
        truncation_type: ``"right"`` cuts the end of a long row, ``"left"`` the beginning.

    Raises:
        DataError: the file is missing or broken.
    """

    __init__ = with_defaults(SentencePieceChatTokenizer.__init__, prompt_template=Llama2ChatTemplate())


llama2_tokenizer = tokenizer_builder(Llama2Tokenizer, "llama2_tokenizer", "Llama 2")

__all__ = ["SPEC", *BUILDERS, *COMPONENTS, "Llama2ChatTemplate", "Llama2Tokenizer", "llama2_tokenizer"]
__getattr__, __path__ = former_package(__name__)
