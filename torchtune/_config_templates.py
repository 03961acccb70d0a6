"""Configs from templates: a template per method, a table of methods and a table of models (``recipes/templates``).

``tools/make_configs.py`` writes the shipped configs with them. Any other combination of a model and a method is made
when its name is used: ``tune run --config qwen3/8B_lora_dpo_single_device``.
"""

import ast
import functools
import string
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torchtune.utils import atomic_write, cache_root, refuse_path_of_other_user

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
TEMPLATES = RECIPES / "templates"

# Settings that everybody changes: configs show them, whatever their value.
_ALWAYS_SHOWN = {
    "batch_size",
    "compile",
    "dtype",
    "enable_activation_checkpointing",
    "epochs",
    "expert_parallel_dim",
    "gradient_accumulation_steps",
    "kd_ratio",
    "max_new_tokens",
    "temperature",
}
# Bytes of weights, gradients and optimizer states that a device of 80 GB has room for: the others are activations'.
_DEVICE_BYTES = 64e9
# Bytes of a frozen parameter, in bf16.
_FROZEN_BYTES = 2
# A teacher has at least so many times as many parameters as its student, and nearly as many tokens: embeddings of one
# vocabulary are padded to different multiples.
_TEACHER_RATIO = 1.5
_PADDING_RATIO = 0.005
# Templates of methods for models with images.
_IMAGE_TEMPLATES = (
    "full_finetune_distributed",
    "full_finetune_single_device",
    "lora_finetune_distributed",
    "lora_finetune_single_device",
)


class _Template(string.Template):
    """Template in which ``@name`` is filled in; ``$`` belongs to the references of a config (``${output_dir}``)."""

    delimiter = "@"


def _read_table(name: str) -> dict[str, Any]:
    return parse_yaml((TEMPLATES / f"{name}.yaml").read_text(encoding="utf-8"))


def parse_yaml(text: str) -> dict[str, Any]:
    """Parse a table; the loader in C is ten times as fast."""
    import yaml

    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))


@functools.cache
def methods() -> dict[str, dict[str, Any]]:
    """Return the table of methods."""
    return _read_table("methods")


@functools.cache
def models() -> dict[str, Any]:
    """Return the table of models, with its families and the configs with a name of their own."""
    return _read_table("models")


@functools.cache
def sizes() -> dict[str, dict[str, Any]]:
    """Return the table of sizes, written by ``tools/make_configs.py``.

    A model has ``parameters`` and ``experts`` (if it has them); text models ``vocabulary``, and dense ones ``group``,
    the number of neighbors that share a scale when they are quantized.
    """
    return _read_table("sizes")


def builder(model: str) -> str:
    """Return the name of a model's builder."""
    return models()["models"][model].get("builder") or model.lower().translate(str.maketrans("/.", "__"))


def _is_in_range(limits: dict[str, Any], num_parameters: int) -> bool:
    """Return whether a number of parameters is within the limits ``from`` and ``below`` in the table of methods."""
    return float(limits.get("from", 0)) <= num_parameters < float(limits.get("below", "inf"))


@functools.cache
def usual_methods(model: str) -> list[str]:
    """Return the methods of a model that are shown first: those of its files, else about two that fit its size."""
    row = models()["models"][model]
    if "configs" in row:
        return row["configs"]
    num_parameters = sizes()[model]["parameters"]
    fitting = []
    for method, entry in methods().items():
        if entry.get("fits") and _is_in_range(entry["fits"], num_parameters):
            fitting.append(method)
    return fitting


def _method_values(model: str, method: str) -> dict[str, Any]:
    """Return the values of a method's template for a model: those of the method, of the model's size, of the model."""
    values = dict(methods()[method])
    size = sizes()[model]
    for rule in values.get("sizes", []):
        is_for_dense_only = rule.get("dense", False)
        if _is_in_range(rule, size["parameters"]) and not (size["experts"] and is_for_dense_only):
            values |= rule
    return values | models()["models"][model].get("changes", {}).get(method, {})


def _model_values(model: str) -> dict[str, str]:
    """Return the values of a model in templates."""
    row = models()["models"][model]
    family, _, size = model.partition("/")
    title = row.get("title") or f"{models()['families'][family]['title']} {size.replace('_', '-')}"
    lines = [f"\n  {name}: {value}" for name, value in row.get("arguments", {}).items()]
    return {
        "title": title,
        "repo": row["repo"],
        "dir": f"/tmp/{row['repo'].rpartition('/')[2]}",
        "family": family,
        "builder": builder(model),
        "arguments": "".join(lines),
    }


def select_parts(text: str, parts: Iterable[str]) -> str:
    """Return a template without the parts that a config lacks: #if PART or #if not PART, then #else, then #end."""
    lines = []
    conditions: list[bool] = []  # of the #if in which a line stands, the innermost last
    for line in text.splitlines(keepends=True):
        match line.split():
            case ["#if", "not", part]:
                conditions.append(part not in parts)
            case ["#if", part]:
                conditions.append(part in parts)
            case ["#else"]:
                conditions[-1] = not conditions[-1]
            case ["#end"]:
                conditions.pop()
            case _ if all(conditions):
                lines.append(line)
    return "".join(lines)


