"""CLIP of certain sizes."""

from torchtune.models.clip._transform import CLIP_MEAN, CLIP_STD, CLIPImageTransform


def clip_vit_224_transform() -> CLIPImageTransform:
    """Images of CLIP ViT at 224 pixels: one tile, which the image fills as far as its aspect ratio allows."""
    return CLIPImageTransform(
        image_mean=CLIP_MEAN,
        image_std=CLIP_STD,
        tile_size=224,
        max_num_tiles=1,
        resample="bilinear",
        resize_to_max_canvas=True,
    )
