"""``tune``, ``tune ls``, ``tune cp`` and ``tune cat``, and the hints for names that do not exist."""

import importlib
import itertools
import re
from pathlib import Path

import pytest
import yaml

import torchtune._recipe_registry
from torchtune._cli.ls_cp_cat import List, overview
from torchtune._config_templates import configs_on_demand
from torchtune._recipe_registry import families, find_config, find_config_file, find_recipe, get_all_recipes

RECIPE = "lora_finetune_single_device"
CONFIG = "llama3_2/1B_lora_single_device"


def listed(out):
    """Names of the configs in the output of ``tune ls WORDS``."""
    return [line.split()[0] for line in out.splitlines() if line.startswith("  ")]


def test_ls_all_shows_every_recipe_once_and_every_config(tune):
    lines = tune("ls", "--all").out.splitlines()
    assert lines[0] == f"{'RECIPE':<40} {'CONFIG':<40}"
    rows = [(line[:40].strip(), line[41:].strip()) for line in lines[1:]]
    recipes = [recipe.name for recipe in get_all_recipes()]
    assert [name for name, _ in rows if name] == recipes
    configs = []
    for recipe in get_all_recipes():
        configs += [config.name for config in recipe.configs] or [List.NULL_VALUE]
    assert [name for _, name in rows] == configs


def test_ls_names_all_recipes_and_families_on_one_screen(tune):
    lines = tune("ls").out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100
    names = {line.split()[0] for line in lines if line.startswith("  ")}
    for recipe in get_all_recipes():
        stem = recipe.name.removesuffix("_single_device").removesuffix("_distributed")
        assert names & {recipe.name, f"{stem}_*"}
    assert all(f" {family}:{count}" in " ".join(lines) for family, count in families().items())
    assert any(re.match(r"  lora_finetune_\* +LoRA fine-tuning of a decoder: the weights stay", line) for line in lines)
    assert "tune ls --all" in tune("ls").out


def test_former_names_stand_below_their_recipe(monkeypatch):
    pairs = ["lora_dpo_single_device", "lora_dpo_distributed", "full_dpo_single_device", "full_dpo_distributed"]
    former = dict.fromkeys(pairs, "generate") | {"qat": "quantize"}
    monkeypatch.setattr(torchtune._recipe_registry, "_FORMER", former)
    lines = overview()
    below = {line.split()[0]: after.split() for line, after in itertools.pairwise(lines)}
    assert below["generate"] == ["also", "lora_dpo_*,", "full_dpo_*"]
    assert below["quantize"] == ["also", "qat"]


def test_ls_words_must_all_match_ignoring_case(tune):
    assert listed(tune("ls", "QWEN3", "8b", "lora").out) == [
        "qwen3/8B_lora",
        "qwen3/8B_lora_single_device",
        "qwen3/14B_to_8B_KD_lora_single_device",
    ]
    assert listed(tune("ls", "qwen2.5", "7B", "full", "distributed").out) == ["qwen2_5/7B_full"]
    assert listed(tune("ls", "mistral/7B", "full", "single_device").out) == [
        "mistral/7B_full_low_memory",
        "mistral/7B_full_ppo_low_memory",
        "mistral/7B_v0.3_full_single_device",
    ]
    every = set()
    for recipe in get_all_recipes():
        every.update(config.name for config in recipe.configs)
    alone, many = (set(listed(tune("ls", device).out)) for device in ("single_device", "distributed"))
    assert alone | many >= every
    assert not alone & many
    assert "qat" in families() or all("_qat_" in name for name in listed(tune("ls", "qat").out))


def test_ls_groups_configs_by_family_in_order_of_size(tune):
    lines = tune("ls", "smol", "full_single_device").out.splitlines()
    assert lines[0] == "smol"
    assert listed("\n".join(lines)) == [f"smol/{size}_full_single_device" for size in ("135M", "360M", "1.7B")]
    lines = tune("ls", "qwen", "full").out.splitlines()
    headings = [line for line in lines[:-1] if not line.startswith("  ") and ":" not in line]
    assert headings == sorted({name.partition("/")[0] for name in listed("\n".join(lines))})
    assert len(headings) >= 7


