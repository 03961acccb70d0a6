"""Image encoders: :class:`VisionTransformer` for tiled images (CLIP), :class:`VisionTower` for images of any size.

Both run the same layers, but differ in what a sequence is. The tower has a ragged list of patches, and boundaries
between images that attention does not cross. The transformer has the tiles of an image as one sequence, padded to the
number of tiles in pre-training; the padding takes part in attention (:class:`TileMask`), and the features of
checkpoints depend on it.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchtune.data import Documents, Grid, Images, token_counts
from torchtune.modules.kernels.attention import TileMask
from torchtune.modules.kernels.documents import Boundaries
from torchtune.modules.position_embeddings import GridRotaryPositionalEmbeddings
from torchtune.modules.rms_norm import Fp32LayerNorm
from torchtune.utils import to_device


@dataclass(frozen=True)
class Tiles:
    """Layout of a batch of image tiles as encoder sequences.

    A sequence ``[max_num_tiles * (tokens + padding), d]`` has the tokens of all tiles, then the padding of all tiles.
    Images are sorted by their number of tiles.

    Attributes:
        shape: (batch size, images per row, tiles per image) of the input.
        max_num_tiles: tiles per sequence; missing tiles of an image are padding.
        tokens: tokens per tile.
        padding: padding positions per tile.
        order: int64 ``[b * images]``, indices of the sorted images; None: the order of the input.
        mask: attention mask of the sequences.
        ratios: int64 ``[b * images, 2]``: (height, width) of each sorted image in tiles.
    """

    shape: tuple[int, int, int]
    max_num_tiles: int
    tokens: int
    padding: int
    order: Tensor | None
    mask: TileMask
    ratios: Tensor

    @classmethod
    def of(cls, images: Tensor, aspect_ratio: Tensor, max_num_tiles: int, tokens: int, multiple: int = 1) -> "Tiles":
        """Compute the layout of a batch of images.

        Args:
            images: ``[b, images, tiles, c, h, w]``.
            aspect_ratio: int64 ``[b, images, 2]``: (height, width) of each image in tiles; 0 for padding images.
            max_num_tiles: tiles per sequence.
            tokens: tokens per tile.
            multiple: pad the positions of a tile to a multiple of this.

        Raises:
            ValueError: an image has more tiles than ``images`` or than ``max_num_tiles``.
        """
        batch_size, images_per_row, num_tiles = images.shape[:3]
        if num_tiles > max_num_tiles:
            raise ValueError(f"Images of {num_tiles} tiles are too large for an encoder of {max_num_tiles} tiles.")
        ratios = aspect_ratio.reshape(-1, 2)  # [b * images, 2]
        counts = []  # of tiles, by image
        for height, width in ratios.tolist():
            if height * width > num_tiles:
                raise ValueError(
                    f"aspect_ratio says {(height, width)} for an image of which {num_tiles} tiles are given."
                )
            counts.append(max(height * width, 1))  # a padding image is one tile
        # Sorted, images of one size are consecutive, and the mask attends to them at once.
        input_order = list(range(len(counts)))
        sorted_order = sorted(input_order, key=lambda image: counts[image])
        order = None  # already sorted: no copies of the images in another order
        ratios = ratios.to(images.device)
        if sorted_order != input_order:
            order = to_device(sorted_order, images.device)
            ratios = ratios[order]
        groups = []  # number of images of a size, and real positions of each
        for count in sorted(set(counts)):
            groups.append((counts.count(count), count * tokens))
        return cls(
            shape=(batch_size, images_per_row, num_tiles),
            max_num_tiles=max_num_tiles,
            tokens=tokens,
            padding=-tokens % multiple,  # up to the next multiple
            order=order,
            mask=TileMask(tuple(groups)),
            ratios=ratios,
        )

    def pad_and_sort(self, x: Tensor) -> Tensor:
        """Pad and sort patches ``[b * images * tiles, n, d]``: ``[b * images, max_num_tiles, n, d]``.

        Padding tiles are zero.
        """
        num_tiles = self.shape[2]
        num_missing = self.max_num_tiles - num_tiles
        x = x.unflatten(0, (-1, num_tiles))  # [b * images, tiles, n, d]
        x = F.pad(x, (0, 0, 0, 0, 0, num_missing))  # after the tiles; the last dimensions come first here
        if self.order is not None:
            x = x[self.order]
        return x

    def join(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
        """Concatenate tokens ``[n, max_num_tiles, tokens, d]`` and padding, by default zeros, to ``[n, s, d]``."""
        if padding is None:
            num_images, num_tiles, _, width = tokens.shape
            padding = tokens.new_zeros(num_images, num_tiles, self.padding, width)
        return torch.cat([tokens.flatten(1, 2), padding.flatten(1, 2)], dim=1)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Split sequences ``[n, s, d]`` into tokens and padding; the inverse of :meth:`join`."""
        num_tokens = self.max_num_tiles * self.tokens
        num_padding = self.max_num_tiles * self.padding
        tokens, padding = x.split([num_tokens, num_padding], dim=1)
        by_tile = (self.max_num_tiles, -1)
        return tokens.unflatten(1, by_tile), padding.unflatten(1, by_tile)

    def unpad(self, x: Tensor) -> Tensor:
        """Return the tokens ``[b, images, tiles, tokens, d]`` of sequences ``[n, s, d]``, in the input's order."""
        batch_size, images_per_row, num_tiles = self.shape
        tokens, _ = self.split(x)
        tokens = tokens[:, :num_tiles]  # [b * images, tiles, tokens, d]
        if self.order is not None:
            input_order = self.order.argsort()
            tokens = tokens[input_order]
        return tokens.unflatten(0, (batch_size, images_per_row))


