"""A random Llama 3.2 Vision of two fusion layers, as ``transformers`` saves it."""

import base64
import json
from pathlib import Path
from typing import Any

import torch

from tests.tiny import write_tokenizer
from tests.tiny_images import write_questions

TILE, PATCH, TILES, TOKENS = 28, 14, 4, 5  # tokens: patches of a tile, and the learned one
IMAGE_TOKEN = 316  # the first one after the vocabulary
INDICES = [1, 2]  # layers of the encoder whose inputs are projected beside its output


def mllama_config() -> Any:
    """``MllamaConfig`` of 4 self-attention and 2 cross-attention layers, and an encoder of 3 + 2 layers."""
    from transformers import MllamaConfig

    text = {
        "vocab_size": IMAGE_TOKEN,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "cross_attention_layers": [1, 4],
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    vision = {
        "hidden_size": 16,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_global_layers": 2,
        "attention_heads": 2,
        "image_size": TILE,
        "patch_size": PATCH,
        "vision_output_dim": 16 * (1 + len(INDICES)),
        "intermediate_layers_indices": INDICES,
    }
    return MllamaConfig(text_config=text, vision_config=vision, image_token_index=IMAGE_TOKEN)


def mllama(seed: int = 0) -> Any:
    """A random ``MllamaForConditionalGeneration`` with open gates, and embeddings of tiles as trained ones are."""
    from transformers import MllamaForConditionalGeneration

    torch.manual_seed(seed)
    model = MllamaForConditionalGeneration(mllama_config()).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.3 if parameter.dim() > 1 else 0.2)
            if "norm" in name and name.endswith("weight"):
                parameter.add_(1.0)
        vision = model.model.vision_model
        for table in (
            vision.pre_tile_positional_embedding.embedding,
            vision.post_tile_positional_embedding.embedding,
            vision.gated_positional_embedding.tile_embedding,
        ):
            places = torch.randn(TILES, TILES, table.weight.shape[1] // TILES) * 0.3
            table.weight.zero_()  # of padding, and of no image
            for number, (height, width) in enumerate(vision.config.supported_aspect_ratios, 1):
                row = table.weight[number].view(TILES, -1)
                row[: height * width] = places[:height, :width].flatten(0, 1)
    return model


def write_vision_checkpoint(folder: Path, seed: int = 0) -> Path:
    """Save :func:`mllama` in ``folder``, with a tokenizer, and return the folder."""
    from tokenizers import Tokenizer

    mllama(seed).save_pretrained(folder)
    assert write_tokenizer(folder) == IMAGE_TOKEN
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|image|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def images(*rows: list[tuple[int, int]], most: int = TILES, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random images of these aspect ratios, row by row: ``images`` and ``aspect_ratio`` of our encoder.

    Args:
        rows: (height, width) in tiles of the images of each row.
        most: tiles that the tensor has room for.
        seed: of the pixels.
    """
    generator = torch.Generator().manual_seed(seed)
    per_row = max(map(len, rows))
    pixels = torch.zeros(len(rows), per_row, most, 3, TILE, TILE)
    ratios = torch.zeros(len(rows), per_row, 2, dtype=torch.int64)
    for i, row in enumerate(rows):
        for j, (height, width) in enumerate(row):
            pixels[i, j, : height * width] = torch.randn(height * width, 3, TILE, TILE, generator=generator)
            ratios[i, j] = torch.tensor([height, width])
    return {"images": pixels, "aspect_ratio": ratios}


def sees(tokens: torch.Tensor, aspect_ratio: torch.Tensor, most: int = TILES) -> torch.Tensor:
    """bool ``[b, s, images * tiles * tokens]``: text sees the last image before it, and padding nothing."""
    b, s = tokens.shape
    seen = torch.zeros(b, s, aspect_ratio.shape[1], most, TOKENS, dtype=torch.bool)
    number = (tokens == IMAGE_TOKEN).cumsum(1) - 1
    for i in range(b):
        for j in range(s):
            if number[i, j] >= 0:
                seen[i, j, number[i, j], : int(aspect_ratio[i, number[i, j]].prod())] = True
    return seen.flatten(2)


def logits_of_transformers(
    model: Any, tokens: torch.Tensor, encoder_input: dict[str, torch.Tensor], mask: torch.Tensor
) -> torch.Tensor:
    """Logits ``[b, s, v]`` of ``transformers`` for our inputs.

    Two things are put right, in which its later releases differ from the one that came with the weights (4.45) and
    from Meta's own code: layers of the encoder whose *inputs* are projected, and text that sees no image, which
    cross-attention leaves as it is.
    """
    vision = model.model.vision_model
    vision.intermediate_layers_indices = [index - 1 for index in INDICES]
    b, per_row = encoder_input["images"].shape[:2]
    ratios = encoder_input["aspect_ratio"]
    numbered_ratios = [[0, 0], *vision.config.supported_aspect_ratios]
    id_rows = []
    for row in ratios.tolist():
        id_rows.append([numbered_ratios.index(ratio) for ratio in row])
    ids = torch.tensor(id_rows)
    tiles = torch.arange(TILES) < ratios.prod(-1, keepdim=True).clamp(min=1)
    blind = ~mask.any(-1, keepdim=True)

    def leave(module: Any, args: Any, output: Any) -> Any:
        return (output[0].masked_fill(blind, 0.0), *output[1:])

    layers = [model.model.language_model.layers[i] for i in model.model.language_model.cross_attention_layers]
    hooks = [layer.cross_attn.register_forward_hook(leave) for layer in layers]
    try:
        return model(
            input_ids=tokens,
            pixel_values=encoder_input["images"],
            aspect_ratio_ids=ids,
            aspect_ratio_mask=tiles.long(),
            cross_attention_mask=mask.view(b, tokens.shape[1], per_row, TILES, TOKENS)[..., 0].long(),
            use_cache=False,
        ).logits
    finally:
        for hook in hooks:
            hook.remove()


class Rows(torch.utils.data.Dataset):
    """Rows of random text, two of three with an image at their beginning, as a dataset of images yields them.

    Args:
        tokenizer: what recipes hand over; not used.
        count: of rows.
        with_images: whether there are images at all.
    """

    def __init__(self, tokenizer: Any = None, count: int = 6, with_images: bool = True) -> None:
        self.count = count
        self.with_images = with_images

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        text = torch.randint(3, 300, (5 + index % 2,), generator=generator).tolist()
        ratios = [(1 + index % 2, 2)] if index % 3 and self.with_images else []
        tokens = torch.tensor([1, *[IMAGE_TOKEN] * len(ratios), *text])
        inputs = images(ratios or [(1, 1)], seed=index)
        mask = sees(tokens[None], inputs["aspect_ratio"])[0]
        counts = [height * width for height, width in ratios]
        return {
            "tokens": tokens,
            "labels": torch.cat([torch.tensor([-100, -100]), tokens[3:], torch.tensor([-100])]),
            "encoder_input": {
                "images": [inputs["images"][0, j, :count] for j, count in enumerate(counts)],
                "aspect_ratio": [torch.tensor(ratio) for ratio in ratios],
            },
            "encoder_mask": [mask[:, : count * TOKENS] for count in counts],
        }


def with_parts(checkpoint_dir: str, **trainable: bool) -> Any:
    """The model of a checkpoint, some of its parts frozen: ``decoder_trainable`` …, as builders of known sizes have."""
    from torchtune.models.llama3_2_vision import SPEC
    from torchtune.utils import read_json

    description = SPEC.from_hf_config(read_json(Path(checkpoint_dir) / "config.json", ValueError))
    return SPEC.builder(description, SPEC, **trainable)


def write_pictures(folder: Path, count: int = 12, times: int = 1) -> dict[str, Any]:
    """Pictures of one colour and questions for it, ``times`` each, in files; settings of a recipe that reads them."""
    names = "begin_of_text end_of_text start_header_id end_header_id eom_id eot_id python_tag".split()
    special = [{"content": f"<|{name}|>", "id": 256 + i} for i, name in enumerate(names)]
    special.append({"content": "<|image|>", "id": IMAGE_TOKEN})
    (folder / "special.json").write_text(json.dumps({"added_tokens": special}))
    ranks = (b"%s %d\n" % (base64.b64encode(bytes([i])), i) for i in range(256))
    (folder / "tokenizer.model").write_bytes(b"".join(ranks))
    return {
        "tokenizer": {
            "_component_": "torchtune.models.llama3_2_vision.Llama3VisionTransform",
            "path": str(folder / "tokenizer.model"),
            "special_tokens_path": str(folder / "special.json"),
            "tile_size": TILE,
            "patch_size": PATCH,
            "max_seq_len": 64,
        },
        "dataset": {
            "_component_": "torchtune.datasets.multimodal.llava_instruct_dataset",
            "source": str(write_questions(folder, ((20 + 9 * i, 90 - 5 * i) for i in range(count)), times)),
            "image_dir": str(folder),
        },
    }
