"""Weight maps: every parameter exactly once, both ways, whatever the format."""

import dataclasses
import importlib
import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from torchtune.models import (
    Description,
    WeightMap,
    WeightMapError,
    build,
    get_spec,
    list_specs,
    rename_prefix,
    text_prefixes,
)
from torchtune.models._weight_map import Identity, Row
from torchtune.models._weight_ops import InterleaveRope, Stack

_VARIANTS = [
    {},
    {"tie_word_embeddings": True},
    {"q_bias": True, "k_bias": True, "v_bias": True},
    {"attn_output_bias": True, "mlp_bias": True, "qk_norm": "before_rope", "head_dim": 10},
]


def _description(**changes: object) -> Description:
    sizes = {"vocab_size": 11, "num_layers": 2, "embed_dim": 16, "intermediate_dim": 20, "max_seq_len": 32}
    return Description(**{**sizes, "num_heads": 4, "num_kv_heads": 2, **changes})


# Of text decoders: test_llama3_2_vision.py and test_image_text.py have the others.
_MAPS = []  # (family, kind of files)
for _name in list_specs():
    if not get_spec(_name).builder:
        _MAPS += [(_name, kind) for kind in get_spec(_name).weight_maps]


def external_names(weight_map, description):
    """Names of all tensors in a file."""
    names = []
    for group in weight_map.groups(description):
        names += group.external
    return names


def tune_names(groups):
    names = []
    for group in groups:
        names += group.tune
    return names


@pytest.mark.parametrize("changes", _VARIANTS, ids=str)
@pytest.mark.parametrize(("name", "kind"), _MAPS)
def test_every_parameter_is_mapped_exactly_once_both_ways(name, kind, changes):
    weight_map = get_spec(name).weight_map(kind)
    sizes = importlib.import_module(f"torchtune.models.{name}").SIZES
    named = "both" if any("sa_scale" in str(row.tune) for row in weight_map.rows) else "pre"  # where there are no sizes
    order = next((size.norm_order for size in sizes.values()), named)
    nemotron = {"attnless_layers": (0,), "mlpless_layers": (1,), "mlp_gated": False}  # whose names recur in each kind
    options = nemotron if any(size.attnless_layers for size in sizes.values()) else {}
    description = _description(**changes, **options, norm_order=order)
    torch.manual_seed(0)
    state = build(description).state_dict()
    for tensor in state.values():
        tensor.normal_()
    groups = weight_map.groups(description)
    assert sorted(tune_names(groups)) == sorted(state)
    external = list(weight_map.to_external(state.items(), description))
    assert len({key for key, _ in external}) == len(external)
    random.Random(0).shuffle(external)  # any order of reading
    again = list(weight_map.to_tune(external, description))
    assert len(again) == len(state)
    assert all(torch.equal(tensor, state[key]) for key, tensor in again)
    selected = weight_map.select([key for key, _ in external], description)
    assert set(tune_names(selected)) == set(state)


def test_tied_output_is_not_written_and_a_copy_is_accepted():
    description = _description(tie_word_embeddings=True)
    weight_map = get_spec("llama3").weight_map("hf")
    state = build(description).state_dict()
    external = dict(weight_map.to_external(state.items(), description))
    assert "lm_head.weight" not in external
    external["lm_head.weight"] = external["model.embed_tokens.weight"].clone()
    assert set(dict(weight_map.to_tune(external.items(), description))) == set(state)
    external["lm_head.weight"] = external["lm_head.weight"] + 1
    with pytest.raises(WeightMapError, match=r"'lm_head\.weight' differs from 'model\.embed_tokens\.weight'"):
        list(weight_map.to_tune(external.items(), description))
    meta = dict(get_spec("llama3").weight_map("meta").to_external(state.items(), description))
    assert torch.equal(meta["output.weight"], state["tok_embeddings.weight"])  # Meta's files repeat it


def test_untied_model_refuses_a_tied_checkpoint():
    weight_map = get_spec("llama3").weight_map("hf")
    description = _description()
    names = [name for name in external_names(weight_map, description) if name != "lm_head.weight"]
    with pytest.raises(WeightMapError, match=r"lacks the tensor 'lm_head.weight'.*tie_word_embeddings=True"):
        weight_map.select(names, description)


