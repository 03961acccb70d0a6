"""What holds for the repository as a whole: budgets, light imports, one truth in one place, a wheel that works."""

import dataclasses
import inspect
import os
import re
import subprocess
import sys
import tokenize
import zipfile
from pathlib import Path

import pytest
import tomllib
import yaml

from tests.tiny import write_checkpoint
from torchtune._cli._target import RecipeTarget
from torchtune._recipe_registry import get_all_recipes

ROOT = Path(__file__).parents[1]
# Lines of code files; argue about them in a diff.
FILE_BUDGET = {"torchtune": 500, "recipes": 420, "tools": 400, "examples": 400, "benchmarks": 400}
# Tokens of a room, in which a docstring counts as one. A raise takes as much from another room.
ROOM_BUDGET = {
    "torchtune/training": 113_400,
    "torchtune/modules": 104_200,
    "torchtune/models": 67_300,
    "torchtune/datasets": 38_900,
    "torchtune/rlhf": 30_700,
    "torchtune/config": 21_100,
    "torchtune/data": 17_100,
    "torchtune/generation": 13_000,
    "torchtune/_cli": 14_900,
    "torchtune/utils": 8_500,
    "torchtune/evaluation": 7_000,
    "torchtune/_facade": 2_600,
    "torchtune/dev": 1_000,
    "recipes": 25_000,
}
_NO_WEIGHT = {
    *(tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.COMMENT, tokenize.ENCODING, tokenize.ENDMARKER),
}


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def weight(path: Path) -> int:
    """Tokens of a file; from Python 3.12 on an f-string has several, which count as one here."""
    start, end = getattr(tokenize, "FSTRING_START", None), getattr(tokenize, "FSTRING_END", None)
    total = depth = 0
    with open(path, "rb") as file:
        for token in tokenize.tokenize(file.readline):
            depth -= token.type == end
            total += depth == 0 and token.type not in _NO_WEIGHT and token.type != start
            depth += token.type == start
    return total


def run_python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("folder", FILE_BUDGET)
def test_no_file_is_too_long(folder: str) -> None:
    # Recipes that sample also say where answers come from and what they are worth.
    most = {
        path: FILE_BUDGET[folder] + {"grpo.py": 10, "ppo.py": 90}.get(path.name, 0) * (folder == "recipes")
        for path in (ROOT / folder).rglob("*.py")
    }
    long = {str(path.relative_to(ROOT)): lines(path) for path in most if lines(path) > most[path]}
    assert not long, f"more than {FILE_BUDGET[folder]} lines are a sign of two ideas: {long}"


@pytest.mark.parametrize("room", ROOM_BUDGET)
def test_no_room_is_too_heavy(room: str) -> None:
    total = sum(map(weight, (ROOT / room).rglob("*.py")))
    assert total <= ROOM_BUDGET[room], f"{room} weighs {total} tokens"


def test_every_room_has_a_budget() -> None:
    rooms = {path.parent for path in (ROOT / "torchtune").glob("*/__init__.py")}
    assert {f"torchtune/{room.name}" for room in rooms} | {"recipes"} == set(ROOM_BUDGET)


def test_importing_torchtune_loads_no_subpackage() -> None:
    code = "import sys, torchtune; print(sorted(m for m in sys.modules if m.startswith(('torchtune.', 'torch'))))"
    assert run_python(code) == "['torchtune', 'torchtune._lazy']\n"


@pytest.mark.parametrize("package", ["torchtune.utils", "torchtune.config", "torchtune._recipe_registry"])
def test_what_the_command_line_uses_loads_no_torch(package: str) -> None:
    assert run_python(f"import sys, {package}; print('torch' in sys.modules)") == "False\n"


def test_models_and_layers_load_no_data_packages_nor_the_compiler() -> None:
    families = [path.name for path in (ROOT / "torchtune" / "models").iterdir() if (path / "__init__.py").exists()]
    assert len(families) >= 9
    rooms = [*(f"models.{family}" for family in families), "modules.loss", "modules.peft", "training", "data"]
    heavy = ("pandas", "pyarrow", "torchvision", "datasets", "transformers", "torchao", "huggingface_hub", "PIL")
    code = f"""if True:
        import importlib, sys, torch
        heavy = {heavy!r} + ("torch._dynamo",)
        for room in {rooms!r}:
            face = importlib.import_module("torchtune." + room)
            for name in () if room == "training" else face.__all__:
                getattr(face, name)
            print([(room, name) for name in heavy if name in sys.modules] or "", end="")
    """
    assert run_python(code) == ""


