"""Gemma.

Norms scale by 1 + weight, embeddings are scaled by the square root of the width, and the activation of the feed-forward
is GELU (https://arxiv.org/abs/2403.08295).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

from torchtune._lazy import former_package
from torchtune.data import DataError, Message, MessageLike, PromptTemplateInterface, Role, as_messages
from torchtune.models._builders import component_builders, model_builders
from torchtune.models._description import Description
from torchtune.models._hf_config import HFFormat
from torchtune.models._hf_fields import Fields
from torchtune.models._spec import family
from torchtune.models._tokenizer_builder import tokenizer_builder
from torchtune.models._weight_names import HF_INTERLEAVED
from torchtune.tokenizers import SentencePieceChatTokenizer


def _read(fields: Fields) -> dict[str, Any]:
    """Compute the embedding scale from the width; early files name the exact GELU but mean its tanh approximation."""
    values: dict[str, Any] = {"embed_scale": fields.take("hidden_size") ** 0.5}
    if fields.peek("hidden_act") == "gelu":
        values["activation"] = "gelu_tanh"
    return values


FORMAT = HFFormat(
    "GemmaForCausalLM",
    "gemma",
    "interleaved",
    biases="attention_bias",
    activation=("hidden_act", "gelu_pytorch_tanh"),
    fixed={"norm_unit_offset": True},
    required_values={"hidden_activation": "gelu_pytorch_tanh"},
    read_more=_read,
    defaults={
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "num_key_value_heads": 16,
        "tie_word_embeddings": True,
    },
)
SPEC = family("gemma", FORMAT, HF_INTERLEAVED, model_types=("GEMMA",))

gemma_description = partial(
    FORMAT.describe,
    head_dim=256,
    max_seq_len=8192,
    norm_eps=1e-6,
    tie_word_embeddings=True,
)

SIZES = {
    "gemma_2b": gemma_description(
        vocab_size=256_000,
        num_layers=18,
        embed_dim=2048,
        intermediate_dim=16_384,
        num_heads=8,
        num_kv_heads=1,
        embed_scale=2048**0.5,
    ),
    "gemma_7b": gemma_description(
        vocab_size=256_000,
        num_layers=28,
        embed_dim=3072,
        intermediate_dim=24_576,
        num_heads=16,
        num_kv_heads=16,
        embed_scale=3072**0.5,
    ),
}
BUILDERS = model_builders(__name__, "Gemma", SPEC, SIZES)
gemma_2b = BUILDERS["gemma_2b"]
lora_gemma_2b = BUILDERS["lora_gemma_2b"]
qlora_gemma_2b = BUILDERS["qlora_gemma_2b"]
gemma_7b = BUILDERS["gemma_7b"]
lora_gemma_7b = BUILDERS["lora_gemma_7b"]
qlora_gemma_7b = BUILDERS["qlora_gemma_7b"]


def _describe(embed_dim: int, **sizes: Any) -> Description:
    return gemma_description(embed_dim=embed_dim, embed_scale=embed_dim**0.5, **sizes)


COMPONENTS = component_builders(
    __name__,
    "gemma",
    "Gemma",
    SPEC,
    _describe,
    (
        "vocab_size",
        "num_layers",
        "num_heads",
        "head_dim",
        "num_kv_heads",
        "embed_dim",
        "intermediate_dim",
        "max_seq_len",
    ),
    attn_dropout=0.0,
    norm_eps=1e-6,
    rope_base=10_000,
)
gemma = COMPONENTS["gemma"]
lora_gemma = COMPONENTS["lora_gemma"]


class GemmaChatTemplate(PromptTemplateInterface):
    """``<start_of_turn>user\\n{text}<end_of_turn>\\n<start_of_turn>model\\n{text}<end_of_turn>\\n``.

    White space around a text is stripped. System messages are prepended to the next user turn, as in Gemma 3. The row
    has one beginning-of-sequence token and ends with its last turn.
    """

    template: ClassVar[dict[Role, tuple[str, str]]] = {
        "user": ("<start_of_turn>user\n", "<end_of_turn>\n"),
        "assistant": ("<start_of_turn>model\n", "<end_of_turn>\n"),
    }
    end_of_turn: ClassVar[str] = "<end_of_turn>"

    def __call__(self, messages: Sequence[MessageLike], inference: bool = False) -> list[Message]:
        """Apply the template to messages; system messages are merged into the next user turn.

        With ``inference`` a final assistant turn stays open.

        Raises:
            DataError: a role is not ``system``, ``user`` or ``assistant``, no turn of the user follows a system
                message, or a message has an image.
        """
        messages = as_messages(messages)
        formatted = []
        # Parts of a text that touch are joined, because a tokenizer may merge characters across their border.
        system: list[str] = []  # parts of the system text, until the next user turn
        for i, message in enumerate(messages):
            if message.contains_media:
                raise DataError("Gemma's layout has no place for an image.")
            if message.role not in ("system", *self.template):
                raise DataError(f"Gemma's layout has no place for a turn of '{message.role}'.")
            texts = [item["content"] for item in message.content]
            if message.role == "system":
                system = _joined(system, _joined(texts, ["\n\n"]))
                continue
            texts = _stripped(texts)
            if message.role == "user":
                texts = _joined(system, texts)
                system = []
            before, after = self.template[message.role]
            texts = _joined([before], texts)
            is_open = inference and message.role == "assistant" and i == len(messages) - 1
            if not is_open:  # the model continues an open turn
                texts = _joined(texts, [after])
            content = [{"type": "text", "content": text} for text in texts]
            formatted.append(Message(role=message.role, content=content, masked=message.masked))
        if system:
            raise DataError("Gemma's layout has no place for a system message without a later turn of the user.")
        return formatted


def _stripped(texts: list[str]) -> list[str]:
    """Strip white space at the beginning and end of a text in parts."""
    while texts and not texts[0].strip():
        texts = texts[1:]
    while texts and not texts[-1].strip():
        texts = texts[:-1]
    if not texts:
        return []
    texts = [texts[0].lstrip(), *texts[1:]]
    return [*texts[:-1], texts[-1].rstrip()]


def _joined(*lists: list[str]) -> list[str]:
    """Concatenate lists of parts; adjacent parts of two lists are joined, so that they are tokenized as one text."""
    joined: list[str] = []
    for parts in lists:
        if joined and parts:
            joined = [*joined[:-1], joined[-1] + parts[0], *parts[1:]]
        else:
            joined = [*joined, *parts]
    return joined


class GemmaTokenizer(SentencePieceChatTokenizer):
    """SentencePiece tokenizer of Gemma and Gemma 2. ``prompt_template`` adds the turn markers.

    Turn markers are control tokens only in the template; in the content of a message they are plain text.

    Args:
        path: path of ``tokenizer.model``.
        max_seq_len: maximum number of tokens; ``None``: no truncation.
        prompt_template: template of conversations; ``None`` concatenates the messages.
        truncation_type: ``"right"`` cuts the end of a long row, ``"left"`` the beginning.

    Raises:
        DataError: the file is missing or broken.
    """

    control_texts: ClassVar[tuple[str, ...]] = ("<start_of_turn>", "<end_of_turn>")


gemma_tokenizer = tokenizer_builder(GemmaTokenizer, "gemma_tokenizer", "Gemma")

__all__ = ["SPEC", *BUILDERS, *COMPONENTS, "GemmaChatTemplate", "GemmaTokenizer", "gemma_tokenizer"]
__getattr__, __path__ = former_package(__name__)