class CLSEmbedding(nn.Module):
    """Learned CLS token ``weight`` ``[d]`` that is prepended or appended to the patches of every tile.

    Args:
        embed_dim: width d of the token.
        append: append the token to the patches instead of prepending it.
    """

    def __init__(self, embed_dim: int, append: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(embed_dim) * embed_dim**-0.5)
        self.append = append

    def forward(self, x: Tensor) -> Tensor:
        """Concatenate the CLS token: ``[..., patches, d]`` to ``[..., patches + 1, d]``."""
        token = self.weight.to(x.dtype).expand(*x.shape[:-2], 1, -1)  # [..., 1, d]
        parts = [x, token] if self.append else [token, x]
        return torch.cat(parts, dim=-2)


class CLSProjection(nn.Module):
    """Projection of the CLS token of every tile.

    Args:
        embed_dim: width d of the CLS token.
        cls_output_dim: width of the output.
        is_last: whether the CLS token comes after the patches.
    """

    def __init__(self, embed_dim: int, cls_output_dim: int, is_last: bool = False) -> None:
        super().__init__()
        self.proj = nn.Linear(embed_dim, cls_output_dim, bias=False)
        self.is_last = is_last

    def forward(self, x: Tensor) -> Tensor:
        """Project the CLS token: ``[b, images, tiles, tokens, d]`` to ``[b, images, tiles, 1, cls_output_dim]``."""
        token = x[..., -1:, :] if self.is_last else x[..., :1, :]
        return self.proj(token)


