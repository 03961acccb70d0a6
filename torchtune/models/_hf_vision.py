"""Read and write the ``config.json`` of vision-language models."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torchtune.models._description import ModelError
from torchtune.models._hf_config import HFFormat
from torchtune.models._hf_fields import Fields, architecture_of, is_whole
from torchtune.models._vision_description import ImageTextDescription, VisionDescription

_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
# Fields with ids of tokens around images and of other media, which are not read.
_OTHER_IDS = {"vision_start_token_id", "vision_end_token_id", "vision_token_id", "video_token_id"}


def _nothing(*given: Any) -> dict[str, Any]:  # a lambda could not be pickled with the model
    return {}


_SIZES = {
    "embed_dim": "hidden_size",
    "intermediate_dim": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
}


@dataclass(frozen=True)
class ImageTextFormat:
    """Mapping between an :class:`ImageTextDescription` and the ``config.json`` of a Hugging Face architecture.

    Attributes:
        architecture: entry of ``architectures``.
        model_type: value of ``model_type``.
        text: format of ``text_config``.
        vision_type: ``model_type`` of ``vision_config``.
        own: fields of ``vision_config``: (name in the file, name in the description, default of ``transformers``, which
            also defines the type). A field with a string default is an activation.
        tokens: fields with ids of placeholder tokens, and their defaults.
        outer_fields: fields outside ``vision_config``, in the format of ``own``.
        fixed: values of the tower's description that are not in the file.
        derived: fields of ``vision_config`` that must equal a field of the tower's description: (name in the file, name
            in the description).
        unused: fields of ``vision_config`` that do not affect the tower.
        read_vision: reads the other fields of ``vision_config``: ``read_vision(fields, values, whole) -> values``;
            ``whole`` has the fields outside ``vision_config``.
        write_vision: inverse of ``read_vision``.
        sections: default of ``mrope_section``: numbers of pairs rotated by time, row and column; empty without M-RoPE.
        interleaved: whether pairs rotated by time, row and column alternate, instead of forming three sections.
        rope_base: default base of the tower's rotary embedding.
        tied: default of ``tie_word_embeddings``.
        ignored: other fields of the file that do not affect the model.
        read_more: reads further values of the description: ``read_more(config) -> values``.
        write_more: inverse of ``read_more``: further fields, also within ``text_config``.
    """

    architecture: str
    model_type: str
    text: HFFormat
    vision_type: str
    own: tuple[tuple[str, str, Any], ...]
    tokens: tuple[tuple[str, int], ...]
    outer_fields: tuple[tuple[str, str, Any], ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    derived: tuple[tuple[str, str], ...] = ()
    unused: tuple[str, ...] = ()
    read_vision: Callable[[Fields, dict[str, Any], Fields], dict[str, Any]] = _nothing
    write_vision: Callable[[VisionDescription], dict[str, Any]] = _nothing
    sections: tuple[int, ...] = ()
    interleaved: bool = True
    rope_base: float = 10_000.0
    tied: bool = False
    ignored: tuple[str, ...] = ()
    read_more: Callable[[Mapping[str, Any]], dict[str, Any]] = _nothing
    write_more: Callable[[ImageTextDescription], dict[str, Any]] = _nothing

    @staticmethod
    def sizes(**defaults: int) -> tuple[tuple[str, str, int], ...]:
        """Make the entries of ``own`` for the sizes of a tower, from names in the description and defaults."""
        return tuple((_SIZES.get(name, name), name, default) for name, default in defaults.items())

    def read(self, config: Mapping[str, Any], ignore_fields: Collection[str] = ()) -> ImageTextDescription:
        """Make a description from the contents of a ``config.json``; see :meth:`HFFormat.read`.

        Raises:
            ModelError: a field is missing, or its value has no equivalent in a description. The message names the
                field.
        """
        parts = {name: config.get(name) for name in ("text_config", "vision_config")}
        for name, part in parts.items():
            if not isinstance(part, Mapping):
                raise ModelError(f"config.json of {self.architecture} lacks the object '{name}': download it again.")
        fields = Fields(
            config, self.architecture, {*ignore_fields, *parts, *self.ignored, "tie_word_embeddings", *_OTHER_IDS}
        )
        vision = Fields(
            dict(parts["vision_config"]), f"{self.architecture} (vision_config)", {*ignore_fields, *self.unused}
        )
        tokens = tuple(fields.typed(name, default) for name, default in self.tokens)
        tied = config.get("tie_word_embeddings", parts["text_config"].get("tie_word_embeddings", self.tied))
        text = self.text.read({**parts["text_config"], "tie_word_embeddings": bool(tied)}, ignore_fields)
        rope = vision.take("rope_parameters", {})
        values: dict[str, Any] = {
            "output_dim": text.embed_dim,
            "merge_norm_eps": text.norm_eps,
            "rope_base": float(rope.get("rope_theta", vision.take("rope_theta", self.rope_base))),
            **self.fixed,
        }
        for where, own in ((vision, self.own), (fields, self.outer_fields)):
            for name, ours, default in own:
                is_text = isinstance(default, str)
                values[ours] = where.choice(name, _ACTIVATIONS, default) if is_text else where.typed(name, default)
        tower = VisionDescription(**{**values, **self.read_vision(vision, values, fields)})
        vision.require(**{name: getattr(tower, ours) for name, ours in self.derived})
        for where in (vision, fields):
            where.refuse_rest()
        axes = self._axes(parts["text_config"], text.rope_dim // 2) if self.sections else ()
        own = {**vars(text), "rope_axes": axes, **self.read_more(config)}
        return ImageTextDescription(**own, vision=tower, image_tokens=tokens)

    def _axes(self, config: Mapping[str, Any], pairs: int) -> tuple[int, ...]:
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        sections = rope.get("mrope_section", self.sections)
        valid = isinstance(sections, list | tuple) and all(is_whole(size, pairs) for size in sections)
        if not valid or len(sections) != 3 or sum(sections) != pairs:
            raise ModelError(
                f"config.json of {self.architecture} has mrope_section = {sections}, which are not three numbers with "
                f"the sum {pairs}."
            )
        if not self.interleaved:
            return tuple(axis for axis, size in enumerate(sections) for _ in range(size))
        return tuple(pair % 3 if pair % 3 and pair < 3 * sections[pair % 3] else 0 for pair in range(pairs))

    def write(self, d: ImageTextDescription) -> dict[str, Any]:
        """Make the ``config.json`` from which ``transformers`` builds the same model.

        Raises:
            ModelError: a ``config.json`` cannot express the description.
        """
        text = self.text.write(replace(d.text, rope_axes=()))
        text.pop("architectures")
        if self.sections:
            rope = {"rope_type": "default", **(text.get("rope_scaling") or {})}
            rope |= {"mrope_section": [d.rope_axes.count(axis) for axis in range(3)]}
            text["rope_scaling"] = {**rope, "mrope_interleaved": True} if self.interleaved else rope
        vision = {name: getattr(d.vision, ours) for name, ours, *_ in (*self.own, *self.derived)}
        activations = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}
        vision |= {name: activations[vision[name]] for name, ours, _ in self.own if ours == "activation"}
        if d.vision.rope != "none" and d.vision.rope_base != self.rope_base:
            vision["rope_parameters"] = {"rope_type": "axial", "rope_theta": d.vision.rope_base}
        more = self.write_more(d)
        config = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **{name: token for (name, _), token in zip(self.tokens, d.image_tokens, strict=True)},
            **{name: getattr(d.vision, ours) for name, ours, _ in self.outer_fields},
            "tie_word_embeddings": d.tie_word_embeddings,
            **more,
            "text_config": {**text, **more.get("text_config", {})},
            "vision_config": {"model_type": self.vision_type, **vision, **self.write_vision(d.vision)},
        }
        if (again := self.read(config)) != d:
            raise ModelError(f"A config.json of {self.architecture} cannot express {d}, only {again}.")
        return config


def read_config(
    formats: Sequence[ImageTextFormat], config: Mapping[str, Any], ignore_fields: Collection[str] = ()
) -> ImageTextDescription:
    """Read a ``config.json``, in the format for its architecture and text decoder."""
    if "text_config" not in config:  # before transformers 5, the fields of the text decoder are at the top level
        outside = {"architectures", "model_type", "vision_config", "tie_word_embeddings"}
        outside |= {name for name in config if name.endswith("_token_id")}
        text = {name: value for name, value in config.items() if name not in outside}
        config = {**{name: config[name] for name in outside & config.keys()}, "text_config": text}
    text = config["text_config"] if isinstance(config["text_config"], Mapping) else {}
    named = [one for one in formats if one.architecture == architecture_of(config)] or formats
    chosen = next((one for one in named if one.text.model_type == text.get("model_type")), named[0])
    return chosen.read(config, ignore_fields)


def write_config(formats: Sequence[ImageTextFormat], d: ImageTextDescription) -> dict[str, Any]:
    """Write the ``config.json`` of a description, in the first format that can express it."""
    for one in formats[:-1]:
        try:
            return one.write(d)
        except ModelError:
            continue
    return formats[-1].write(d)