def test_unknown_missing_and_repeated_names_are_refused():
    weight_map = get_spec("llama3").weight_map("hf")
    description = _description()
    names = external_names(weight_map, description)
    weight_map.select([*names, "model.layers.1.self_attn.rotary_emb.inv_freq"], description)  # carries nothing
    with pytest.raises(WeightMapError, match=r"'model.layers.2.mlp.up_proj.weight' has no place.*2 layers"):
        weight_map.select([*names, "model.layers.2.mlp.up_proj.weight"], description)
    with pytest.raises(WeightMapError, match=r"lacks the tensor 'model.embed_tokens.weight' and 1 more"):
        weight_map.select([key for key in names if "norm.weight" not in key or "layer" in key][1:], description)
    tensor = ("model.norm.weight", torch.ones(16))
    with pytest.raises(WeightMapError, match="twice"):
        list(weight_map.to_tune([tensor, tensor], description, partial=True))
    with pytest.raises(WeightMapError, match=r"lacks the tensor 'model.embed_tokens.weight' and 19 more"):
        list(weight_map.to_tune([tensor], description))
    with pytest.raises(WeightMapError, match=r"'norm.weight' has no name"):
        list(weight_map.to_external([("norm.weight", torch.ones(16))], description))
    with pytest.raises(WeightMapError, match=r"'tok_embeddings.weight' is missing"):
        list(weight_map.to_external([("norm.scale", torch.ones(16))], description))


def test_modules_have_their_external_names():
    weight_map = get_spec("llama3").weight_map("hf")
    description = _description()
    assert weight_map.external_module("layers.1.attn.output_proj", description) == "model.layers.1.self_attn.o_proj"
    assert weight_map.external_module("output", description) == "lm_head"
    with pytest.raises(WeightMapError, match="not a single module"):
        weight_map.external_module("layers.1.attn", description)


_STACKED = WeightMap(
    (
        Row("h.{layer}.experts.{expert}.up", "layers.{layer}.up", Stack(transpose=True), when="expert_layers"),
        Row("embed", "embed", Identity()),
    )
)


def test_tensors_stream_group_by_group():
    mixture = {"num_experts": 3, "experts_per_token": 1, "expert_dim": 20, "expertless_layers": (0,)}
    description = dataclasses.replace(_description(head_dim=4), **mixture)

    def stream() -> Iterator[tuple[str, Tensor]]:
        yield "h.1.experts.0.up", torch.randn(20, 12)
        yield "embed", torch.randn(11, 12)
        raise AssertionError("read further than asked")

    assert next(_STACKED.to_tune(stream(), description))[0] == "embed"
    with pytest.raises(WeightMapError, match=r"h.1.experts.1.up' and 1 more"):
        list(_STACKED.to_tune([("h.1.experts.0.up", torch.randn(20, 12))], description, partial=True))


def test_rows_of_no_whole_heads_are_refused():
    with pytest.raises(ValueError, match="not a multiple of the head size 4"):
        InterleaveRope().to_tune([torch.zeros(6, 2)], _description(head_dim=4))
    with pytest.raises(ValueError, match="more than once"):
        WeightMap((Row("a", "x"), Row("a", "y"))).groups(_description())


def test_a_part_of_a_whole_checkpoint_has_other_prefixes():
    llama = get_spec("llama3")
    description = _description(tie_word_embeddings=True)
    alone = llama.weight_map("hf")
    for prefixes in (
        {"": "language_model."},
        {"model.": "model.language_model."},
        {"model.": "model.text_model.", "lm_head.": "text_head."},
    ):
        part = llama.as_part(prefixes)
        assert part.name == "llama3"
        names = external_names(part.weight_map("hf"), description)
        expected = external_names(alone, description)
        assert names == [rename_prefix(name, prefixes) for name in expected]
        head = rename_prefix("lm_head.weight", prefixes)  # a tied copy is known under its own name too
        assert len(part.weight_map("hf").select([*names, head], description)) == len(names)
        query = rename_prefix("model.layers.1.self_attn.q_proj", prefixes)
        assert part.weight_map("hf").external_module("layers.1.attn.q_proj", description) == query
        adapters = {group.external: group.tune for group in part.weight_map("hf").peft().groups(description)}
        tune_names = ("layers.1.attn.q_proj.lora_a.weight",)
        assert adapters[f"base_model.model.{query}.lora_A.weight",] == tune_names


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["model.layers.0.mlp.up_proj.weight", "lm_head.weight"], {}),
        (
            ["model.language_model.norm.weight", "lm_head.weight"],
            {"model.": "model.language_model.", "lm_head.": "lm_head."},
        ),
        (
            ["language_model.model.norm.weight", "vision_tower.x"],
            {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
        ),
        (
            ["language_model.model.norm.weight", "lm_head.weight"],
            {"model.": "language_model.model.", "lm_head.": "lm_head."},
        ),
        (["model.text_model.norm.weight"], {"model.": "model.text_model.", "lm_head.": "lm_head."}),
    ],
)
def test_the_text_part_of_a_checkpoint_is_found_by_its_names(names, expected):
    assert text_prefixes(names) == expected
