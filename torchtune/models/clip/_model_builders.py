"""Builders for CLIP."""

from torchtune.models.clip._transform import CLIP_MEAN, CLIP_STD, CLIPImageTransform


def clip_vit_224_transform() -> CLIPImageTransform:
    """Build the image transform of CLIP ViT at 224 pixels: one tile, to which the image is scaled."""
    return CLIPImageTransform(
        image_mean=CLIP_MEAN,
        image_std=CLIP_STD,
        tile_size=224,
        max_num_tiles=1,
        resample="bilinear",
        resize_to_max_canvas=True,
    )
