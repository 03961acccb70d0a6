"""Read and write the ``config.json`` of text decoders with image tokens."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torchtune.models._description import Description, ModelError
from torchtune.models._hf_config import HFFormat
from torchtune.models._hf_fields import Fields, architecture_of, is_number, is_whole
from torchtune.models._vision_description import ImageTextDescription, VisionDescription, text_fields

_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
_ROPES = ("rope_parameters", "rope_scaling")
# Ids of tokens around images, and of other media.
_OTHER_IDS = {"vision_start_token_id", "vision_end_token_id", "vision_token_id", "video_token_id"}


def _nothing(*given: Any) -> dict[str, Any]:  # a lambda could not be pickled with the model
    return {}


@dataclass(frozen=True)
class ImageTextFormat:
    """Mapping between an :class:`ImageTextDescription` and the ``config.json`` of a Hugging Face architecture.

    Attributes:
        architecture: entry of ``architectures``.
        model_type: value of ``model_type``.
        texts: formats of ``text_config``, of which its ``model_type`` chooses one.
        vision_type: ``model_type`` of ``vision_config``.
        own: fields of ``vision_config``: (their name, our name, default of ``transformers`` and type).
        tokens: fields with ids of placeholders, and their defaults.
        beside: as ``own``, for fields outside ``vision_config``.
        fixed: values of the tower's description that are not in the file.
        derived: fields of ``vision_config`` that must be equal to another value: (their name, our name).
        unused: fields of ``vision_config`` that do not affect the tower.
        activation: name of the tower's activation field, and its default; empty if there is none.
        read_vision: reads the other fields of ``vision_config``: ``read_vision(fields, values, whole) -> values``;
            ``whole`` has the fields of the file that contains it.
        write_vision: inverse of ``read_vision``.
        sections: default of ``mrope_section``: numbers of pairs rotated by time, row and column; empty without M-RoPE.
        interleaved: whether the pairs of rows and columns take turns with those of time, or come after them.
        rope_base: default base of the tower's rotary embedding.
        tied: default of ``tie_word_embeddings``.
        ignored: other fields of the file that do not matter.
        read_more: reads further values of the description: ``read_more(config) -> values``.
        write_more: inverse of ``read_more``: further fields, also within ``text_config`` and ``vision_config``.
    """

    architecture: str
    model_type: str
    texts: tuple[HFFormat, ...]
    vision_type: str
    own: tuple[tuple[str, str, Any], ...]
    tokens: tuple[tuple[str, int], ...]
    beside: tuple[tuple[str, str, Any], ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    derived: tuple[tuple[str, str], ...] = ()
    unused: tuple[str, ...] = ()
    activation: tuple[str, ...] = ()
    read_vision: Callable[[Fields, dict[str, Any], Fields], dict[str, Any]] = _nothing
    write_vision: Callable[[VisionDescription], dict[str, Any]] = _nothing
    sections: tuple[int, ...] = ()
    interleaved: bool = True
    rope_base: float = 10_000.0
    tied: bool = False
    ignored: tuple[str, ...] = ()
    read_more: Callable[[Mapping[str, Any]], dict[str, Any]] = _nothing
    write_more: Callable[[ImageTextDescription], dict[str, Any]] = _nothing

    @property
    def architectures(self) -> tuple[str, ...]:
        """Entries of ``architectures``."""
        return (self.architecture,)

    def read(self, config: Mapping[str, Any], ignore_fields: Collection[str] = ()) -> ImageTextDescription:
        """Make a description from the contents of a ``config.json``; see :meth:`HFFormat.read`.

        Raises:
            ModelError: a field is missing, or its value has no equivalent in a description. The message names it.
        """
        if "text_config" not in config:  # files before transformers 5 have its fields beside the tower's
            config = self._nested(config)
        parts = {name: config.get(name) for name in ("text_config", "vision_config")}
        for name, part in parts.items():
            if not isinstance(part, Mapping):
                raise ModelError(f"config.json of {self.architecture} lacks the object '{name}': download it again.")
        ignored = {*ignore_fields, *parts, *self.ignored, "tie_word_embeddings", *_OTHER_IDS}
        fields = Fields(config, self.architecture, ignored)
        tokens = tuple(read_whole(fields, name, default) for name, default in self.tokens)
        tied = parts["text_config"].get("tie_word_embeddings", self.tied)
        tie = {"tie_word_embeddings": bool(config.get("tie_word_embeddings", tied))}
        text = self._text_of(parts["text_config"]).read({**parts["text_config"], **tie}, ignore_fields)
        ignored = {*ignore_fields, *self.unused}
        vision = Fields(dict(parts["vision_config"]), f"{self.architecture} (vision_config)", ignored)
        values: dict[str, Any] = {"output_dim": text.embed_dim, "merge_norm_eps": text.norm_eps, **self.fixed}
        for where, own in ((vision, self.own), (fields, self.beside)):
            values |= {ours: _read_value(where, name, default) for name, ours, default in own}
        if self.activation:
            name, default = self.activation
            values["activation"] = vision.choice(name, _ACTIVATIONS, default)
        rope = vision.take("rope_parameters", None) or {}
        values["rope_base"] = float(rope.get("rope_theta", vision.take("rope_theta", self.rope_base)))
        tower = VisionDescription(**{**values, **self.read_vision(vision, values, fields)})
        vision.require(**{name: getattr(tower, ours) for name, ours in self.derived})
        for where in (vision, fields):
            where.refuse_rest()
        own = {**text_fields(text), "rope_axes": self._axes(parts["text_config"], text)}
        return ImageTextDescription(**own, vision=tower, image_tokens=tokens, **self.read_more(config))

    def _text_of(self, config: Mapping[str, Any]) -> HFFormat:
        return next((text for text in self.texts if text.model_type == config.get("model_type")), self.texts[0])

    def _nested(self, config: Mapping[str, Any]) -> dict[str, Any]:
        outside = {"architectures", "model_type", "vision_config", "tie_word_embeddings"}
        outside |= {name for name in config if name.endswith("_token_id")}
        whole = {name: value for name, value in config.items() if name in outside}
        return {**whole, "text_config": {name: value for name, value in config.items() if name not in outside}}

    def _axes(self, config: Mapping[str, Any], text: Description) -> tuple[int, ...]:
        if not self.sections:
            return ()
        rope = next((config[name] for name in _ROPES if isinstance(config.get(name), Mapping)), {})
        sections = rope.get("mrope_section", self.sections)
        pairs = text.rope_dim // 2
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
        refusal: ModelError | None = None
        for text in self.texts:
            try:
                config = self._write(text, d)
            except ModelError as error:
                refusal = error
                continue
            if (again := self.read(config)) == d:
                return config
            refusal = ModelError(f"A config.json of {self.architecture} cannot express {d}, only {again}.")
        raise refusal

    def _write(self, text_format: HFFormat, d: ImageTextDescription) -> dict[str, Any]:
        text = text_format.write(replace(d.text, rope_axes=()))
        text.pop("architectures")
        if self.sections:
            rope = {"rope_type": "default", **(text.get("rope_scaling") or {})}
            rope |= {"mrope_section": [d.rope_axes.count(axis) for axis in range(3)]}
            text["rope_scaling"] = {**rope, "mrope_interleaved": True} if self.interleaved else rope
        vision = {name: getattr(d.vision, ours) for name, ours, *_ in (*self.own, *self.derived)}
        if self.activation:
            names = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}
            vision[self.activation[0]] = names[d.vision.activation]
        config = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **{name: token for (name, _), token in zip(self.tokens, d.image_tokens, strict=True)},
            **{name: getattr(d.vision, ours) for name, ours, _ in self.beside},
            "tie_word_embeddings": d.tie_word_embeddings,
            "text_config": text,
            "vision_config": {"model_type": self.vision_type, **vision, **self.write_vision(d.vision)},
        }
        if d.vision.rope != "none" and d.vision.rope_base != self.rope_base:
            config["vision_config"]["rope_parameters"] = {"rope_type": "axial", "rope_theta": d.vision.rope_base}
        for name, value in self.write_more(d).items():
            config[name] = {**config[name], **value} if isinstance(value, dict) else value
        return config


def _has_experts(d: ImageTextDescription) -> bool:
    return bool(d.num_experts)


@dataclass(frozen=True)
class TwoFormats:
    """Formats of a family's two architectures; ``is_other(description)`` chooses the second for writing."""

    one: ImageTextFormat
    other: ImageTextFormat
    is_other: Callable[[ImageTextDescription], bool] = _has_experts

    @property
    def architectures(self) -> tuple[str, ...]:
        """Entries of ``architectures``."""
        return (self.one.architecture, self.other.architecture)

    def read(self, config: Mapping[str, Any], ignore_fields: Collection[str] = ()) -> ImageTextDescription:
        """Read a ``config.json`` with the format of its architecture."""
        chosen = self.other if architecture_of(config) == self.other.architecture else self.one
        return chosen.read(config, ignore_fields)

    def write(self, d: ImageTextDescription) -> dict[str, Any]:
        """Write the ``config.json`` of a description."""
        return (self.other if self.is_other(d) else self.one).write(d)


def _read_value(fields: Fields, name: str, default: Any) -> Any:
    """Read a field with the type of its default."""
    if type(default) is int:
        return read_whole(fields, name, default)
    value = fields.take(name, default)
    if not is_number(value) and not isinstance(value, bool):
        raise fields.refusal(name, value)
    return type(default)(value)


def read_whole(fields: Fields, name: str, default: int) -> int:
    """Read a whole number of ``vision_config``, or the first of two equal ones."""
    value = fields.take(name, default)
    if isinstance(value, list) and value and value.count(value[0]) == len(value):
        value = value[0]
    if not is_whole(value, 2**22):
        raise fields.refusal(name, value)
    return int(value)


def read_layers(fields: Fields, name: str, default: list[int]) -> tuple[int, ...]:
    """Read a list of layers of ``vision_config``."""
    found = fields.list_of(name, 2**12, int)
    return tuple(default if found is None else found)
