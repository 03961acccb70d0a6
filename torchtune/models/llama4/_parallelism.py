"""Compatibility: name of the tensor-parallel plan in configs of Llama 4, whose experts it refuses."""

from torchtune.models.llama3._parallelism import base_llama_tp_plan as decoder_only_tp_plan

__all__ = ["decoder_only_tp_plan"]
