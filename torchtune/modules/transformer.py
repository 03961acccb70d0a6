"""Layers of self-attention and cross-attention, and the decoder: embeddings, layers, norm and output projection."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchtune._lazy import former_names
from torchtune.data import DataError, Documents
from torchtune.modules.attention import Block, Keys, MultiHeadAttention
from torchtune.modules.embeddings import LayerEmbedding, LayerEmbeddings, VocabularyGrowth
from torchtune.modules.kernels import KernelUser
from torchtune.modules.kernels.attention import Kernel, MaskType, choose_kernel, log_attention_backend
from torchtune.modules.kernels.documents import Boundaries
from torchtune.modules.kernels.onednn import fast_products
from torchtune.modules.kv_cache import EncoderCache
from torchtune.modules.mixers import RecurrentMixer
from torchtune.modules.position_embeddings import RotaryPositionalEmbeddings, positions_of, seq_lens_of
from torchtune.modules.rms_norm import Multiplier
from torchtune.utils import deprecated, launches_kernels


class TransformerSelfAttentionLayer(nn.Module):
    """Pre-norm transformer layer: attention, then feed-forward, each with a residual connection.

    Args:
        attn: attention or another mixer; ``None`` for a layer with only a feed-forward.
        mlp: feed-forward ``[b, s, d] -> [b, s, d]``; ``None`` for a layer without one.
        sa_norm: norm before attention; by default none.
        mlp_norm: norm before the feed-forward; by default none.
        sa_scale: scale of attention's output before the residual addition; by default none.
        mlp_scale: scale of the feed-forward's output before the residual addition; by default none.
        mask_mod: changes the mask of this layer: ``mask_mod(mask, b, s, s)``.
        layer_embed: adds the layer's token embeddings to its output.
        layer_scale: scale of the layer's output.
        mixer: mixer parallel to attention: it has the same input, and its output is added to attention's.

    Example:
        >>> model.layers[0](torch.ones(1, 3, 32)).shape
        torch.Size([1, 3, 32])
    """

    def __init__(
        self,
        attn: MultiHeadAttention | RecurrentMixer | None,
        mlp: nn.Module | None,
        *,
        sa_norm: nn.Module | None = None,
        mlp_norm: nn.Module | None = None,
        sa_scale: nn.Module | None = None,
        mlp_scale: nn.Module | None = None,
        mask_mod: Callable[[MaskType | None, int, int, int], MaskType] | None = None,
        layer_embed: LayerEmbedding | None = None,
        layer_scale: nn.Module | None = None,
        mixer: RecurrentMixer | None = None,
    ) -> None:
        super().__init__()
        self.attn = attn
        self.mixer = mixer
        self.mlp = mlp
        self.sa_norm = sa_norm or nn.Identity()
        self.mlp_norm = mlp_norm or nn.Identity()
        self.sa_scale = sa_scale or nn.Identity()
        self.mlp_scale = mlp_scale or nn.Identity()
        self.mask_mod = mask_mod
        self.layer_embed = layer_embed
        self.layer_scale = layer_scale

    @property
    def mixers(self) -> list[MultiHeadAttention | RecurrentMixer]:
        """The modules that mix positions: attention, a mixer, or both."""
        return [mixer for mixer in (self.attn, self.mixer) if mixer is not None]

    def setup_caches(
        self, batch_size: int, dtype: torch.dtype, *, encoder_max_seq_len: int | None, decoder_max_seq_len: int
    ) -> None:
        """Set up the caches; ``encoder_max_seq_len`` is ignored."""
        for mixer in self.mixers:
            mixer.setup_cache(batch_size, dtype, max_seq_len=decoder_max_seq_len)

    def caches_are_setup(self) -> bool:
        """Return whether the layer has a cache."""
        return any(mixer.kv_cache is not None for mixer in self.mixers)

    def caches_are_enabled(self) -> bool:
        """Return whether the cache is enabled."""
        return any(mixer.cache_enabled for mixer in self.mixers)

    def reset_cache(self) -> None:
        """Empty the caches."""
        for mixer in self.mixers:
            mixer.reset_cache()

    def forward(
        self,
        x: Tensor,
        *,
        mask: MaskType | None = None,
        input_pos: Tensor | None = None,
        documents: Documents | Boundaries | None = None,
        rope: tuple[Tensor, Tensor] | None = None,
        encoder_input: Tensor | None = None,
        encoder_mask: Tensor | None = None,
        embedded: Tensor | None = None,
        keys: Keys | None = None,
        returns_keys: bool = False,
        blocks: Sequence[Block] = (),
    ) -> Tensor | tuple[Tensor, Keys]:
        """Apply the layer to ``[b, s, d]``; see :meth:`MultiHeadAttention.forward` for the arguments.

        ``encoder_input`` and ``encoder_mask`` are for cross-attention layers and ignored here. ``embedded``
        ``[b, s, p]`` is the input of ``layer_embed``.
        """
        if self.mask_mod is not None:
            b, s, _ = x.shape
            mask = self.mask_mod(mask, b, s, s)
        h = x  # without attention, the input of the feed-forward
        with fast_products(x):  # on CPUs where oneDNN is faster, linear layers run its products
            if self.attn is not None:
                # Arguments that only some layers have: mixers in the place of attention take neither.
                options: dict[str, Any] = {}
                if keys is not None or returns_keys:
                    options["keys"] = keys
                    options["returns_keys"] = returns_keys
                if blocks:
                    options["blocks"] = blocks
                h, keys = self._attend(x, mask=mask, input_pos=input_pos, documents=documents, rope=rope, **options)
            if self.mlp is not None:
                h = _add_scaled(h, self.mlp_scale, self.mlp(self.mlp_norm(h)))
        if self.layer_embed is not None:
            h = self.layer_embed(h, embedded)
        if self.layer_scale is not None:
            h = self.layer_scale(h)
        if returns_keys:
            return h, keys
        return h

    def _attend(self, x: Tensor, *, input_pos: Tensor | None, **arguments: Any) -> tuple[Tensor, Keys | None]:
        """Residual stream after attention and the parallel mixer; keys and values, if attention returns them.

        A function of its own, so that the tensors ``[b, s, d]`` below are freed before the feed-forward.
        """
        normed = self.sa_norm(x)
        attended = self.attn(normed, input_pos=input_pos, **arguments)
        keys = None
        if arguments.get("returns_keys"):
            attended, keys = attended
        mixed = None
        if self.mixer is not None:
            mixed = self.mixer(normed, input_pos=input_pos, documents=arguments.get("documents"))
        del normed  # [b, s, d], not needed for the sums below
        h = _add_scaled(x, self.sa_scale, attended)
        if mixed is not None:
            h = h + mixed
        return h, keys


def _add_scaled(x: Tensor, scale: nn.Module, out: Tensor) -> Tensor:
    """Add ``scale(out)`` to ``x``; a constant factor is part of the sum, which rounds once."""
    if isinstance(scale, Multiplier):
        return torch.add(x, out, alpha=scale.factor)
    return x + scale(out)


class TransformerCrossAttentionLayer(nn.Module):
    """Pre-norm layer of cross-attention and feed-forward, each with a residual connection.

    Positions that attend to no encoder output are unchanged, and so is text without encoder output.

    Args:
        attn: attention with ``pos_embeddings=None`` and ``is_causal=False``.
        mlp: feed-forward ``[b, s, d] -> [b, s, d]``.
        ca_norm: norm before attention; by default none.
        mlp_norm: norm before the feed-forward; by default none.
        ca_scale: scale of attention's output before the residual addition; by default none.
        mlp_scale: scale of the feed-forward's output before the residual addition; by default none.

    Raises:
        ValueError: ``attn`` has position embeddings.

    Example:
        >>> projections = {name: torch.nn.Linear(8, 8) for name in ("q_proj", "k_proj", "v_proj", "output_proj")}
        >>> sizes = {"embed_dim": 8, "num_heads": 2, "num_kv_heads": 2, "head_dim": 4}
        >>> attn = torchtune.modules.MultiHeadAttention(**sizes, **projections, is_causal=False)
        >>> layer = torchtune.modules.TransformerCrossAttentionLayer(attn, torch.nn.Linear(8, 8))
        >>> layer(torch.ones(1, 3, 8), encoder_input=torch.ones(1, 5, 8)).shape
        torch.Size([1, 3, 8])
    """

    def __init__(
        self,
        attn: MultiHeadAttention,
        mlp: nn.Module,
        *,
        ca_norm: nn.Module | None = None,
        mlp_norm: nn.Module | None = None,
        ca_scale: nn.Module | None = None,
        mlp_scale: nn.Module | None = None,
    ) -> None:
        super().__init__()
        if attn.pos_embeddings is not None:
            raise ValueError("Cross-attention has no positions: build its attention with pos_embeddings=None.")
        self.attn = attn
        self.mlp = mlp
        self.ca_norm = ca_norm or nn.Identity()
        self.mlp_norm = mlp_norm or nn.Identity()
        self.ca_scale = ca_scale or nn.Identity()
        self.mlp_scale = mlp_scale or nn.Identity()

    def setup_caches(
        self, batch_size: int, dtype: torch.dtype, *, encoder_max_seq_len: int | None, decoder_max_seq_len: int | None
    ) -> None:
        """Set up the cache of the encoder's keys and values, which takes its size from the encoder's output."""
        if self.attn.kv_cache is None:
            self.attn.kv_cache = EncoderCache()
            self.attn.cache_enabled = True

    def caches_are_setup(self) -> bool:
        """Return whether the layer has a cache."""
        return self.attn.kv_cache is not None

    def caches_are_enabled(self) -> bool:
        """Return whether the cache is enabled."""
        return self.attn.cache_enabled

    def reset_cache(self) -> None:
        """Empty the cache. Raises ``RuntimeError`` if there is none."""
        self.attn.reset_cache()

    def forward(
        self, x: Tensor, *, encoder_input: Tensor | None = None, encoder_mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """Attend to the output of an encoder.

        Args:
            x: ``[b, s, d]``.
            encoder_input: output of the encoder ``[b, t, d]``. With a cache, ``None`` reads the cached one.
            encoder_mask: bool ``[b, s, t]`` (True: attend); by default every position attends to all.
            kwargs: arguments of self-attention layers; ignored.

        Returns:
            Tensor ``[b, s, d]``.
        """
        keys = None
        has_cache = self.attn.cache_enabled and self.attn.kv_cache is not None
        if encoder_input is None and has_cache:
            keys = self.attn.kv_cache.keys_and_values
        if encoder_input is None and keys is None:  # text without images
            return x
        sees_nothing = None  # [b, s, 1]
        if encoder_mask is not None:
            sees_nothing = ~encoder_mask.any(-1, keepdim=True)
            # A softmax without visible keys is NaN: these positions attend to all, and get nothing of it below.
            encoder_mask = encoder_mask | sees_nothing
        with fast_products(x):  # on CPUs where oneDNN is faster, linear layers run its products
            attended = self.attn(self.ca_norm(x), encoder_input, mask=encoder_mask, keys=keys)
            if sees_nothing is not None:
                attended = attended.masked_fill(sees_nothing, 0.0)
            h = x + self.ca_scale(attended)
            added = self.mlp(self.mlp_norm(h))
            if sees_nothing is not None:  # the feed-forward, too: the layer leaves these positions unchanged
                added = added.masked_fill(sees_nothing, 0.0)
            return h + self.mlp_scale(added)


class TransformerDecoder(nn.Module):
    """Decoder-only language model.

    Args:
        tok_embeddings: token embedding.
        layers: the layers, or one layer that is copied ``num_layers`` times.
        max_seq_len: maximum sequence length, and default length of the KV cache.
        num_heads: query heads per layer.
        head_dim: head dimension.
        norm: norm after the last layer.
        output: output projection to logits; a module, or a callable such as :class:`TiedLinear`.
        num_layers: number of copies if ``layers`` is a single layer.
        output_hidden_states: indices of layers whose inputs are also returned; ``len(layers)``: the last output.
        embed_scale: factor of token embeddings, rounded to their dtype.
        hidden_scale: factor of the output projection's input.
        layer_embeddings: per-layer token embeddings.
        kv_sources: index of a layer without keys and values -> index of the earlier layer that shares its own.
        description: the description of the model, from :func:`torchtune.models.build`.
        spec: the model family, from :func:`torchtune.models.build`; checkpoints and parallelism read it.

    Raises:
        ValueError: ``num_layers`` is set with a list of layers, or missing with a single layer.

    Attributes:
        skip_output_layer: whether :meth:`forward` without ``output=`` returns hidden states. For older recipes only.
        num_output_chunks: see :meth:`set_num_output_chunks`. For older recipes only.

    Example:
        >>> model(torch.tensor([[5, 40, 7]])).shape  # [b, s, v]
        torch.Size([1, 3, 316])
        >>> model(torch.tensor([[5, 40, 7]]), output="hidden").shape
        torch.Size([1, 3, 32])
    """

    def __init__(
        self,
        *,
        tok_embeddings: nn.Embedding,
        layers: nn.Module | list[nn.Module] | nn.ModuleList,
        max_seq_len: int,
        num_heads: int,
        head_dim: int,
        norm: nn.Module,
        output: nn.Module | Callable[[Tensor], Tensor],
        num_layers: int | None = None,
        output_hidden_states: list[int] | None = None,
        embed_scale: float = 1.0,
        hidden_scale: float = 1.0,
        layer_embeddings: LayerEmbeddings | None = None,
        kv_sources: Mapping[int, int] | None = None,
        description: Any = None,
        spec: Any = None,
    ) -> None:
        super().__init__()
        self.embed_scale = embed_scale
        self.hidden_scale = hidden_scale
        if isinstance(layers, list | nn.ModuleList):
            if num_layers is not None:
                raise ValueError("num_layers is for a single layer, but a list of layers was given.")
            layers = nn.ModuleList(layers)
        else:
            if num_layers is None:
                raise ValueError("num_layers must say the number of copies of the single layer.")
            layers = nn.ModuleList([copy.deepcopy(layers) for _ in range(num_layers)])
        self.tok_embeddings = tok_embeddings
        self.layer_embeddings = layer_embeddings
        self.kv_sources = dict(kv_sources or {})
        self.layers = layers
        self.norm = norm
        self.output = output
        self.output_hidden_states = output_hidden_states or []
        self.max_seq_len = max_seq_len
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.skip_output_layer = False
        self.num_output_chunks = 0
        # Set by NEFTune: adds noise to embeddings [b, s, d] in training.
        self.embedding_noise: Callable[[Tensor, Documents | None], Tensor] | None = None
        self._kernels_are_for: tuple[torch.device, torch.dtype] | None = None  # of the last choice of kernels
        # Set by setup_caches.
        self.encoder_max_cache_seq_len: int | None = None
        self.decoder_max_cache_seq_len: int | None = None
        self.description = description
        self.spec = spec
        # Set by resize_token_embeddings: rows of new tokens, which the weight files of the model do not have.
        self.vocabulary_growth: VocabularyGrowth | None = None

    @property
    def text(self) -> "TransformerDecoder":
        """The text decoder: this module. Composite models return their text decoder."""
        return self

    def setup_caches(
        self,
        batch_size: int,
        dtype: torch.dtype,
        *,
        encoder_max_seq_len: int | None = None,
        decoder_max_seq_len: int | None = None,
    ) -> None:
        """Set up a KV cache in every layer, on the default device; :meth:`forward` then needs mask and positions.

        Args:
            batch_size: largest batch size.
            dtype: dtype of keys and values.
            encoder_max_seq_len: ignored by text decoders.
            decoder_max_seq_len: capacity in positions; by default ``max_seq_len``.
        """
        self.encoder_max_cache_seq_len = encoder_max_seq_len
        self.decoder_max_cache_seq_len = decoder_max_seq_len or self.max_seq_len
        for layer in self.layers:
            layer.setup_caches(
                batch_size,
                dtype,
                encoder_max_seq_len=encoder_max_seq_len,
                decoder_max_seq_len=self.decoder_max_cache_seq_len,
            )

    def invalidates_caches(self, input_pos: Tensor) -> bool:
        """Return whether the next positions exceed a length at which all rotary angles change (LongRoPE only).

        Cached keys are then invalid: reset the caches and prefill the whole sequence again.

        ``input_pos`` are the positions ``[b, s]`` or ``[s]`` of the next forward pass.
        """
        limit = None
        for layer in self.layers:
            limit = getattr(self._pos_embeddings(layer), "switch_at", None)
            if limit is not None:
                break
        if limit is None:
            return False
        first = input_pos[..., 0]
        last = input_pos[..., -1]
        is_crossing = (first > 0) & (first <= limit) & (last >= limit)
        return bool(is_crossing.any())

    def caches_are_setup(self) -> bool:
        """Return whether the layers have KV caches."""
        return any(layer.caches_are_setup() for layer in self.layers)

    def caches_are_enabled(self) -> bool:
        """Return whether the KV caches are enabled."""
        return any(layer.caches_are_enabled() for layer in self.layers)

    def reset_caches(self) -> None:
        """Reset the KV caches. Raises ``RuntimeError`` if there are none."""
        if not self.caches_are_enabled():
            raise RuntimeError("There are no key-value caches to reset: call setup_caches() first.")
        for layer in self.layers:
            layer.reset_cache()

    @deprecated("Recipes call forward with output='hidden' and a loss that reads hidden states.")
    def set_num_output_chunks(self, num_output_chunks: int) -> None:
        """Make :meth:`forward` without ``output=`` return logits as a list of chunks along the sequence; 0: off."""
        self.num_output_chunks = num_output_chunks

    @deprecated("Recipes call forward with output='hidden' and a loss that reads hidden states.")
    def chunked_output(self, last_hidden_state: Tensor) -> list[Tensor]:
        """Compute logits of hidden states ``[b, s, d]``: ``num_output_chunks`` tensors ``[b, s / chunks, v]``."""
        return self._chunked_logits(last_hidden_state)

    def forward(
        self,
        tokens: Tensor | None,
        *,
        mask: MaskType | None = None,
        documents: Documents | None = None,
        input_pos: Tensor | None = None,
        input_embeds: Tensor | None = None,
        encoder_input: Tensor | None = None,
        encoder_mask: Tensor | None = None,
        rope_pos: Tensor | None = None,
        added: tuple[Tensor, Sequence[Tensor]] | None = None,
        layer_tokens: Tensor | None = None,
        blocks: Sequence[Block] = (),
        output: Literal["logits", "hidden"] | None = None,
    ) -> Tensor | list[Tensor]:
        """Predict the next token at every position.

        Without ``mask`` and ``documents``, attention is causal in each row, so right padding does not affect tokens.
        A model with :class:`BidirectionalAttention` attends to its whole row, so that padded rows need either.

        Args:
            tokens: int64 ``[b, s]``, or ``None`` with ``input_embeds``.
            mask: bool ``[b, s, t]`` (True: attend) or a ``BlockMask``; with a KV cache, t is the cache's length.
            documents: document boundaries in the flattened batch, instead of a mask.
            input_pos: positions ``[b, s]`` or ``[s]``; by default from the documents, or 0 … s - 1.
            input_embeds: ``[b, s, d]`` instead of tokens.
            encoder_input: output of an encoder ``[b, t, d]``, for cross-attention layers.
            encoder_mask: bool ``[b, s, t]`` (True: attend), for cross-attention layers.
            rope_pos: positions ``[coordinates, b, s]`` for rotary embeddings with several coordinates; by default they
                are all ``input_pos``.
            added: (int64 ``[n]``, indices in the flattened ``b * s`` positions, and tensors ``[n, d]`` that are added
                there after the first layers, one for each layer).
            layer_tokens: tokens of ``layer_embeddings``; by default ``tokens``.
            blocks: see :meth:`MultiHeadAttention.forward`; for layers with a window.
            output: ``"logits"``, or ``"hidden"`` for the input of the output projection. By default ``"logits"``,
                unless ``skip_output_layer`` or ``num_output_chunks`` is set.

        Returns:
            Logits, float32 ``[b, s, v]`` or a list of chunks of them, or hidden states ``[b, s, d]``. With
            ``output_hidden_states``, a list of the requested hidden states, then this result.

        Raises:
            ValueError: a sequence exceeds ``max_seq_len``, a KV cache lacks mask or positions or is outgrown, or
                arguments do not fit each other or the model.
        """
        if output not in ("logits", "hidden", None):
            raise ValueError(f"output is {output!r}: ask for 'logits' or 'hidden'.")
        if (tokens is None) == (input_embeds is None):
            raise ValueError("Give either tokens or input_embeds, and not both.")
        if isinstance(tokens, Tensor) and tokens.dim() != 2:
            raise ValueError(f"tokens have the shape {list(tokens.shape)}: give [b, s], or tokens[None] of one row.")
        # A mapping has the images themselves: only a composite model encodes them.
        if isinstance(encoder_input, Mapping) or (encoder_input is not None and not self.attends_to_encoder()):
            raise ValueError("encoder_input has images, but this model reads text only: it would not see them.")
        h = input_embeds  # [b, s, d]
        if h is None:
            h = self.embed(tokens)
        if self.embedding_noise is not None and self.training:
            h = self.embedding_noise(h, documents)
        self._check(h, mask, documents, input_pos)
        if input_pos is None:
            # From the tokens, because with sequence parallelism h is a shard of the sequence.
            input_pos = positions_of(h if tokens is None else tokens, documents)
        self._choose_kernels(h)
        # What all layers share is computed once: rotary angles, boundaries of documents, embeddings of layers.
        tables = self._rope_tables(input_pos, documents, rope_pos)
        boundaries = self._boundaries(h, documents, mask)
        embedded = None  # [b, s, l, p]
        if self.layer_embeddings is not None:
            embedded_tokens = tokens if layer_tokens is None else layer_tokens
            embedded = self.layer_embeddings(embedded_tokens, h)
        hidden_states = []
        shared_keys: dict[int, Keys] = {}  # by layer
        for index, layer in enumerate(self.layers):
            if index in self.output_hidden_states:
                hidden_states.append(h)
            options = self._layer_options(index, embedded, shared_keys, blocks)
            h = layer(
                h,
                mask=mask,
                documents=boundaries,
                input_pos=input_pos,
                rope=tables.get(self._pos_embeddings(layer)),
                encoder_input=encoder_input,
                encoder_mask=encoder_mask,
                **options,
            )
            if "returns_keys" in options:
                h, keys = h
                shared_keys[index] = keys  # for the later layers that kv_sources maps to this one
            if added is not None:
                positions, values = added
                if index < len(values):  # the first layers alone (DeepStack)
                    shape = h.shape
                    h = h.flatten(0, 1).index_add(0, positions, values[index].to(h.dtype))  # [b * s, d]
                    h = h.view(shape)
        if len(self.layers) in self.output_hidden_states:
            hidden_states.append(h)
        result = self.unembed(h, output)
        if hidden_states:
            return [*hidden_states, result]
        return result

    def _layer_options(
        self, index: int, embedded: Tensor | None, shared_keys: Mapping[int, Keys], blocks: Sequence[Block]
    ) -> dict[str, Any]:
        """Arguments that only some layers have: a layer of another class may take none of them."""
        options: dict[str, Any] = {}
        if embedded is not None:
            options["embedded"] = embedded[:, :, index]
        if index in self.kv_sources:
            options["keys"] = shared_keys[self.kv_sources[index]]
        if index in self.kv_sources.values():
            options["returns_keys"] = True
        attn = getattr(self.layers[index], "attn", None)
        if blocks and getattr(attn, "window", None):
            options["blocks"] = blocks
        return options

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the input of the first layer ``[b, s, d]`` for ``tokens`` ``[b, s]``."""
        h = self.tok_embeddings(tokens)
        if self.embed_scale == 1.0:
            return h
        # The factor stays on the CPU: kernels of other devices take a scalar as an argument, so nothing is copied.
        return h * torch.tensor(self.embed_scale, dtype=h.dtype, device="cpu")

    def unembed(self, h: Tensor, output: Literal["logits", "hidden"] | None = None) -> Tensor | list[Tensor]:
        """Compute the result of :meth:`forward` from the last layer's output ``[b, s, d]``."""
        h = self.norm(h)
        if self.hidden_scale != 1.0:
            h = h * self.hidden_scale
        if output is None and self.num_output_chunks:
            return self._chunked_logits(h)
        if output == "hidden" or (output is None and self.skip_output_layer):
            return h
        with fast_products(h):
            return self.output(h).float()

    def _chunked_logits(self, h: Tensor) -> list[Tensor]:
        """Logits of ``[b, s, d]``, float32 ``[b, s / chunks, v]`` each."""
        chunks = h.tensor_split(self.num_output_chunks, dim=1)
        with fast_products(h):
            return [self.output(chunk).float() for chunk in chunks]

    def _choose_kernels(self, h: Tensor) -> None:
        """Let layers choose kernels of other packages before the first batch of a device and dtype."""
        if torch.compiler.is_compiling() or self._kernels_are_for == (h.device, h.dtype):
            return
        for module in self.modules():
            if isinstance(module, KernelUser):
                module.choose_kernels(h.device, h.dtype)
        self._kernels_are_for = (h.device, h.dtype)

    def _boundaries(self, h: Tensor, documents: Documents | None, mask: MaskType | None) -> Boundaries | None:
        """Document boundaries for the attention kernels, shared by all layers; logs the kernels once."""
        kinds = set()  # of attention: layers of one kind have the same kernel
        chunks = set()
        for layer in self.layers:
            attn = getattr(layer, "attn", None)
            if not isinstance(attn, MultiHeadAttention):
                continue
            kinds.add((attn.head_dim, attn.window or 0, attn.softcap or 0.0, attn.sinks is not None))
            if attn.chunk is not None:
                chunks.add(attn.chunk)
        windows_with_block_mask = set()
        for head_dim, window, softcap, sinks in kinds:
            options = {"head_dim": head_dim, "window": window, "softcap": softcap, "sinks": sinks}
            if not torch.compiler.is_compiling():
                log_attention_backend(
                    h.device, h.dtype, documents=documents is not None, mask=mask is not None, **options
                )
            if choose_kernel(h.device, h.dtype, **options) is Kernel.FLEX:
                windows_with_block_mask.add(window)
        if documents is None:
            return None
        kernel_chunk = None  # the recurrent mixers of a model have one, or none
        gap = 0
        for layer in self.layers:
            for mixer in layer.children():
                if isinstance(mixer, RecurrentMixer):
                    kernel_chunk = kernel_chunk or mixer.kernel_chunk
                    if launches_kernels(h.device):  # a CPU computes the convolution tap by tap, without a row
                        gap = max(gap, mixer.conv_gap)
        return Boundaries.of(
            documents, block_masks=windows_with_block_mask, chunks=chunks, kernel_chunk=kernel_chunk, gap=gap
        )

    def _check(self, h: Tensor, mask: MaskType | None, documents: Documents | None, input_pos: Tensor | None) -> None:
        """Raise for arguments of :meth:`forward` that do not fit each other or the model."""
        if documents is not None and documents.shared is not None:
            obstacle = self.prefix_obstacle()
            if obstacle is not None:
                raise ValueError(f"Documents share a prefix, but {obstacle}: give each document its own.")
        # A row of documents may be longer than the model's sequences, each of its documents may not.
        longest = h.shape[1]
        if documents is not None:
            longest = documents.max_length
        if longest > self.max_seq_len:
            raise DataError(
                f"A sequence of {longest} tokens is longer than the model's max_seq_len {self.max_seq_len}: shorten it."
            )
        if mask is not None and input_pos is None and documents is None and self.has_states():
            raise ValueError(
                "A mask does not say where the state of linear attention, Mamba and convolutions starts anew: give "
                "documents, or input_pos with the position of each token in its document, beside it."
            )
        if self.caches_are_enabled():
            is_continuous_batch = self._is_continuous_batch()
            if (mask is None and not is_continuous_batch) or input_pos is None:
                raise ValueError("With key-value caches, forward needs both mask and input_pos.")
            if documents is not None and not is_continuous_batch:
                raise ValueError("Documents are for training; with key-value caches, give a mask.")
            # A continuous batch has asked already, about positions that it knows on the host. A compiled step cannot
            # ask, because the answer is a value of a tensor.
            has_asked = is_continuous_batch or torch.compiler.is_compiling()
            if not has_asked and self.invalidates_caches(input_pos):
                raise ValueError(
                    "The text grows beyond a length at which the angles of all its positions change: call "
                    "reset_caches() and give it from its beginning, as torchtune.generation.generate does."
                )

    def _is_continuous_batch(self) -> bool:
        """Whether the caches have a :class:`~torchtune.modules.kv_cache.Place`, set by a continuous batch."""
        for layer in self.layers:
            cache = getattr(getattr(layer, "attn", None), "kv_cache", None)
            if getattr(cache, "place", None) is not None:
                return True
        return False

    def attends_to_encoder(self) -> bool:
        """Return whether any layer reads ``encoder_input``."""
        for layer in self.layers:
            if hasattr(layer, "fusion_layer") or not isinstance(layer, TransformerSelfAttentionLayer):
                return True
        return False

    def prefix_obstacle(self) -> str | None:
        """Return why documents cannot share a prefix (:class:`torchtune.data.Documents`), or None if they can."""
        for index, layer in enumerate(self.layers):
            for attn in getattr(layer, "mixers", [layer]):
                if not isinstance(attn, MultiHeadAttention):
                    return f"layer {index} has {type(attn).__name__}, which goes on from no other document"
                if not getattr(attn.attention, "shares_prefixes", False):
                    return f"layer {index} computes attention with a function of its own"
                if not attn.is_causal:
                    return f"layer {index} attends to later positions, which differ between documents"
                if attn.attn_dropout:
                    return "attention has dropout (attn_dropout), which draws anew for every document"
                if getattr(attn.pos_embeddings, "depends_on_length", False):
                    return "the angles of all positions depend on the length of the document (LongRoPE, dynamic RoPE)"
            if getattr(layer, "mask_mod", None) is not None:
                return f"layer {index} changes masks"
        return None

    def has_states(self) -> bool:
        """Return whether any layer is recurrent or convolutional (linear attention, Mamba, short convolutions)."""
        for layer in self.layers:
            for module in layer.children():
                if isinstance(module, RecurrentMixer):
                    return True
        return False

    @staticmethod
    def _pos_embeddings(layer: nn.Module) -> nn.Module | None:
        attn = getattr(layer, "attn", None)  # a layer of the user may have none, or a mixer in its place
        return getattr(attn, "pos_embeddings", None)

    def _rope_tables(
        self, input_pos: Tensor, documents: Documents | None, rope_pos: Tensor | None
    ) -> dict[nn.Module, tuple[Tensor, Tensor]]:
        """Cosine and sine of each distinct rotary embedding, computed once for all layers."""
        embeddings = {self._pos_embeddings(layer) for layer in self.layers}
        # None is that of layers without positions; other classes than ours rotate in the layer.
        ropes = [module for module in embeddings if isinstance(module, RotaryPositionalEmbeddings)]
        seq_lens = None
        if any(rope.depends_on_length for rope in ropes):
            seq_lens = seq_lens_of(input_pos, documents)
        positions = input_pos if rope_pos is None else rope_pos
        return {rope: rope.cos_sin(positions, seq_lens) for rope in ropes}


def text_decoder(model: nn.Module) -> nn.Module:
    """Return the text decoder of a model: the module with ``layers``, ``tok_embeddings`` and ``output``.

    Args:
        model: a :class:`TransformerDecoder`, a composite model with an attribute ``text``, or any other module, which
            is returned unchanged.

    Example:
        >>> torchtune.modules.text_decoder(model) is model
        True
    """
    return getattr(model, "text", model)


def is_causal(model: nn.Module) -> bool:
    """Return whether no position of a model sees later ones, as a model that predicts tokens needs it."""
    description = getattr(text_decoder(model), "description", None)
    return description is None or description.is_causal


__getattr__ = former_names(__name__)
