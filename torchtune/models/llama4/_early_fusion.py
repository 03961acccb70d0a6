"""Builders of Llama 4 with images, with the arguments of older recipes."""

from typing import Any

from torch import nn

from torchtune.models._build import build
from torchtune.models._builders import Builder, dress
from torchtune.models._spec import get_spec
from torchtune.modules.model_fusion import EarlyFusionModel

_PATCH = 200_092  # the token <|patch|>
_DOC = """{text}

    With one of the arguments, the model also has its vision tower, as an :class:`EarlyFusionModel`.

    Args:
        decoder_trainable: whether to train the text decoder; by default True.
        encoder_trainable: whether to train the vision tower; by default False.
        fusion_trainable: whether to train its projector; by default True.
        image_size: width and height of a tile, in pixels; by default 336, and always the checkpoint's.
    """


def with_images(plain: Builder, text_config: dict[str, Any]) -> Builder:
    """Return the builder of a text decoder with the arguments of a model with images."""

    def builder(
        decoder_trainable: bool | None = None,
        encoder_trainable: bool | None = None,
        fusion_trainable: bool | None = None,
        image_size: int | None = None,
    ) -> nn.Module:
        if {decoder_trainable, encoder_trainable, fusion_trainable, image_size} == {None}:
            return plain()
        spec = get_spec("llama4_vl")
        tower = {"hidden_size": 1408, "vision_output_dim": 4096, "image_size": image_size or 336}
        built = build(spec.from_hf_config({"text_config": text_config, "vision_config": tower}), spec)
        trained = (decoder_trainable is not False, bool(encoder_trainable), fusion_trainable is not False)
        model = EarlyFusionModel(built.decoder, {"vision": built.encoder}, {"vision": _PATCH}, *trained)
        model.description, model.spec = built.description, spec
        return model

    return dress(builder, plain.__name__, plain.__module__, _DOC.format(text=plain.__doc__))
