"""Results of a run: its folder, a verdict, a page, a comparison with other runs, and a model card."""

from torchtune._lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