def test_ls_counts_files_and_configs_on_demand(tune):
    files = sum(len(recipe.configs) for recipe in get_all_recipes())
    assert f"FAMILIES: {files} configs, {len(configs_on_demand()):,} on demand" in tune("ls").out
    lines = tune("ls", "smol", "360M", "dpo").out.splitlines()
    number = len("lora_dpo_single_device lora_dpo full_dpo_single_device full_dpo".split())
    assert lines[-1].startswith(f"{number} of {files + len(configs_on_demand()):,} configs.")
    assert lines[0] == f"MODEL_METHOD, as smol/360M_lora_dpo_single_device: {number} more, made when they are named"


def test_ls_says_why_a_combination_does_not_exist(tune):
    result = tune("ls", "qwen3/32B_full_ppo_single_device")
    assert result.code == 0
    assert result.out.startswith("not full_ppo_single_device: qwen3/32B has 33 billion parameters, too many for one")
    lines = tune("ls", "gpt_oss", "20B", "qat").out.splitlines()
    methods = "qat_single_device, qat_full, qat_lora_single_device, qat_lora"
    assert lines[0] == f"not {methods}: gpt_oss/20B has experts, which cannot be quantized yet"


def test_ls_finds_a_recipe_by_its_present_and_former_names(tune):
    renamed = [recipe for recipe in get_all_recipes() if recipe.former_names and recipe.configs]
    assert renamed
    for recipe in renamed:
        now = tune("ls", recipe.name)
        assert {config.name for config in recipe.configs} <= set(listed(now.out))
        assert f"\n{recipe.name}: also {', '.join(recipe.former_names)}\n" in now.out
        assert all(f"\n{recipe.name}: also" in tune("ls", name).out for name in recipe.former_names)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["qwn3"], "error: no config matches 'qwn3'; did you mean 'qwen3'?\n"),
        (["qwen3", "qlra"], "error: no config matches 'qlra'; did you mean 'qlora'?\n"),
        (
            ["xyzzy"],
            "error: no config matches 'xyzzy'; `tune ls` shows the families, for example `tune ls qwen3 8B lora`.\n",
        ),
        (["qwen3", "405B"], "error: no config matches all of qwen3, 405B: remove a word.\n"),
    ],
)
def test_ls_words_without_a_match_are_refused(tune, words, message):
    result = tune("ls", *words)
    assert (result.code, result.out, result.err) == (2, "", message)


def test_ls_all_refuses_words(tune):
    result = tune("ls", "--all", "qwen3")
    assert result.code == 2
    assert "--all lists every config: remove it, or the words" in result.err


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("qwen3/8B_qat", ["qwen3/8B_full"]),
        ("qwen2_5/33B_lora", ["did you mean"]),
        ("gemma3/9B_full", ["gemma3/12B_full"]),
        ("lama3_1/8B_full", ["llama3_1/8B_full"]),
        ("qwen3/8B_fulll", ["did you mean 'qwen3/8B_full'?"]),
    ],
)
def test_unknown_config_is_answered_with_the_nearest_names(tune, name, nearest):
    result = tune("run", "--config", name)
    assert result.code == 2
    assert result.err.startswith(f"error: there is no config '{name}': ")
    assert len(result.err.splitlines()) == 1
    assert all(config in result.err for config in nearest)


def test_no_subcommand_prints_help(tune):
    bare = tune()
    asked = tune("--help")
    assert bare.code == asked.code == 0
    assert bare.out == asked.out
    names = "download ls cp data run estimate validate cat chat eval export checkpoint doctor import"
    assert all(f"\n    {name} " in bare.out for name in names.split())


@pytest.mark.parametrize(
    ("module", "name"), [("ls", "List"), ("cp", "Copy"), ("cat", "Cat"), ("validate", "Validate"), ("run", "Run")]
)
def test_command_is_importable_from_the_module_of_its_name(module, name):
    command = getattr(importlib.import_module(f"torchtune._cli.{module}"), name)
    assert command is getattr(importlib.import_module("torchtune._cli.tune"), name)


def test_an_unknown_subcommand_is_an_error(tune):
    result = tune("jump")
    assert result.code == 2
    assert "invalid choice" in result.err


