"""Tokenizer of Mistral's models since 7B v0.3."""

from torchtune.models._tokenizer_builders import tokenizer_builder
from torchtune.tokenizers import InstTurnsTokenizer


class MistralInstructTokenizer(InstTurnsTokenizer):
    """Tokenizer of Mistral's checkpoints since 7B v0.3, such as Nemo.

    It has the arguments of :func:`mistral_instruct_tokenizer`, but ``prompt_template`` is a template object.
    """


mistral_instruct_tokenizer = tokenizer_builder(
    MistralInstructTokenizer, "mistral_instruct_tokenizer", "Mistral 7B v0.3 and later checkpoints"
)
