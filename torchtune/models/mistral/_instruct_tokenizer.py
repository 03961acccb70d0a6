"""Mistral's tokenizers since the third version."""

from torchtune.data._prompt_templates import TemplateType, get_prompt_template
from torchtune.modules.transforms.tokenizers._inst_turns import InstTurnsTokenizer


class MistralInstructTokenizer(InstTurnsTokenizer):
    """The layout of Mistral's checkpoints since 7B v0.3, Nemo and later ones included.

    Takes the arguments of :func:`mistral_instruct_tokenizer`, with ``prompt_template`` a template itself.
    """


def mistral_instruct_tokenizer(
    path: str,
    version: int | None = None,
    max_seq_len: int | None = None,
    prompt_template: TemplateType | None = None,
    truncation_type: str = "right",
) -> MistralInstructTokenizer:
    """The tokenizer of Mistral's checkpoints since 7B v0.3, Nemo and later ones included.

    Args:
        path: ``tekken.json``, or the SentencePiece model (``tokenizer.model``, ``tokenizer.model.v3``).
        version: version of the layout; by default what the file says, 3 for SentencePiece.
        max_seq_len: longest row; ``None`` does not cut.
        prompt_template: dotted path of a template, or a mapping role -> [text before, text after].
        truncation_type: which end of a long row is kept: ``"right"`` cuts the end, ``"left"`` the beginning.

    Raises:
        DataError: the file is missing, broken or lacks the control tokens of the version.
    """
    return MistralInstructTokenizer(path, version, max_seq_len, get_prompt_template(prompt_template), truncation_type)