def test_importing_changes_no_environment_variable() -> None:
    rooms = ["config", "data", "datasets", "generation", "models", "modules", "modules.peft", "training", "utils"]
    # torch itself sets TORCHINDUCTOR_CACHE_DIR and its like; what is imported here is ours alone, after torch.
    code = "import os, torch, datasets; before = dict(os.environ)\n"
    code += "".join(f"import torchtune.{room}\n" for room in rooms)
    code += "print({k: v for k, v in os.environ.items() if before.get(k) != v}, set(before) - set(os.environ))"
    assert run_python(code) == "{} set()\n"


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")


@pytest.mark.usefixtures("tools")
def test_the_committed_configs_are_what_the_templates_make() -> None:
    import make_configs

    made = {f"{name}.yaml": text for name, text in make_configs.configs()}
    folder = ROOT / "recipes" / "configs"
    committed = {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*.yaml")}
    assert committed.keys() == made.keys(), "run `make configs`"
    assert not [name for name, text in committed.items() if made[name] != text], "run `make configs`"
    assert len(made) <= 320, "people choose between configs: another model's are an override away"


@pytest.mark.usefixtures("tools")
def test_the_committed_table_of_models_is_what_the_families_say() -> None:
    import make_model_table

    assert (ROOT / "docs" / "model_table.txt").read_text() == make_model_table.page(), "run `make configs`"


@pytest.mark.usefixtures("tools")
def test_the_parts_of_a_template_are_chosen() -> None:
    from make_configs import chosen

    text = "a\n#if x\nb\n#if y\nc\n#end\n#else\nd\n#end\n#if not x\ne\n#end\nf\n"
    assert [chosen(text, parts).split() for parts in ({"x", "y"}, {"x"}, {"y"})] == [
        ["a", "b", "c", "f"],
        ["a", "b", "f"],
        ["a", "d", "e", "f"],
    ]


def test_the_committed_picture_of_the_data_flow_is_what_the_script_draws() -> None:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import make_dataflow
    finally:
        sys.path.remove(str(ROOT / "tools"))
    assert (ROOT / "docs" / "dataflow.svg").read_text() == make_dataflow.picture(), "run `make configs`"
    labels = [code for row in make_dataflow.DATA + make_dataflow.WEIGHTS for _, code in row]
    names = {name for code in labels for name in re.findall(r"[A-Z]\w+|[a-z]+_\w+", code)} - {"DTensor"}
    source = "".join(path.read_text() for folder in ("torchtune", "recipes") for path in (ROOT / folder).rglob("*.py"))
    assert len(names) > 15
    assert not [name for name in names if not re.search(rf"\b{name}\b", source)]


@pytest.mark.slow
def test_the_table_of_memory_is_what_the_configs_need() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "make_tables.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, f"run `make configs`:\n{done.stdout}{done.stderr}"


def test_a_kept_result_is_what_a_simulation_says() -> None:
    """A change of the library that moves this one moves the others: ``make_tables.py --anew``."""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import memory_table
    finally:
        sys.path.remove(str(ROOT / "tools"))
    kept = memory_table.results(memory_table.kept(), memory_table.SAMPLE)
    assert float(memory_table.cell(memory_table.SAMPLE, 1)) == pytest.approx(float(kept[1]), rel=0.03)


def test_configs_show_what_people_edit() -> None:
    """A setting that stands in a config differs from its default, or is one that everybody changes."""
    shown = set("batch_size gradient_accumulation_steps epochs dtype enable_activation_checkpointing compile".split())
    shown |= {"max_new_tokens", "temperature", "kd_ratio", "expert_parallel_dim"}  # the last of mixtures of experts
    repeated, seen = [], 0
    for recipe in get_all_recipes():
        settings = inspect.get_annotations(RecipeTarget(recipe.name, path=recipe.path).load_main(), eval_str=True)[
            "cfg"
        ]
        defaults = {field.name: field.default for field in dataclasses.fields(settings)}
        for config in recipe.configs:
            for name, value in yaml.safe_load(config.path.read_text()).items():
                seen += name in defaults
                if name not in shown and name in defaults and value == defaults[name]:
                    repeated.append(f"{config.path.name}: {name}")
    assert seen > 1000
    assert not repeated


def test_imports_keep_to_the_floors() -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout


def test_every_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = {
        re.split("[=@ ]", line)[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
    }
    extras = project["optional-dependencies"]
    wanted = {*project["dependencies"], *extras["gguf"], *extras["report"], *extras["test"], *extras["bench"]}
    names = {re.split(r"[\[<>=! ]", requirement)[0].lower().replace("_", "-") for requirement in wanted}
    assert names - {"torchtune"} <= pins
    assert len(project["dependencies"]) <= 12


def test_continuous_integration_runs_the_test_command_of_the_readme() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert [line for line in script.splitlines() if line.startswith("make")] == ["make test"]
    readme = (ROOT / "README.md").read_text()
    verbs = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"make test", "make quickstart"} <= set(re.findall(r"make [a-z]+", readme))
    assert set(re.findall(r"`make ([a-z]+)", readme)) <= verbs


def test_versions_agree() -> None:
    import torchtune

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == torchtune.__version__
    assert f"## {torchtune.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_tree_of_the_readme_is_the_tree() -> None:
    block = re.search(r"```text\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    stack: list[str] = []
    for line in block.splitlines():
        name = line.strip().split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        stack = [*stack[:depth], name]
        assert any(ROOT.glob("/".join(stack))), f"README.md shows {'/'.join(stack)}"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which a freshly built wheel was unpacked, as an installation would."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "torchtune", "recipes", "pyproject.toml", "README.md", "LICENSE"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    for name in tracked.stdout.rstrip("\0").split("\0"):
        if (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, source]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = folder.glob("torchtune-*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def test_recipes_travel_inside_the_wheel(installed: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(installed)}

    def tune(*arguments: str) -> str:
        # -P keeps the current folder off the path, as the installed command does.
        done = subprocess.run(
            [sys.executable, "-P", "-m", "torchtune._cli.tune", *arguments],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout

    where = subprocess.run(
        [sys.executable, "-P", "-c", "import torchtune; print(torchtune.__file__)"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert str(installed) in where.stdout
    assert (installed / "torchtune" / "py.typed").exists()
    shown = tune("ls", "--all")
    shipped = {path.relative_to(ROOT / "recipes").as_posix() for path in (ROOT / "recipes").rglob("*.yaml")}
    assert {
        path.relative_to(installed / "recipes").as_posix() for path in (installed / "recipes").rglob("*.yaml")
    } == shipped
    configs = [name.removeprefix("configs/").removesuffix(".yaml") for name in shipped if name.startswith("configs/")]
    assert all(name in shown for name in configs)
    assert yaml.safe_load(tune("cat", configs[0]))["recipe"] in shown
    tune("cp", "full_finetune_single_device", "mine.py")
    tune("cp", "llama3_2/1B_full_single_device", ".")
    assert (tmp_path / "mine.py").read_bytes() == (ROOT / "recipes" / "full_finetune_single_device.py").read_bytes()
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    tiny = (
        "model._component_=torchtune.models.from_hf_config",
        f"model.checkpoint_dir={checkpoint}",
        "tokenizer._component_=torchtune.modules.transforms.tokenizers.hf_tokenizer",
        f"tokenizer.path={checkpoint}",
        f"checkpointer.checkpoint_dir={checkpoint}",
        "device=cpu",
    )
    said = tune("run", "mine.py", "--config", "1B_full_single_device.yaml", *tiny, "--dry-run")
    assert "parameters" in said


# Operations of the dispatcher, which Python has no public name for: each stands where its arithmetic does.
OPERATIONS = re.compile(r"torch\.ops\.(aten|mkldnn)\._\w+")
PRIVATE = re.compile(
    r"(?<![\w.\"])(torch|dist|mesh\w*)\.(\w+\.)*_(?!foreach_)[a-z]\w*|from torch(\.\w+)*\._\w+|\._flatten\("
)


def test_private_names_of_torch_stand_in_one_place() -> None:
    """Whatever a release takes away is mended there; what checkpoints need of them is theirs."""
    home = "_torch_private.py"  # of the library, and of simulations
    found = {
        f"{path.relative_to(ROOT)}:{number}": line.strip()
        for folder in ("torchtune", "recipes")
        for path in (ROOT / folder).rglob("*.py")
        if path.name != home and "checkpointing" not in path.parts
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if PRIVATE.search(OPERATIONS.sub("", line))
    }
    assert not found
