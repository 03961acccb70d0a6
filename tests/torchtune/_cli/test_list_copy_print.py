"""tune cp, cat and the top level."""

from pathlib import Path

import pytest
import yaml

from torchtune._recipe_registry import find_config, find_recipe, get_all_recipes

RECIPE = "lora_finetune_single_device"
CONFIG = "llama3_2/1B_lora_single_device"


def test_no_subcommand_prints_help(tune):
    bare, asked = tune(), tune("--help")
    assert bare.code == asked.code == 0
    assert bare.out == asked.out
    names = "download ls cp data run estimate validate cat chat eval export checkpoint doctor import"
    assert all(f"\n    {name} " in bare.out for name in names.split())


def test_an_unknown_subcommand_is_an_error(tune):
    result = tune("jump")
    assert result.code == 2
    assert "invalid choice" in result.err


def test_the_registry_is_what_lies_in_the_folder():
    folder = find_recipe(RECIPE).parent
    files = {path.stem for path in folder.glob("*.py") if path.name != "__init__.py"}
    assert {recipe.name for recipe in get_all_recipes()} >= files
    configs = [config for recipe in get_all_recipes() for config in recipe.configs]
    assert {config.path for config in configs} == set((folder / "configs").rglob("*.yaml")), "a config names no recipe"
    for recipe in get_all_recipes():
        for config in recipe.configs:
            assert next(iter(yaml.safe_load(config.path.read_text()).items())) == ("recipe", recipe.name)


def test_a_config_is_found_for_its_recipe_first():
    assert find_config(CONFIG) == find_config(CONFIG, recipe=RECIPE) == find_config(CONFIG, recipe="generate")
    assert find_config("nothing") is None
    assert find_recipe("nothing") is None


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
def test_cp(tune, tmp_path, monkeypatch, name, destination, written):
    (tmp_path / "here" / "there").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    result = tune("cp", name, destination)
    assert result.code == 0
    assert result.out == f"Copied file to {Path(written)}\n"
    source = find_recipe(name) or find_config(name)
    assert Path(written).read_bytes() == source.read_bytes()


def test_cp_overwrites_nothing_if_told_so(tune, tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text("kept")
    result = tune("cp", CONFIG, str(tmp_path / "mine"), "-n")
    assert (result.code, result.out) == (0, f"File already exists at {mine}, not overwriting.\n")
    assert mine.read_text() == "kept"


def test_cp_keeps_a_changed_file(tune, tmp_path):
    mine, shipped = tmp_path / "mine.yaml", find_config(CONFIG).read_text()
    assert tune("cp", CONFIG, str(mine)).out == f"Copied file to {mine}\n"
    assert tune("cp", CONFIG, str(mine)).out == f"Copied file to {mine}\n", "nothing was changed, nothing is kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.yaml"]
    kept = f"Copied file to {mine}\nThe previous file is kept as {mine}.bak"
    for text, name in (("a", ""), ("b", "1"), ("a", ""), ("c", "2")):
        mine.write_text(text)
        mine.chmod(0o640)
        assert tune("cp", CONFIG, str(mine)).out == f"{kept}{name}\n"
        assert mine.read_text() == shipped
    backups = {path.name: path.read_text() for path in tmp_path.iterdir() if path != mine}
    assert backups == {"mine.yaml.bak": "a", "mine.yaml.bak1": "b", "mine.yaml.bak2": "c"}
    assert (tmp_path / "mine.yaml.bak").stat().st_mode & 0o777 == 0o640


def test_cp_into_a_missing_directory(tune, tmp_path):
    missing = tmp_path / "a" / "b" / "mine.yaml"
    result = tune("cp", CONFIG, str(missing))
    assert result.code == 2
    assert f"Cannot create regular file: '{missing}'" in result.err
    assert not missing.parent.exists()
    assert tune("cp", CONFIG, str(missing), "--make-parents").code == 0
    assert missing.exists()


def test_cp_of_something_unknown(tune):
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


def test_cat_of_what_is_no_config(tune, tmp_path):
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
def test_hostile_files_are_one_sentence(tune, tmp_path, command, data):
    (tmp_path / "c.yaml").write_bytes(data)
    result = tune(*command, str(tmp_path / "c.yaml"))
    assert result.code == 2
    message = result.err.partition("error: ")[2]
    assert f"{tmp_path}/c.yaml" in message
    assert len(message) < 500


def test_places_that_cannot_be_written_are_one_sentence(tune, tmp_path):
    for place in (tmp_path / ("x" * 300), Path("/proc/x.yaml")):
        result = tune("cp", CONFIG, str(place))
        assert result.code == 2
        assert "choose another path" in result.err or "choose another output_dir" in result.err
    (tmp_path / "recipe.txt").write_text("no recipe at all\n")
    (tmp_path / "c.yaml").write_text("a: 1\n")
    result = tune("run", str(tmp_path / "recipe.txt"), "--config", str(tmp_path / "c.yaml"))
    assert (result.code, result.err) == (
        2,
        f"error: {tmp_path}/recipe.txt, line 1: it is not valid Python: invalid syntax.\n",
    )


@pytest.mark.parametrize("token", ["hun ter2", "hunter2\n", "hünter2", "hunter2"])
def test_a_token_is_not_quoted(tune, tmp_path, monkeypatch, token):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    result = tune("download", "own/model", "--output-dir", str(tmp_path / "out"), "--hf-token", token)
    assert result.code == 2
    assert len(result.err.splitlines()) == 1
    assert not {"hunter2", "hünter2", "ter2"} & set(result.err.replace("'", " ").split())
    assert token.strip() not in result.err + result.out


def test_unknown_arguments_show_the_usage_of_their_command(tune):
    for command, prog in ((("ls", "--qwen3"), "tune ls"), (("data", "show", "--config", CONFIG), "tune data show")):
        result = tune(*command)
        assert result.code == 2
        assert f"usage: {prog}" in result.err
        assert f"{prog}: error: unrecognized arguments: {command[-2 if 'show' in command else -1]}" in result.err
    assert "name the config without an option" in result.err