def test_registry_has_every_recipe_and_config_of_the_folder():
    folder = find_recipe(RECIPE).parent
    files = {path.stem for path in folder.glob("*.py") if path.name != "__init__.py"}
    assert {recipe.name for recipe in get_all_recipes()} >= files
    paths = set()
    for recipe in get_all_recipes():
        paths.update(config.path for config in recipe.configs)
    assert paths == set((folder / "configs").rglob("*.yaml")), "a config names no recipe"
    for recipe in get_all_recipes():
        for config in recipe.configs:
            assert next(iter(yaml.safe_load(config.path.read_text()).items())) == ("recipe", recipe.name)


def test_a_config_is_found_for_its_recipe_first():
    assert find_config(CONFIG) == find_config(CONFIG, recipe=RECIPE) == find_config(CONFIG, recipe="generate")
    assert find_config("nothing") is None
    assert find_recipe("nothing") is None


def test_a_config_is_a_shipped_name_or_else_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("mine.yaml", "mine", CONFIG, f"{CONFIG}.YAML"):
        assert find_config_file(name) == find_config(name)
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("epochs: 1")
    assert find_config_file("mine.yaml") == Path("mine.yaml")
    assert find_config_file("mine") == Path("mine")
    assert find_config_file(CONFIG) == find_config(CONFIG)
    assert find_config_file(f"{CONFIG}.YAML") == Path(f"{CONFIG}.YAML")


@pytest.mark.parametrize(
    ("name", "destination", "written"),
    [
        (RECIPE, "mine", "mine.py"),
        (CONFIG, "mine.yml", "mine.yml"),
        (CONFIG, "mine.txt", "mine.yaml"),
        (CONFIG, "0.6B_lora", "0.6B_lora.yaml"),
        (CONFIG, ".", "1B_lora_single_device.yaml"),
        (CONFIG, "there", "there/1B_lora_single_device.yaml"),
        (RECIPE, "there/", f"there/{RECIPE}.py"),
        (RECIPE, "..", f"../{RECIPE}.py"),
    ],
)
def test_cp_adds_the_suffix_of_its_source(tune, tmp_path, monkeypatch, name, destination, written):
    (tmp_path / "here" / "there").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    result = tune("cp", name, destination)
    assert result.code == 0
    assert result.out == f"Copied file to {Path(written)}\n"
    source = find_recipe(name) or find_config(name)
    assert Path(written).read_bytes() == source.read_bytes()


def test_cp_with_no_clobber_overwrites_nothing(tune, tmp_path):
    destination = tmp_path / "mine.yaml"
    destination.write_text("kept")
    result = tune("cp", CONFIG, str(tmp_path / "mine"), "-n")
    assert (result.code, result.out) == (0, f"File already exists at {destination}, not overwriting.\n")
    assert destination.read_text() == "kept"


