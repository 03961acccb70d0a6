"""Read and write the ``config.json`` of vision-language models."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torchtune.models._description import ImageTextDescription, ModelError, VisionDescription
from torchtune.models._hf_config import HFFormat
from torchtune.models._hf_fields import (
    HF_ACTIVATION_NAMES,
    HF_ACTIVATIONS,
    Fields,
    architecture_of,
    format_value,
    is_number,
    is_whole,
    no_values,
)

# Fields with ids of tokens around images and of other media, which are not read.
_OTHER_IDS = {"vision_start_token_id", "vision_end_token_id", "vision_token_id", "video_token_id"}
# Size of a tower -> its usual name in vision_config; other sizes have the same name in both.
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
        tower_fields: fields of ``vision_config``: (name in the file, name in the description, default of
            ``transformers``, which also defines the type). A field with a string default is an activation.
        tokens: fields with ids of placeholder tokens -> default id.
        outer_fields: fields outside ``vision_config``, in the format of ``tower_fields``.
        fixed: values of the tower's description that are not in the file.
        derived: fields of ``vision_config`` that must equal a value of the tower's description: name in the file ->
            name in the description.
        tower_unused: fields of ``vision_config`` that do not affect the tower.
        read_vision: reads the other fields of ``vision_config``: ``read_vision(fields, values,
            outer_fields) -> values``, with the values that were read before.
        write_vision: inverse of ``read_vision``.
        mrope_sections: default of ``mrope_section``: numbers of pairs rotated by time, row and column; empty without
            M-RoPE.
        mrope_interleaved: whether pairs rotated by time, row and column alternate, instead of forming three sections.
        rope_base: default base of the tower's rotary embedding.
        tied: default of ``tie_word_embeddings``.
        outer_unused: fields outside ``vision_config`` that do not affect the model.
        read_more: reads further values of the description: ``read_more(config) -> values``.
        write_more: inverse of ``read_more``: further fields, also within ``text_config``.
    """

    architecture: str
    model_type: str
    text: HFFormat
    vision_type: str
    tower_fields: tuple[tuple[str, str, Any], ...]
    tokens: Mapping[str, int]
    outer_fields: tuple[tuple[str, str, Any], ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    derived: Mapping[str, str] = field(default_factory=dict)
    tower_unused: tuple[str, ...] = ()
    read_vision: Callable[[Fields, dict[str, Any], Fields], dict[str, Any]] = no_values
    write_vision: Callable[[VisionDescription], dict[str, Any]] = no_values
    mrope_sections: tuple[int, ...] = ()
    mrope_interleaved: bool = True
    rope_base: float = 10_000.0
    tied: bool = False
    outer_unused: tuple[str, ...] = ()
    read_more: Callable[[Mapping[str, Any]], dict[str, Any]] = no_values
    write_more: Callable[[ImageTextDescription], dict[str, Any]] = no_values

    @staticmethod
    def sizes(**defaults: int) -> tuple[tuple[str, str, int], ...]:
        """Make the entries of ``tower_fields`` for the sizes of a tower, from names in the description and defaults."""
        return tuple((_SIZES.get(name, name), name, default) for name, default in defaults.items())

    def read(self, config: Mapping[str, Any], ignore_fields: Collection[str] = ()) -> ImageTextDescription:
        """Make a description from the contents of a ``config.json``; see :meth:`HFFormat.read`.

        Raises:
            ModelError: a field is missing, or its value has no equivalent in a description. The message names the
                field.
        """
        for name in ("text_config", "vision_config"):
            if not isinstance(config.get(name), Mapping):
                raise ModelError(f"config.json of {self.architecture} lacks the object '{name}': download it again.")
        text_config = config["text_config"]
        skipped = {"text_config", "vision_config", "tie_word_embeddings", *self.outer_unused, *_OTHER_IDS}
        outer_fields = Fields(config, self.architecture, {*ignore_fields, *skipped})
        vision_fields = Fields(
            dict(config["vision_config"]),
            f"{self.architecture} (vision_config)",
            {*ignore_fields, *self.tower_unused},
        )
        image_tokens = tuple(outer_fields.typed(name, default) for name, default in self.tokens.items())
        is_tied = config.get("tie_word_embeddings", text_config.get("tie_word_embeddings", self.tied))
        text = self.text.read({**text_config, "tie_word_embeddings": bool(is_tied)}, ignore_fields)

        rope_base = vision_fields.take("rope_theta", self.rope_base)
        rope_base = vision_fields.take("rope_parameters", {}).get("rope_theta", rope_base)
        if not is_number(rope_base):
            raise vision_fields.refusal("rope_parameters.rope_theta", rope_base)
        values: dict[str, Any] = {
            "output_dim": text.embed_dim,
            "merge_norm_eps": text.norm_eps,  # unless the family fixes it
            "rope_base": float(rope_base),
            **self.fixed,
            **_read_table(vision_fields, self.tower_fields),
            **_read_table(outer_fields, self.outer_fields),
        }
        values |= self.read_vision(vision_fields, values, outer_fields)
        tower = VisionDescription(**values)
        vision_fields.require(**{name: getattr(tower, attribute) for name, attribute in self.derived.items()})
        vision_fields.refuse_unread()
        outer_fields.refuse_unread()

        rope_axes = self._axes(text_config, text.rope_dim // 2) if self.mrope_sections else ()
        text_values = {**vars(text), "rope_axes": rope_axes, **self.read_more(config)}
        return ImageTextDescription(**text_values, vision=tower, image_tokens=image_tokens)

    def _axes(self, config: Mapping[str, Any], num_pairs: int) -> tuple[int, ...]:
        """Return the coordinate (0 time, 1 row, 2 column) that rotates each pair of channels."""
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        sections = rope.get("mrope_section", self.mrope_sections)
        valid = isinstance(sections, list | tuple) and all(is_whole(size, num_pairs) for size in sections)
        if not valid or len(sections) != 3 or sum(sections) != num_pairs:
            raise ModelError(
                f"config.json of {self.architecture} has mrope_section = {format_value(sections)}, which are not three "
                f"numbers with the sum {num_pairs}."
            )
        axes = []
        if not self.mrope_interleaved:
            for axis, size in enumerate(sections):
                axes += [axis] * size
            return tuple(axes)
        # Time, row and column alternate until a coordinate has all of its pairs; time has the others.
        for pair in range(num_pairs):
            axis = pair % 3
            if pair >= 3 * sections[axis]:  # the coordinate has all of its pairs
                axis = 0
            axes.append(axis)
        return tuple(axes)

    def write(self, d: ImageTextDescription) -> dict[str, Any]:
        """Make the ``config.json`` from which ``transformers`` builds the same model.

        Raises:
            ModelError: a ``config.json`` cannot express the description.
        """
        # The format of the text alone cannot express rope_axes: they are added below, as mrope_section.
        text_config = self.text.write(replace(d.text, rope_axes=()))
        text_config.pop("architectures")  # only the composite config has it
        if self.mrope_sections:
            rope = {"rope_type": "default", **(text_config.get("rope_scaling") or {})}
            rope["mrope_section"] = [d.rope_axes.count(axis) for axis in range(3)]
            if self.mrope_interleaved:
                rope["mrope_interleaved"] = True
            text_config["rope_scaling"] = rope

        vision_config: dict[str, Any] = {"model_type": self.vision_type}
        for name, attribute, _ in self.tower_fields:
            value = getattr(d.vision, attribute)
            if attribute == "activation":
                value = HF_ACTIVATION_NAMES[value]
            vision_config[name] = value
        for name, attribute in self.derived.items():
            vision_config[name] = getattr(d.vision, attribute)
        if d.vision.rope != "none" and d.vision.rope_base != self.rope_base:  # the default is left out
            vision_config["rope_parameters"] = {"rope_type": "axial", "rope_theta": d.vision.rope_base}
        vision_config |= self.write_vision(d.vision)

        config = {"architectures": [self.architecture], "model_type": self.model_type}
        config |= zip(self.tokens, d.image_tokens, strict=True)
        for name, attribute, _ in self.outer_fields:
            config[name] = getattr(d.vision, attribute)
        config["tie_word_embeddings"] = d.tie_word_embeddings
        family_fields = self.write_more(d)
        config |= family_fields
        config["text_config"] = {**text_config, **family_fields.get("text_config", {})}
        config["vision_config"] = vision_config

        # Whoever reads this file must get the same model.
        reread = self.read(config)
        if reread != d:
            raise ModelError(f"A config.json of {self.architecture} cannot express {d}, only {reread}.")
        return config


def _read_table(fields: Fields, table: Iterable[tuple[str, str, Any]]) -> dict[str, Any]:
    """Read the fields of a table: (name in the file, name in the description, default)."""
    values = {}
    for name, attribute, default in table:
        if isinstance(default, str):
            values[attribute] = fields.choice(name, HF_ACTIVATIONS, default)
            continue
        values[attribute] = fields.typed(name, default)
        if attribute in ("patch_size", "merge") and values[attribute] < 1:  # other sizes are divided by these
            raise fields.refusal(name, values[attribute])
    return values


def read_config(
    formats: Sequence[ImageTextFormat], config: Mapping[str, Any], ignore_fields: Collection[str] = ()
) -> ImageTextDescription:
    """Read a ``config.json``, in the format for its architecture and text decoder."""
    if "text_config" not in config:  # before transformers 5, fields of the text decoder are at the top level
        outer_fields = {}
        text_fields = {}
        for name, value in config.items():
            is_outer = name in ("architectures", "model_type", "vision_config", "tie_word_embeddings")
            if is_outer or name.endswith("_token_id"):
                outer_fields[name] = value
            else:
                text_fields[name] = value
        config = {**outer_fields, "text_config": text_fields}
    text_config = config["text_config"] if isinstance(config["text_config"], Mapping) else {}
    architecture = architecture_of(config)
    candidates = [hf_format for hf_format in formats if hf_format.architecture == architecture] or formats
    for hf_format in candidates:
        if hf_format.text.model_type == text_config.get("model_type"):
            return hf_format.read(config, ignore_fields)
    # An unknown or absent model_type: the first format reads the file, or its error names a field.
    return candidates[0].read(config, ignore_fields)


def write_config(formats: Sequence[ImageTextFormat], d: ImageTextDescription) -> dict[str, Any]:
    """Write the ``config.json`` of a description, in the first format that can express it."""
    for hf_format in formats[:-1]:
        try:
            return hf_format.write(d)
        except ModelError:
            continue
    return formats[-1].write(d)