class VisionTransformer(nn.Module):
    """Vision transformer over the patches of all tiles of an image (Dosovitskiy et al. 2020, arXiv:2010.11929).

    The tiles of an image attend to each other. Images are padded internally to the number of tiles in pre-training, so
    that the features of an image do not depend on the other images of the batch.

    Args:
        patch_size: width and height of a patch, in pixels.
        tile_size: width and height of a tile, in pixels.
        num_layers: number of layers.
        embed_dim: width d of the hidden states.
        layer: layer that is copied ``num_layers`` times.
        token_pos_embedding: adds position embeddings of the tokens in a tile:
            ``[n, tiles, tokens, d], aspect_ratio [n, 2] -> [n, tiles, tokens, d]``.
        pre_tile_pos_embed: adds position embeddings of the tiles before the layers, with the same signature.
        post_tile_pos_embed: adds position embeddings of the tiles after the layers, with the same signature.
        cls_projection: projection of the output.
        out_indices: indices of the layers with inputs that are also returned.
        in_channels: number of channels of an image.
        append_cls_token: whether the CLS token comes after the patches.
        norm_eps: eps of the norms before and after the layers.

    Raises:
        ValueError: ``patch_size`` does not divide ``tile_size``, or an index in ``out_indices`` is out of range.

    Example:
        >>> sizes = {"embed_dim": 8, "num_layers": 1, "num_heads": 2}
        >>> encoder = torchtune.models.clip.clip_vision_encoder(tile_size=4, patch_size=2, **sizes)
        >>> features, hidden = encoder(torch.ones(1, 1, 2, 3, 4, 4), torch.tensor([[[1, 2]]]))
        >>> features.shape
        torch.Size([1, 1, 2, 5, 8])
    """

    def __init__(
        self,
        patch_size: int,
        tile_size: int,
        num_layers: int,
        embed_dim: int,
        layer: nn.Module,
        token_pos_embedding: nn.Module,
        pre_tile_pos_embed: nn.Module | None = None,
        post_tile_pos_embed: nn.Module | None = None,
        cls_projection: nn.Module | None = None,
        out_indices: list[int] | None = None,
        in_channels: int = 3,
        append_cls_token: bool = False,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        if tile_size < 1 or patch_size < 1 or tile_size % patch_size:
            raise ValueError(f"tile_size ({tile_size}) must be a multiple of patch_size ({patch_size}).")
        for index in out_indices or ():
            if not 0 <= index < num_layers:
                raise ValueError(f"out_indices has {index}, but the layers are 0 to {num_layers - 1}.")
        self.patches_per_tile = (tile_size // patch_size) ** 2
        self.out_indices = list(out_indices or ())
        self.max_num_tiles = getattr(token_pos_embedding, "max_num_tiles", None)  # None: images are not padded
        self.pre_tile_pos_embed = pre_tile_pos_embed
        self.post_tile_pos_embed = post_tile_pos_embed
        self.token_pos_embedding = token_pos_embedding
        self.cls_projection = cls_projection
        self.layers = nn.ModuleList([copy.deepcopy(layer) for _ in range(num_layers)])
        self.conv = nn.Conv2d(in_channels, embed_dim, patch_size, stride=patch_size, bias=False)
        self.ln_pre = Fp32LayerNorm(embed_dim, eps=norm_eps)
        self.ln_post = Fp32LayerNorm(embed_dim, eps=norm_eps)
        self.cls_token_embedding = CLSEmbedding(embed_dim, append_cls_token)

    def get_image_tokens_per_tile(self) -> int:
        """Return the number of patches of a tile, plus one for the CLS token."""
        return self.patches_per_tile + 1

    def forward(self, images: Tensor, aspect_ratio: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
        """Encode images.

        Args:
            images: ``[b, images, tiles, c, tile_size, tile_size]``.
            aspect_ratio: int64 ``[b, images, 2]``: (height, width) of each image in tiles; by default one tile.

        Returns:
            Features ``[b, images, tiles, tokens, d]``, projected by ``cls_projection`` if there is one, and the inputs
            of the layers ``out_indices``, ``[b, images, tiles, tokens, d]`` each.

        Raises:
            ValueError: the shape of an argument is invalid.
        """
        x, hidden_states, tiles = self.encode(images, aspect_ratio)
        features = tiles.unpad(x)
        if self.cls_projection is not None:
            features = self.cls_projection(features)
        return features, [tiles.unpad(hidden) for hidden in hidden_states]

    def encode(self, images: Tensor, aspect_ratio: Tensor | None = None) -> tuple[Tensor, list[Tensor], Tiles]:
        """Encode images without removing the padding or restoring the order.

        Returns:
            Sequences ``[n, s, d]`` of the n images, sorted by their numbers of tokens; hidden states of the same shape;
            and their layout, whose ``unpad`` undoes both.
        """
        if images.dim() != 6:
            raise ValueError(f"images have the shape {list(images.shape)}: give [b, images, tiles, c, h, w].")
        batch_size, images_per_row, num_tiles = images.shape[:3]
        if aspect_ratio is None:
            if num_tiles > 1:
                raise ValueError("aspect_ratio must say how the tiles of an image lie: give [b, images, 2].")
            aspect_ratio = torch.ones(batch_size, images_per_row, 2, dtype=torch.int64, device=images.device)
        pixels = images.flatten(0, 2)  # [b * images * tiles, c, h, w]
        patches = self.conv(pixels.to(self.conv.weight.dtype))  # [b * images * tiles, d, rows, columns]
        patches = patches.flatten(2).transpose(1, 2)  # [b * images * tiles, patches, d]
        if patches.shape[1] != self.patches_per_tile:
            raise ValueError(f"A tile has {patches.shape[1]} patches, but the encoder needs {self.patches_per_tile}.")
        tokens_per_tile = self.get_image_tokens_per_tile()
        if self.max_num_tiles is None:
            tiles = Tiles.of(images, aspect_ratio, num_tiles, tokens_per_tile)
        else:
            # Checkpoints were trained with max_num_tiles tiles per image, and sequences padded to a multiple of 8.
            tiles = Tiles.of(images, aspect_ratio, self.max_num_tiles, tokens_per_tile, multiple=8)

        x = tiles.pad_and_sort(patches)  # [n, max_num_tiles, patches, d] of n images
        if self.pre_tile_pos_embed is not None:
            x = self.pre_tile_pos_embed(x, tiles.ratios)
        x = self.cls_token_embedding(x)  # [n, max_num_tiles, tokens, d]
        x = self.ln_pre(self.token_pos_embedding(x, tiles.ratios))

        x = tiles.join(x)  # [n, s, d]
        hidden_states = []
        for index, layer in enumerate(self.layers):
            if index in self.out_indices:
                hidden_states.append(x)
            x = layer(x, mask=tiles.mask)
        x = self.ln_post(x)
        if self.post_tile_pos_embed is not None:
            # Tiles have an embedding, and so does the padding of a tile.
            tokens, padding = tiles.split(x)
            tokens = self.post_tile_pos_embed(tokens, tiles.ratios)
            padding = self.post_tile_pos_embed(padding, tiles.ratios)
            x = tiles.join(tokens, padding)
        return x, hidden_states, tiles


def patch_places(grids: Sequence[Grid], merge: int) -> Tensor:
    """Return row and column of every patch, and height and width of its image: int64 ``[4, p]``.

    Patches are ordered by frame, then by block of ``merge`` x ``merge``, then by row and column in the block.
    """
    places_of_images = []
    for frames, height, width in grids:
        rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")  # [height, width]
        # [2, block row, row in the block, block column, column in the block]
        blocks = torch.stack([rows, columns]).view(2, height // merge, merge, width // merge, merge)
        row_and_column = blocks.transpose(2, 3).flatten(1)  # [2, height * width], in the order of the patches
        size = torch.tensor([[height], [width]]).expand(2, height * width)
        places_of_frame = torch.cat([row_and_column, size])  # [4, height * width]
        places_of_images.append(places_of_frame.repeat(1, frames))
    return torch.cat(places_of_images, dim=1)


class InterpolatedPositions(nn.Module):
    """Learned position embeddings: a table of ``side`` x ``side``, interpolated bilinearly to the grid of each image.

    The corners of the table align with the corners of the image.
    """

    def __init__(self, side: int, embed_dim: int) -> None:
        super().__init__()
        self.side = side
        self.table = nn.Embedding(side * side, embed_dim)

    def forward(self, places: Tensor) -> Tensor:
        """Return the embeddings ``[p, d]`` of patches at ``places`` (see :func:`patch_places`)."""
        last = self.side - 1
        # Rows and columns of the patches in the table, with fractions: [2, p]. An image of one row has its first one.
        last_of_image = (places[2:] - 1).clamp(min=1)
        table_places = places[:2].float() * last / last_of_image
        corner = table_places.floor().long()
        fraction = table_places - corner
        embeddings = 0.0
        # The four entries of the table around the patch, weighted by the distances from those opposite.
        for down, row_weight in ((0, 1 - fraction[0]), (1, fraction[0])):
            row = (corner[0] + down).clamp(max=last)
            for right, column_weight in ((0, 1 - fraction[1]), (1, fraction[1])):
                column = (corner[1] + right).clamp(max=last)
                weight = row_weight * column_weight  # [p]
                entries = self.table(row * self.side + column)  # [p, d]
                embeddings = embeddings + entries * weight[:, None]
        return embeddings.to(self.table.weight.dtype)


class ClassedPositions(InterpolatedPositions):
    """Learned position embeddings for tiles of one size, with a class token after the patches of each tile."""

    def __init__(self, side: int, embed_dim: int) -> None:
        super().__init__(side, embed_dim)
        self.table = nn.Embedding(side * side + 1, embed_dim)  # the last row is for the class token
        self.class_token = nn.Parameter(torch.zeros(embed_dim))

    def append_class_token(self, x: Tensor, places: Tensor, num_tiles: int) -> tuple[Tensor, Tensor]:
        """Append the class token to the patches ``[p, d]`` of each tile, at row and column -1."""
        class_token = self.class_token + self.table.weight[-1]  # [d], with its position
        class_tokens = class_token.to(x.dtype).expand(num_tiles, 1, -1)
        patches = x.unflatten(0, (num_tiles, -1))  # [tiles, patches, d]
        x = torch.cat([patches, class_tokens], dim=1)  # [tiles, patches + 1, d]
        places_of_tiles = places.unflatten(1, (num_tiles, -1))  # [4, tiles, patches]
        places = F.pad(places_of_tiles, (0, 1), value=-1)  # [4, tiles, patches + 1]
        return x.flatten(0, 1), places.flatten(1)

    def remove_class_token(self, x: Tensor, num_tiles: int) -> Tensor:
        """Return ``[p, d]`` of the patches alone; the inverse of :meth:`append_class_token`."""
        tiles = x.unflatten(0, (num_tiles, -1))  # [tiles, patches + 1, d]
        return tiles[:, :-1].flatten(0, 1)


class AxisPositions(nn.Module):
    """Learned position embeddings: the sum of an embedding of the column and one of the row, ``side`` of each."""

    def __init__(self, side: int, embed_dim: int) -> None:
        super().__init__()
        self.tables = nn.Parameter(torch.zeros(2, side, embed_dim))

    def forward(self, places: Tensor) -> Tensor:
        """Return the embeddings ``[p, d]`` of patches at ``places`` (see :func:`patch_places`)."""
        rows = places[0]
        columns = places[1]
        return self.tables[0][columns] + self.tables[1][rows]


class ClippedLinear(nn.Module):
    """Linear layer that clips its input and output to untrained bounds."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        # Minimum and maximum of the input, then of the output; these clip nothing.
        bounds = torch.tensor([-torch.inf, torch.inf, -torch.inf, torch.inf], dtype=linear.weight.dtype)
        self.bounds = nn.Parameter(bounds, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to ``[..., in]``."""
        low, high, output_low, output_high = self.bounds.to(x.dtype)
        output = self.linear(x.clamp(low, high))
        return output.clamp(output_low, output_high)


class Standardization(nn.Module):
    """Untrained shift and scale of ``[..., d]``, computed in float32."""

    def __init__(self, embed_dim: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(embed_dim), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(embed_dim), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``(x - bias) * scale``."""
        return (x - self.bias.float()) * self.scale.float()


class PatchMerger(nn.Module):
    """Projector that converts each block of patches to a token.

    Args:
        merge: rows and columns of patches in a block.
        mlp: projection of the merged block to the width of the decoder.
        norm: norm of a patch; by default none.
        reduce: module that is applied to the merged block before ``merged_norm``; by default none.
        merged_norm: norm of the merged block; by default none.
        channels_first: whether a block is merged channel by channel, instead of patch by patch.
        pools: whether the merged block is the mean of its patches times ``sqrt(d)``, instead of their concatenation.
    """

    def __init__(
        self,
        merge: int,
        mlp: nn.Module,
        *,
        norm: nn.Module | None = None,
        reduce: nn.Module | None = None,
        merged_norm: nn.Module | None = None,
        channels_first: bool = False,
        pools: bool = False,
    ) -> None:
        super().__init__()
        self.merge = merge
        self.channels_first = channels_first
        self.pools = pools
        self.norm = norm or nn.Identity()
        self.reduce = reduce or nn.Identity()
        self.merged_norm = merged_norm or nn.Identity()
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        """Project patches ``[p, d]`` to tokens ``[p / merge², width]``."""
        blocks = self.norm(x).unflatten(0, (-1, self.merge**2))  # [p / merge², merge², d]
        if self.pools:
            merged = blocks.float().mean(1) * x.shape[1] ** 0.5  # [p / merge², d]
        elif self.channels_first:
            merged = blocks.transpose(1, 2).flatten(1)  # [p / merge², d * merge²]
        else:
            merged = blocks.flatten(1)  # [p / merge², merge² * d]
        merged = self.reduce(merged).to(x.dtype)  # pooling and some reductions compute in float32
        return self.mlp(self.merged_norm(merged))


class VisionTower(nn.Module):
    """Vision transformer for images of any size; patches attend only to patches of the same frame.

    Args:
        patch_embed: embedding of a patch, ``patch values -> d``.
        layers: transformer layers with bidirectional attention.
        projector: projection of the output to tokens.
        merge: rows and columns of patches that become one token.
        positions: position embeddings that are added to the patches; by default none.
        rope: rotary embedding of the layers; by default none.
        patch_norm: norm before ``patch_embed``; by default none.
        embed_norm: norm after ``patch_embed``; by default none.
        first_norm: norm before the layers; by default none.
        norm: norm after the layers; by default none.
        deep_projectors: projections of the outputs of some layers to tokens, by layer index. The decoder adds these
            tokens after its first layers (DeepStack, arXiv:2406.04334).
        window: rows and columns of tokens in an attention window; 0: none.
        full_layers: indices of layers without the window.
    """

    def __init__(
        self,
        *,
        patch_embed: nn.Module,
        layers: Sequence[nn.Module],
        projector: nn.Module,
        merge: int,
        positions: nn.Module | None = None,
        rope: GridRotaryPositionalEmbeddings | None = None,
        patch_norm: nn.Module | None = None,
        embed_norm: nn.Module | None = None,
        first_norm: nn.Module | None = None,
        norm: nn.Module | None = None,
        deep_projectors: Mapping[int, nn.Module] | None = None,
        window: int = 0,
        full_layers: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.merge = merge
        self.window = window
        self.full_layers = frozenset(full_layers)
        self.deep_layers = tuple(deep_projectors or ())
        self.patch_norm = patch_norm or nn.Identity()
        self.patch_embed = patch_embed
        self.embed_norm = embed_norm or nn.Identity()
        self.positions = positions
        self.rope = rope
        self.first_norm = first_norm or nn.Identity()
        self.layers = nn.ModuleList(layers)
        self.norm = norm or nn.Identity()
        self.projector = projector
        self.deep_projectors = nn.ModuleList((deep_projectors or {}).values())

    def forward(self, images: Images) -> list[Tensor]:
        """Encode images.

        Returns:
            Tokens of all images, ``[n, width of the decoder]``, followed by tokens of the same shape for each layer in
            ``deep_projectors``.
        """
        if images.cached:
            return self._encode_with_cache(images)
        return self._project(self._encode(images))

    def blank(self, device: torch.device) -> Images:
        """Return a blank image of one token."""
        pixels = torch.zeros(self.merge**2, self.patch_embed.in_features, device=device)
        return Images(pixels, ((1, self.merge, self.merge),))

    def _encode_with_cache(self, images: Images) -> list[Tensor]:
        """Encode the images without cached features, and cache their features.

        The features are tokens if the whole tower is frozen; otherwise they are the outputs of the layers.
        """
        # Tokens of a trained projector would be out of date after a step; outputs of frozen layers are not.
        is_frozen = not any(parameter.requires_grad for parameter in self.parameters())
        new_features: list[Tensor] = []  # of the images without cached ones: [rows, values of all layers]
        if images.pixel_grids:
            outputs = self._encode(images)
            if is_frozen:
                outputs = self._project(outputs)
            # A row of an output is a token, or a patch of the layers' outputs.
            merge = self.merge if is_frozen else 1
            num_rows = [sum(token_counts(image.grids, merge)) for image in images.missing]
            values_of_layers = torch.cat(outputs, dim=1)
            new_features = list(values_of_layers.split(num_rows))
        elif is_sharded(self):
            # Other ranks may have images to encode, which all-gathers the weights of these modules from all ranks.
            outputs = self._encode(self.blank(images.pixels.device))
            if is_frozen:
                self._project(outputs)
        for image, image_features in zip(images.missing, new_features, strict=True):
            image.write(image_features)

        features = []  # of all images, in order
        remaining = iter(new_features)
        for image in images.cached:
            if image.features is None:
                features.append(next(remaining))
            else:
                features.append(image.features)
        num_outputs = 1 + len(self.deep_layers)
        outputs = list(torch.cat(features).chunk(num_outputs, dim=1))
        if is_frozen:  # the features are tokens
            return outputs
        return self._project(outputs)

    def _project(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Project the final output and the outputs of the ``deep_projectors`` layers to tokens."""
        projectors = [self.projector]
        for layer in sorted(self.deep_layers):  # the order in which the layers were run
            projectors.append(self.deep_projectors[self.deep_layers.index(layer)])
        return [projector(output) for projector, output in zip(projectors, outputs, strict=True)]

    def _encode(self, images: Images) -> list[Tensor]:
        """Return the final output ``[p, d]``, and the output of each layer in ``deep_projectors``."""
        device = images.pixels.device
        dtype = self.patch_embed.weight.dtype
        places = patch_places(images.pixel_grids, self.merge)  # [4, p], on the host
        lengths = images.frame_lengths
        x = self.patch_norm(images.patches.to(dtype))  # [p, patch values]
        x = self.embed_norm(self.patch_embed(x))  # [p, d]
        if self.positions is not None:
            x = x + self.positions(places.to(device))
        has_class_token = isinstance(self.positions, ClassedPositions)
        num_tiles = len(lengths)
        if has_class_token:
            x, places = self.positions.append_class_token(x, places, num_tiles)
            lengths = [length + 1 for length in lengths]

        # Attention stays within a frame or, in most layers of a tower with windows, within a window.
        frames = Boundaries.of(Documents.from_lengths(lengths, device))
        windows = frames
        order = None
        if self.window:
            order, window_lengths = self._windows(images.pixel_grids)
            x = x[order.to(device)]
            places = places[:, order]
            windows = Boundaries.of(Documents.from_lengths(window_lengths, device))

        rope = None
        if self.rope is not None:
            rows_and_columns = places[:2, None].to(device)  # [2, 1, p]: coordinates of one row of the batch
            rope = self.rope.cos_sin(rows_and_columns)
        x = self.first_norm(x)[None]  # [1, p, d]
        deep_outputs = []
        for index, layer in enumerate(self.layers):
            boundaries = frames if index in self.full_layers else windows
            x = layer(x, documents=boundaries, rope=rope)
            if index in self.deep_layers:
                deep_outputs.append(x[0])
        outputs = [self.norm(x[0]), *deep_outputs]

        if has_class_token:
            outputs = [self.positions.remove_class_token(output, num_tiles) for output in outputs]
        if order is not None:
            inverse_order = order.argsort().to(device)
            outputs = [output[inverse_order] for output in outputs]
        return outputs

    def _windows(self, grids: Sequence[Grid]) -> tuple[Tensor, list[int]]:
        """Return the order of patches by window, and the number of patches of each window.

        Frames begin one after the other, and in each of them a window begins every ``window`` tokens; the windows at
        the right and at the bottom may be smaller.
        """
        block = self.merge**2  # patches of a token are consecutive
        windows = []
        start = 0
        for num_frames, height, width in grids:
            rows = height // self.merge
            columns = width // self.merge
            for _ in range(num_frames):
                stop = start + rows * columns * block
                patches = torch.arange(start, stop).view(rows, columns, block)
                for rows_of_windows in patches.split(self.window):
                    for window in rows_of_windows.split(self.window, dim=1):
                        windows.append(window.flatten())
                start = stop
        return torch.cat(windows), [len(window) for window in windows]


def is_sharded(module: nn.Module) -> bool:
    """Return whether a module is sharded, so that its forward pass has all-gathers."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    from torch.distributed.fsdp import FSDPModule  # slow to import

    return any(isinstance(part, FSDPModule) for part in module.modules())
