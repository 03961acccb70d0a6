"""Every field of every ``config.json`` left out, or ``null``: what is read then is what ``transformers`` reads.

``transformers`` fills the rest in; our description of the shorter file has to be that of the file so filled, or the
file is refused with a field's name. Logits are compared where the model is small and differs from that of the whole
file, and where ``transformers`` keeps the ``null`` and its model runs with it.
"""

import copy
import itertools
import warnings
from typing import Any

import pytest
import torch

from tests.torchtune.checkpoints.small import config_class
from tests.torchtune.models.conftest import on_disk
from tests.torchtune.models.families import FAMILIES, NAME_OF_ARCHITECTURE
from torchtune.models import Description, ModelError, build
from torchtune.models._hf_fields import _HARMLESS, Fields
from torchtune.models._spec import spec_for_architecture

_SIZES = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_PLAIN = {"rope_type": "default", "rope_theta": 20_000.0}
_YARN = {**_PLAIN, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
_LLAMA3 = {**_YARN, "rope_type": "llama3", "low_freq_factor": 1.5, "high_freq_factor": 3.0}
_MSCALES = {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.2}
_LONG = {**FAMILIES["phi4_mini_long"][1]["rope_parameters"], "rope_theta": 20_000.0}
_HALF = {**_PLAIN, "partial_rotary_factor": 0.5}
_PAIR = {"full_attention": {**_YARN, "beta_fast": 16.0}, "sliding_attention": {**_PLAIN, "rope_theta": 500.0}}
_KINDS = ["full_attention", "sliding_attention", "full_attention"]
_FIRST = ["sliding_attention", "full_attention", "full_attention"]
_ON = {"use_sliding_window": True, "sliding_window": 4}
_GEMMA4 = {
    "num_hidden_layers": 3,
    "layer_types": _KINDS,
    "rope_parameters": {**_PAIR, "full_attention": {**_HALF, "rope_type": "proportional"}},
}
_LOAD = {"router_aux_loss_coef": 0.02}
_CHOSEN = {"num_experts_per_tok": 3, "norm_topk_prob": False}
_STEPS = {"num_hidden_layers": 5, "mlp_only_layers": [1], "decoder_sparse_step": 2}
_DELTA = {"linear_num_value_heads": 32, "linear_conv_kernel_dim": 3}
_BIAS = {"attention_bias": True}
# Row of FAMILIES, and which of several -> what the file says beyond: as little as possible as it would be if left out
_BEYOND: dict[str, dict[str, Any]] = {
    "llama3": {"rope_parameters": _LLAMA3},
    "llama3_dynamic": {"rope_parameters": {**_PLAIN, "rope_type": "dynamic", "factor": 3.0}},
    "mistral": {"rope_parameters": _MSCALES},
    "gemma": {"tie_word_embeddings": False, "hidden_act": "silu", "rope_parameters": _PLAIN},
    "gemma2": {"sliding_window": 4, "layer_types": _KINDS, "rope_parameters": _PLAIN},
    "gemma3": {"final_logit_softcapping": 4.0, "rope_parameters": _PAIR},
    "gemma4_shared_keys": {
        "attention_k_eq_v": True,
        "vocab_size_per_layer_input": 61,
        "rope_parameters": _GEMMA4["rope_parameters"],
    },
    "gemma4_unified": _GEMMA4,
    "gemma4_experts": _GEMMA4,
    "phi_partial": {"sliding_window": 4, "rope_parameters": {**_PLAIN, "partial_rotary_factor": 0.75}},
    "phi4_mini_long": {"rope_parameters": _LONG},
    "olmo2": {"rope_parameters": _YARN, **_BIAS},
    "olmo3": {"rope_parameters": _PAIR},
    "seed_oss": {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
    "smol3": {**_ON, "layer_types": _FIRST, "rope_parameters": _PLAIN},
    "smol3 interval": {**_ON, "no_rope_layers": None, "no_rope_layer_interval": 3},
    "granite": {"rope_parameters": _PLAIN},
    "granite4_h": {
        "num_hidden_layers": 2,
        "layer_types": ["mamba", "attention"],
        "position_embedding_type": "rope",
        "rope_parameters": _PLAIN,
        "mamba_d_conv": 3,
        "mamba_chunk_size": 16,
        "time_step_limit": (0.01, 5.0),
    },
    "falcon_h1": {
        "num_hidden_layers": 1,
        "rope_parameters": _PLAIN,
        "mamba_d_ssm": 96,
        "mamba_d_head": 8,
        "mamba_d_conv": 3,
        "mamba_chunk_size": 16,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        "mlp_bias": True,
    },
    "nemotron_h": {
        "mlp_hidden_act": "silu",
        "mamba_num_heads": 16,
        "n_group": 2,
        "conv_kernel": 3,
        "chunk_size": 16,
        "time_step_min": 0.1,
        "norm_topk_prob": False,
    },
    "ernie4_5": {"use_bias": True, "rope_parameters": _LLAMA3},
    "hunyuan": {"rope_parameters": {**_PLAIN, "rope_type": "dynamic", "factor": 2.0, "alpha": 20.0}},
    "ministral3": {"sliding_window": 4, "rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.3}},
    "exaone4": {"layer_types": _KINDS, "rope_parameters": _LLAMA3},
    "minimax_m2": _LOAD,
    "olmoe": {**_LOAD, "norm_topk_prob": True, "rope_parameters": _YARN},
    "glm4": {"rope_parameters": {**_PLAIN, "partial_rotary_factor": 1.0}},
    "qwen2": {"max_window_layers": 2, "layer_types": None, "rope_parameters": _YARN},
    "qwen2 kinds": {"layer_types": _KINDS},
    "qwen3": {**_ON, "max_window_layers": 2, "layer_types": None, **_BIAS},
    "qwen3_5": {
        "rope_parameters": {**_HALF, "mrope_section": [1, 1, 1], "mrope_interleaved": True},
        **_DELTA,
        **_BIAS,
    },
    "qwen3_5_moe": {"rope_parameters": _HALF, **_DELTA, **_LOAD, "num_experts_per_tok": 3},
    "qwen3_next": {
        "rope_parameters": _HALF,
        **_DELTA,
        **_LOAD,
        **_STEPS,
        "norm_topk_prob": False,
        "layer_types": ["full_attention", *["linear_attention"] * 2, "full_attention", "linear_attention"],
    },
    "glm4_moe": {**_CHOSEN, "n_group": 2, "first_k_dense_replace": 2},
    "llama4": {
        **_LOAD,
        **_BIAS,
        "layer_types": ["chunked_attention", "full_attention", "full_attention"],
        "rope_parameters": _LLAMA3,
        "attn_scale": 0.4,
    },
    "deepseek_v3": {**_CHOSEN, **_BIAS, "n_group": 2, "topk_group": 1, "rope_parameters": _MSCALES},
    "glm4_moe_lite": {**_CHOSEN, **_BIAS},
    "mistral4": {
        **_CHOSEN,
        **_BIAS,
        "first_k_dense_replace": 2,
        "rope_interleave": False,
        "rope_parameters": {**_MSCALES, "llama_4_scaling_beta": 0.3},
    },
    "lfm2": {"conv_L_cache": 4},
    "lfm2_moe": {"conv_L_cache": 4, "norm_topk_prob": False, "use_expert_bias": False, "norm_eps": 1e-3},
    "qwen3_moe": {**_ON, **_LOAD, **_STEPS, "rope_parameters": _PLAIN},
    "mixtral": {**_LOAD, "num_experts_per_tok": 3, "rope_parameters": _PLAIN},
    "gpt_oss": {
        **_LOAD,
        "layer_types": _KINDS,
        "rope_parameters": {**_YARN, "truncate": False, "beta_slow": 2.0},
    },
}
# An architecture without an entry above is compared as it is in FAMILIES.
_STATED = {FAMILIES[name.partition(" ")[0]][0] for name in _BEYOND}
for _architecture, _name in NAME_OF_ARCHITECTURE.items():
    if _architecture not in _STATED:
        _BEYOND[_name] = {}
_ROWS = {name: FAMILIES[name.partition(" ")[0]] for name in _BEYOND}
# name -> (architecture, what its file says beyond the sizes)
_FILES = {name: (architecture, {**said, **_BEYOND[name]}) for name, (architecture, said) in _ROWS.items()}


def _filled(architecture: str, file: dict[str, Any]) -> Any:
    """The file as transformers understands it."""
    return config_class(architecture).from_dict(copy.deepcopy(file))


def _older(file: dict[str, Any]) -> dict[str, Any]:
    """The file in the words of transformers 4."""
    older = copy.deepcopy(file)
    rope = older.pop("rope_parameters", None) or {}
    if older["model_type"] == "olmo3":  # which had no field for the base of layers with a window
        rope = {**rope["full_attention"], "rope_theta": 500_000.0}
    elif "full_attention" in rope:
        older["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    older |= {key: rope.pop(key) for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    if older.get("original_max_position_embeddings"):
        rope.pop("original_max_position_embeddings", None)
    return {**older, "rope_scaling": rope if rope.get("rope_type", "default") != "default" else None}


def _without(file: dict[str, Any], path: tuple[str, ...], null: bool) -> dict[str, Any]:
    """The file without a field, or with ``null`` in its place."""
    file = copy.deepcopy(file)
    owner = file
    for key in path[:-1]:
        owner = owner[key]
    owner.pop(path[-1], None)
    if null:
        owner[path[-1]] = None
    return file


def _paths(node: dict[str, Any]) -> list[tuple[str, ...]]:
    paths = []
    for key, value in node.items():
        paths.append((key,))
        if isinstance(value, dict) and key.startswith(("rope", "full_", "sliding_")):
            paths += [(key, *inner_path) for inner_path in _paths(value)]
    return paths


def _turns(field: str) -> bool:
    """Whether it has to do with positions, which are what the words of transformers 4 say otherwise."""
    return any(word in field for word in ("position", "rope", "rotary", "theta", "head_dim", "layer_types", "window"))


def _read(architecture: str, file: dict[str, Any]) -> Description:
    spec = spec_for_architecture(f"{architecture}ForCausalLM")
    return spec.from_hf_config({**file, "architectures": [f"{architecture}ForCausalLM"]})


_CANNOT = (TypeError, KeyError, ValueError)  # what models of transformers raise that compute with a missing number
_TOKENS = torch.tensor([[31, 4, 59, 26, 5, 35, 8, 9, 7, 32, 23, 8, 46, 26, 43, 38, 32, 7, 9, 50, 2, 8, 41, 9]])


def _reference(architecture: str, config: Any, spread: float) -> tuple[torch.nn.Module, torch.Tensor]:
    """A random model of transformers, and its logits."""
    import transformers

    config._attn_implementation = "eager"
    torch.manual_seed(0)
    config.initializer_range = spread
    hf_model = getattr(transformers, f"{architecture}ForCausalLM")(config).eval()
    with torch.no_grad():
        return hf_model, hf_model(_TOKENS, use_cache=False).logits


def _logits_differ_by(architecture: str, config: Any, description: Description, *, lacks: bool = False) -> float | None:
    """Largest difference to a random model of transformers, relative to the largest logit.

    None if transformers ``lacks`` a number and cannot compute without it.
    """
    # A recurrence magnifies rounding.
    try:
        hf_model, wanted = _reference(architecture, config, 0.1 if description.mixer else 0.3)
    except _CANNOT:
        if lacks:
            return None
        raise
    model = build(description, spec_for_architecture(f"{architecture}ForCausalLM")).eval()
    weights = on_disk(hf_model.state_dict().items(), architecture)
    if description.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    model.load_state_dict(dict(model.spec.weight_map("hf").to_tune(weights.items(), description)))
    with torch.no_grad():
        logits = model(_TOKENS)
    return float((wanted - logits).abs().max() / wanted.abs().max())


def _keeps_null(config: Any, path: tuple[str, ...]) -> bool:
    """Whether the field is still null in transformers' config."""
    value = config.to_dict()
    for key in path:
        value = value.get(key) if isinstance(value, dict) else value
    return value is None and path[-1] not in _HARMLESS


def _computes(architecture: str, config: Any) -> bool:
    """Whether a model of transformers runs, which takes a while to find out."""
    try:
        _reference(architecture, copy.deepcopy(config), 0.1)
    except _CANNOT:
        return False
    return True


def _runs(config: Any) -> bool:
    """Whether transformers can: it makes no mask for a window without a size, and no positions without a base.

    Nor has it positions for a kind of layer that Gemma 4's ``rope_parameters`` lacks, and it does not stretch a base
    for heads without a stated size. In latent attention, it needs the factor of YaRN, and the right share of a head.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    if "alpha" in parameters and config.head_dim is None:
        return False
    if hasattr(config, "kv_lora_rank"):
        rope = config.rope_parameters
        share = 1.0 if rope["rope_type"] == "default" else rope.get("partial_rotary_factor") or 1.0
        turning = int((config.head_dim or 0) * share) if rope["rope_type"] else None
        if turning != config.qk_rope_head_dim or (rope.get("mscale_all_dim") and rope["factor"] is None):
            return False
    kinds = set(getattr(config, "layer_types", None) or ())
    if "attention_k_eq_v" in config.to_dict() and kinds - parameters.keys():
        return False
    windowed = "sliding_attention" in kinds
    ropes = [rope for rope in parameters.values() if isinstance(rope, dict)]
    return not (windowed and config.sliding_window is None) and all(
        rope.get("rope_theta") is not None for rope in ropes
    )


def _small(description: Description) -> bool:
    widest = max(description.intermediate_dim, description.vocab_size, description.q_dim, description.expert_dim)
    widest = max(widest, description.layer_embed_vocab)
    return widest < 1000 and description.num_layers < 10 and description.num_experts < 20


@pytest.mark.parametrize("name", _FILES)
def test_a_field_left_out_has_the_value_that_transformers_gives_it(name, monkeypatch):
    import transformers

    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    architecture, extra_fields = _FILES[name]
    newer = {
        **_filled(architecture, {**_SIZES, **extra_fields}).to_dict(),
        **{k: v for k, v in extra_fields.items() if v is None},
    }
    asked = set()
    take = Fields.take
    monkeypatch.setattr(Fields, "take", lambda fields, key, *default: asked.add(key) or take(fields, key, *default))
    compared = {_read(architecture, newer)}
    monkeypatch.undo()
    unsaid = [(key,) for key in sorted(asked - newer.keys() - _HARMLESS)]
    assert _logits_differ_by(architecture, _filled(architecture, newer), next(iter(compared))) < 1e-4
    mistakes = []
    for file in (newer,) if architecture.startswith("Gemma4") else (newer, _older(newer)):  # it has no older words
        paths = [path for path in _paths(file) if file is newer or path not in _paths(newer) or _turns(path[-1])]
        changes = [*itertools.product(paths, (False, True)), *((path, True) for path in unsaid if file is newer)]
        for path, null in changes:
            short = _without(file, path, null)
            try:
                config = _filled(architecture, short)
            except Exception:  # noqa: BLE001 - transformers has no value for it either
                continue
            if not _runs(config):
                continue
            label = ".".join(path) + " = null" * null
            try:
                description = _read(architecture, short)
            except ModelError as error:
                if path[-1] not in str(error):
                    mistakes.append(f"{label}: {error}")
                continue
            # Which drops a null that its model has no other field for.
            wanted = _read(architecture, {**({path[0]: None} if null else {}), **config.to_dict()})
            if description != wanted:
                if not null or _computes(architecture, config):
                    mistakes.append(f"{label}: {_difference(description, wanted)}")
                continue
            lacks = null and file is newer and _keeps_null(config, path)
            if _small(description) and (description not in compared or lacks):
                difference = _logits_differ_by(
                    architecture, config, description, lacks=lacks and description in compared
                )
                compared.add(description)
                if difference is not None and difference > 1e-4:
                    mistakes.append(f"{label}: logits differ by {difference:.1e}")
    assert not mistakes, "\n".join(mistakes)


_FULL = {"layer_types": ["full_attention"] * 3, "rope_parameters": _PLAIN}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("exaone4", {**_FULL, "sliding_window": 9}),  # no layer has a window, but no layer has RoPE either
        ("exaone4", {**_FULL, "sliding_window": 0}),
        ("exaone4", {**_FULL, "sliding_window": None}),
        ("exaone4", {"layer_types": _KINDS, "sliding_window": 9, "rope_parameters": _PLAIN}),
        ("minimax_m2", {"head_dim": 16, "rotary_dim": 8}),
        ("minimax_m2", {"head_dim": 16, "rotary_dim": 8, "partial_rotary_factor": None}),
        ("minimax_m2", {"head_dim": 16, "rotary_dim": 8, "partial_rotary_factor": 0.25}),
        *((name, {"partial_rotary_factor": None}) for name in ("glm4", "glm4_moe", "qwen3_5", "qwen3_next")),
    ],
)
def test_a_field_that_decides_about_another_is_read_as_transformers_reads_it(name, said):
    architecture, fields = FAMILIES[name]
    file = {**_SIZES, **fields, **said}
    description = _read(architecture, file)
    assert _logits_differ_by(architecture, _filled(architecture, file), description) < 1e-4
    spec = spec_for_architecture(f"{architecture}ForCausalLM")
    assert spec.from_hf_config(spec.to_hf_config(description)) == description


@pytest.mark.parametrize("name", {architecture: name for name, (architecture, _) in _FILES.items()}.values())
def test_another_activation_is_computed_or_refused_by_name(name):
    """In a mixer, too, and where ``transformers`` does not read the field."""
    import transformers

    transformers.logging.set_verbosity_error()
    architecture, fields = _FILES[name]
    for field in ("hidden_act", "hidden_activation", "mlp_hidden_act", "mamba_hidden_act"):
        file = {**_SIZES, **fields, field: "gelu"}
        try:
            description = _read(architecture, file)
        except ModelError as error:
            if f"has {field} = 'gelu'" not in str(error):
                raise
            continue
        assert _logits_differ_by(architecture, _filled(architecture, file), description) < 1e-4, field


def _difference(found: Description, wanted: Description) -> str:
    actual, expected = vars(found), vars(wanted)
    return ", ".join(
        f"{key} {actual[key]} instead of {expected[key]}" for key in actual if actual[key] != expected[key]
    )
