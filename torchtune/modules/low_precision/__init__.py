"""Low precision: quantized base weights, float8 training, quantization-aware training and quantizers."""

from torchtune._lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
