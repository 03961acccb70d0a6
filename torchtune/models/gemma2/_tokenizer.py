"""Compatibility: Gemma's tokenizer, under the path that configs of this family use."""

from torchtune.models.gemma._tokenizer import GemmaTokenizer, gemma_tokenizer

__all__ = ["GemmaTokenizer", "gemma_tokenizer"]
