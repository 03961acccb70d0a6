"""Tokenizer of Llama 4."""

from torchtune.tokenizers import HeaderTurns

_FIRST_ID = 200_000
_TEXT, _VISION, _REASONING = (
    [f"{kind}reserved_special_token_{i}" for i in range(count)]
    for kind, count in (("text_post_train_", 69), ("vision_", 1048), ("reasoning_", 8))
)
_NAMES = (
    *("begin_of_text", "end_of_text", "fim_prefix", "fim_middle", "fim_suffix"),
    *("header_start", "header_end", "eom", "eot", "step"),
    *(*_TEXT[:8], "finetune_right_pad", *_TEXT[8:]),
    *("image_start", "image_end", *_VISION[:2], "tile_x_separator", "tile_y_separator", *_VISION[2:6]),
    *("image", _VISION[6], "patch", *_VISION[7:]),
    *(*_REASONING, "reasoning_thinking_start", "reasoning_thinking_end"),
    *(f"reserved_special_token_{i}" for i in range(904)),
)
LLAMA4_SPECIAL_TOKENS = {f"<|{name}|>": _FIRST_ID + i for i, name in enumerate(_NAMES)}
O200K_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Llama4Tokenizer(HeaderTurns):
    """tiktoken tokenizer with Llama 4's chat format.

    Args:
        path: path of Meta's ``tokenizer.model``.
        special_tokens: text -> id; by default Llama 4's.
        max_seq_len: maximum number of tokens; ``None``: no truncation.
        prompt_template: adds texts to the messages before they are formatted.
        truncation_type: ``"right"`` cuts the end of a long row, ``"left"`` the beginning.

    Raises:
        DataError: the file is missing or broken, or a required special token is missing.
    """

    family = "Llama 4"
    pattern = O200K_PATTERN
    required = ("begin_of_text", "end_of_text", "header_start", "header_end", "eom", "eot")
    optional = ("finetune_right_pad", "step")
    default_tokens = LLAMA4_SPECIAL_TOKENS
