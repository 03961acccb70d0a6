"""Compatibility: the tensor-parallel plan that configs of Llama 4 name. It refuses experts."""

from torchtune.models.llama3._parallelism import base_llama_tp_plan as decoder_only_tp_plan

__all__ = ["decoder_only_tp_plan"]