def render(
    name: str, model: str, method: str, teacher: str | None = None, is_for_any_model: bool = False, **changes: Any
) -> str:
    """Return the text of one config.

    Args:
        name: name of the config.
        model: model of the table of models, such as ``qwen3/8B``.
        method: method of the table of methods.
        teacher: teacher of a distillation, a model of the table.
        is_for_any_model: build model and teacher from the ``config.json`` of their checkpoints; they are examples.
        **changes: of the values of the method.
    """
    model_values = _model_values(model)
    if is_for_any_model:
        # Without the rules for sizes: the model is only known when the config runs.
        values = {**methods()[method], **changes}
        model_values["weights"] = "${model.checkpoint_dir}"
        tokenizer = "hf"
    else:
        values = {**_method_values(model, method), **changes}
        model_values["weights"] = model_values["dir"]
        tokenizer = models()["families"].get(model_values["family"], {}).get("tokenizer", "hf")

    # Names after #if in the templates.
    parts = {*values.get("is", []), *models()["models"][model].get("is", [])}
    if sizes()[model]["experts"]:
        parts.add("experts")
    if values.get("adapter") == "qlora":
        parts.add("qlora")
    if is_for_any_model:
        parts.add("any")

    if "image_tokens" in parts and "tensor" in values:
        values["tensor"] = 1  # models with images have no tensor parallelism
    values["name"] = name
    values["group"] = sizes()[model].get("group")  # None with experts, which no config quantizes
    values["trained"] = "adapters of " if "adapters" in parts else ""
    if "devices" in parts:
        values["where"] = "several devices"
        values["run"] = f"tune run --nproc-per-node {values['processes']}"
    else:
        values["where"] = "one device"
        values["run"] = "tune run"
    if teacher:
        for key, value in _model_values(teacher).items():
            values[f"teacher_{key}"] = value
        values["teacher_weights"] = "${teacher_model.checkpoint_dir}" if is_for_any_model else values["teacher_dir"]

    # For any model, the tokenizer follows the setting of the checkpoint, too.
    tokenizer_template = _Template((TEMPLATES / "tokenizers" / f"{tokenizer}.yaml").read_text())
    tokenizer_text = tokenizer_template.substitute({**model_values, "dir": model_values["weights"]})
    # Before the names are filled in: a method lacks values for the parts that are left out.
    text = select_parts((TEMPLATES / f"{values['template']}.yaml").read_text(), parts)
    text = _Template(text).substitute(model_values | values, tokenizer=textwrap.indent(tokenizer_text.rstrip(), "  "))
    return _without_defaults(text, values["recipe"])


def settings_fields(recipe_file: Path) -> dict[str, ast.expr | None]:
    """Return the default of each field of a recipe's class ``Settings``; the file is parsed, not imported."""
    defaults = {}
    for node in ast.parse(recipe_file.read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.ClassDef) or node.name != "Settings":
            continue
        for field in node.body:
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                defaults[field.target.id] = field.value
    return defaults


@functools.cache
def _default_settings(recipe: str) -> dict[str, Any]:
    """Return the settings of a recipe whose default is a number, a text, a flag or None, with this default."""
    defaults = {}
    for name, default in settings_fields(RECIPES / f"{recipe}.py").items():
        if isinstance(default, ast.Constant | ast.UnaryOp):
            defaults[name] = ast.literal_eval(default)
    return defaults


def _without_defaults(text: str, recipe: str) -> str:
    """Return the config without the settings that repeat their default, but for those that are always shown."""
    defaults = _default_settings(recipe)
    repeated = set()
    for name, value in parse_yaml(text).items():
        if name in defaults and value == defaults[name] and name not in _ALWAYS_SHOWN:
            repeated.add(name)
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if line.partition(":")[0] not in repeated)


def shipped_configs() -> Iterator[tuple[str, str]]:
    """Yield (name, text) of every config that is shipped as a file."""
    for model, row in models()["models"].items():
        for method in row.get("configs", []):
            name = f"{model}_{method}"
            yield name, render(name, model, method)
    for name, entry in models()["named"].items():
        changes = entry.get("changes", {})
        is_for_any_model = entry.get("any", False)
        yield name, render(name, entry["model"], entry["method"], entry.get("teacher"), is_for_any_model, **changes)


@functools.cache
def _teacher_of(model: str) -> str | None:
    """Return the smallest model of the family that can teach this one: larger, with its vocabulary; None if none is."""
    family = model.partition("/")[0]
    student = sizes()[model]
    teachers = []
    for name, size in sizes().items():
        is_of_family = name.startswith(f"{family}/") and "arguments" not in models()["models"][name]
        is_larger = size["parameters"] >= _TEACHER_RATIO * student["parameters"]
        if is_of_family and is_larger and abs(size["vocabulary"] / student["vocabulary"] - 1) < _PADDING_RATIO:
            teachers.append(name)
    return min(teachers, key=lambda name: sizes()[name]["parameters"], default=None)