def test_cp_backs_up_a_changed_file(tune, tmp_path):
    destination = tmp_path / "mine.yaml"
    shipped = find_config(CONFIG).read_text()
    assert tune("cp", CONFIG, str(destination)).out == f"Copied file to {destination}\n"
    assert tune("cp", CONFIG, str(destination)).out == f"Copied file to {destination}\n", (
        "nothing was changed, nothing is kept"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.yaml"]
    message = f"Copied file to {destination}\nThe previous file is kept as {destination}.bak"
    for text, name in (("a", ""), ("b", "1"), ("a", ""), ("c", "2")):
        destination.write_text(text)
        destination.chmod(0o640)
        assert tune("cp", CONFIG, str(destination)).out == f"{message}{name}\n"
        assert destination.read_text() == shipped
    backups = {path.name: path.read_text() for path in tmp_path.iterdir() if path != destination}
    assert backups == {"mine.yaml.bak": "a", "mine.yaml.bak1": "b", "mine.yaml.bak2": "c"}
    assert (tmp_path / "mine.yaml.bak").stat().st_mode & 0o777 == 0o640


def test_cp_makes_parent_directories_only_on_request(tune, tmp_path):
    missing = tmp_path / "a" / "b" / "mine.yaml"
    result = tune("cp", CONFIG, str(missing))
    assert result.code == 2
    assert f"Cannot create regular file: '{missing}'" in result.err
    assert not missing.parent.exists()
    assert tune("cp", CONFIG, str(missing), "--make-parents").code == 0
    assert missing.exists()


def test_cp_of_an_unknown_name_is_refused(tune):
    result = tune("cp", "nothing", "x")
    assert result.code == 2
    assert "Invalid file name: nothing. Try `tune ls`" in result.err
    assert "'llama3_2/1B_lora_single_device'" in tune("cp", "llama3_2/1B_lora_single", "x").err


def test_cat_prints_the_file(tune, tmp_path):
    result = tune("cat", CONFIG)
    assert result.out == find_config(CONFIG).read_text()
    ordered = list(yaml.safe_load(tune("cat", "--sort", CONFIG).out))
    assert ordered == sorted(ordered)
    assert "${output_dir}" in result.out
    (tmp_path / "own.YML").write_text("é: 2e-5\n")
    assert tune("cat", str(tmp_path / "own.YML")).out == "é: 2e-5\n"
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert tune("cat", str(tmp_path / "empty.yaml")).out == ""


def test_cat_of_anything_but_a_config_is_refused(tune, tmp_path):
    recipe = tune("cat", RECIPE)
    assert (recipe.code, recipe.out) == (0, f"'{RECIPE}' is a recipe, not a config. Please use a config name.\n")
    assert "Invalid config format: 'nothing'. Must be YAML" in tune("cat", "nothing").err
    assert "nearest are 'llama3_2/1B_lora_single_device', " in tune("cat", "llama3_2/1B_lora_single").err
    assert "Config 'nothing.yaml' not found." in tune("cat", "nothing.yaml").err
    (tmp_path / "broken.yaml").write_text("a: [1")
    broken = tune("cat", str(tmp_path / "broken.yaml"))
    assert broken.code == 2
    assert "Error parsing YAML file" in broken.err


@pytest.mark.parametrize("command", [["cat"], ["cat", "--sort"], ["validate"]])
@pytest.mark.parametrize("data", [b"a: " + b"[" * 200_000, b"recipe: \xff\n", b"a: 1e999"])
def test_hostile_configs_are_refused_in_one_sentence(tune, tmp_path, command, data):
    (tmp_path / "c.yaml").write_bytes(data)
    result = tune(*command, str(tmp_path / "c.yaml"))
    assert result.code == 2
    message = result.err.partition("error: ")[2]
    assert f"{tmp_path}/c.yaml" in message
    assert len(message) < 500


def test_paths_that_cannot_be_written_are_refused_in_one_sentence(tune, tmp_path):
    for path in (tmp_path / ("x" * 300), Path("/proc/x.yaml")):
        result = tune("cp", CONFIG, str(path))
        assert result.code == 2
        assert "choose another path" in result.err or "choose another output_dir" in result.err
    (tmp_path / "c.yaml").write_text("a: 1\n")
    for name, reason in (
        ("recipe.py", ", line 1: it is not valid Python: invalid syntax."),
        ("recipe.txt", " is not a recipe, which is a Python file: name a config after --config, rows in data=."),
    ):
        recipe = tmp_path / name
        recipe.write_text("no recipe at all\n")
        result = tune("run", str(recipe), "--config", str(tmp_path / "c.yaml"))
        assert (result.code, result.err) == (2, f"error: {recipe}{reason}\n")


@pytest.mark.parametrize("token", ["hun ter2", "hunter2\n", "hünter2", "hunter2"])
def test_a_token_is_not_quoted(tune, tmp_path, monkeypatch, token):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    result = tune("download", "own/model", "--output-dir", str(tmp_path / "out"), "--hf-token", token)
    assert result.code == 2
    assert len(result.err.splitlines()) == 1
    assert not {"hunter2", "hünter2", "ter2"} & set(result.err.replace("'", " ").split())
    assert token.strip() not in result.err + result.out


def test_unknown_arguments_show_the_usage_of_their_command(tune):
    for command, prog, unknown in (
        (("ls", "--qwen3"), "tune ls", "--qwen3"),
        (("data", "show", "--config", CONFIG), "tune data show", "--config"),
    ):
        result = tune(*command)
        assert result.code == 2
        assert f"usage: {prog}" in result.err
        assert f"{prog}: error: unrecognized arguments: {unknown}" in result.err
    assert "name the config without an option" in result.err
