"""Sampling text from models."""

from torchtune.generation._answers import answer_limit, answer_prompts, model_digest, prompt_row, prompt_tokens
from torchtune.generation._errors import GenerationError
from torchtune.generation._fast_linear import fast_linears
from torchtune.generation._generation import generate, generate_next_token, sample
from torchtune.generation._masks import get_causal_mask_from_padding_mask, get_position_ids_from_padding_mask
from torchtune.generation._prompt_file import AnswerFile, Prompt, read_prompts
from torchtune.generation._stream import stream
from torchtune.generation._tokens import GeneratedTokens, TokenStep, generate_tokens, stream_tokens

__all__ = [
    "AnswerFile",
    "GeneratedTokens",
    "GenerationError",
    "Prompt",
    "TokenStep",
    "answer_limit",
    "answer_prompts",
    "fast_linears",
    "generate",
    "generate_next_token",
    "generate_tokens",
    "get_causal_mask_from_padding_mask",
    "get_position_ids_from_padding_mask",
    "model_digest",
    "prompt_row",
    "prompt_tokens",
    "read_prompts",
    "sample",
    "stream",
    "stream_tokens",
]