def _model_and_method(name: str) -> tuple[str, str] | None:
    """Return the model and the method in the name of a config; None if it names no model or no method."""
    for model in models()["models"]:
        method = name.removeprefix(f"{model}_")
        if method != name and method in methods():
            return model, method
    return None


@functools.cache
def reason_against(model: str, method: str) -> str | None:
    """Return why there is no config for a model and a method, or ``None`` if there is one."""
    row = models()["models"][model]
    size = sizes()[model]
    entry = methods()[method]
    parts = entry.get("is", [])
    if method in row.get("configs", []):  # a shipped file, whatever the rules below say
        return None
    if "replaced_by" in entry:
        return f"{method} is for the models whose configs are files: see {model}_{entry['replaced_by']}"
    if "arguments" in row:
        return f"{model} has no builder of its own: the configs any_* build any model"
    reads_images = not {"images", "image_tokens"}.isdisjoint(row.get("is", []))
    trains_on_images = entry["template"] in _IMAGE_TEMPLATES and "quantizer" not in parts
    if reads_images and not trains_on_images:
        return f"{model} reads images, which only configs of fine-tuning do: use its text decoder with a config any_*"
    if "dora" in parts and size["experts"]:
        return f"{model} has experts, which have no DoRA: see {model}_lora"
    is_quantized = "quantizer" in parts or entry["recipe"] == "quantize"
    if is_quantized and "group" not in size:  # only dense models have neighbors that share a scale
        return f"{model} has experts, which cannot be quantized yet"
    teacher = None
    if entry["recipe"] == "knowledge_distillation":
        teacher = _teacher_of(model)
        if teacher is None:
            return f"no larger model of its family has the vocabulary of {model}: any_kd takes any teacher"
    if size["parameters"] < float(entry.get("from", 0)):
        return f"one machine holds {model}: see {model}_{method.removesuffix('_multinode')}"
    return _reason_of_memory(model, method, teacher)


def _reason_of_memory(model: str, method: str, teacher: str | None) -> str | None:
    """Return why a method needs more memory than a device has, or ``None`` if it fits.

    Args:
        model: model of the table of models.
        method: method of the table of methods.
        teacher: teacher of a distillation, which the device holds beside the model.
    """
    bytes_per_parameter = methods()[method].get("bytes")
    if bytes_per_parameter is None:  # a method of several devices, which share the parameters
        return None
    parameters = sizes()[model]["parameters"]
    described = f"{model} has {parameters / 1e9:.0f} billion parameters"
    needed = bytes_per_parameter * parameters
    if teacher is not None:
        teacher_parameters = sizes()[teacher]["parameters"]
        described += f" and its teacher {teacher} {teacher_parameters / 1e9:.0f} billion"
        needed += _FROZEN_BYTES * teacher_parameters
    if needed < _DEVICE_BYTES:
        return None
    # A method of several devices has the name of that of one device, without an ending or with another one.
    stem = method.removesuffix("_single_device")
    for several in (stem, f"{stem}_distributed", f"{stem}_full"):
        if several != method and several in methods():
            return f"{described}, too many for one device: see {model}_{several}"
    return f"{described}, too many for one device"


def reason_without_config(name: str) -> str | None:
    """Return why no config has a name of a model and a method; None if the name is of neither, or there is one."""
    model_and_method = _model_and_method(name)
    return None if model_and_method is None else reason_against(*model_and_method)


@functools.cache
def configs_on_demand() -> dict[str, tuple[str, str]]:
    """Return the name of each config that is made on demand -> its model and its method, by model."""
    configs = {}
    for model, row in models()["models"].items():
        shipped = row.get("configs", [])
        for method in methods():
            if method not in shipped and reason_against(model, method) is None:
                configs[f"{model}_{method}"] = (model, method)
    return configs


@functools.cache
def impossible_configs() -> dict[str, tuple[str, str]]:
    """Return the name of each config that there is not -> its model and its method; ``reason_against`` says why."""
    configs = {}
    for model in models()["models"]:
        for method, entry in methods().items():
            if "replaced_by" not in entry and reason_against(model, method) is not None:
                configs[f"{model}_{method}"] = (model, method)
    return configs


@functools.cache
def recipe_of_method(method: str) -> str:
    """Return the recipe of a method."""
    return methods()[method]["recipe"]


def config_on_demand(name: str) -> Path | None:
    """Write the config with this name into the user's cache, and return its file; None if there is no such config."""
    if "/" not in name or name.endswith((".yaml", ".yml")):
        return None
    model_and_method = _model_and_method(name)
    if model_and_method is None or reason_against(*model_and_method) is not None:
        return None
    model, method = model_and_method
    teacher = _teacher_of(model) if recipe_of_method(method) == "knowledge_distillation" else None
    text = render(name, model, method, teacher)
    path = cache_root() / "configs" / f"{name}.yaml"
    refuse_path_of_other_user(path.parent, "TORCHTUNE_CACHE")
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with atomic_write(path) as file:
            file.write(text.encode())
    return path
