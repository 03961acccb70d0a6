"""Compatibility: the tokenizer of Gemma, under the family whose configs name it."""

from torchtune.models.gemma._tokenizer import GemmaTokenizer, gemma_tokenizer

__all__ = ["GemmaTokenizer", "gemma_tokenizer"]
