"""What holds for the repository as a whole: light imports, one truth in one place, a wheel that works."""

import ast
import dataclasses
import functools
import inspect
import os
import re
import subprocess
import sys
import zipfile
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import tomllib
import yaml

from torchtune._lazy import modules_in
from torchtune._recipe_registry import RecipeTarget, get_all_recipes

ROOT = Path(__file__).parents[1]


def run_python(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_torchtune_loads_no_subpackage():
    code = "import sys, torchtune; print(sorted(m for m in sys.modules if m.startswith(('torchtune.', 'torch'))))"
    assert run_python(code) == "['torchtune', 'torchtune._lazy']\n"


@pytest.mark.parametrize("package", ["torchtune.utils", "torchtune.config", "torchtune._recipe_registry"])
def test_packages_of_the_command_line_load_no_torch(package):
    assert run_python(f"import sys, {package}; print('torch' in sys.modules)") == "False\n"


# Statements in the order of a process, each with packages that are not loaded after it.
LIGHT = {
    "import torchtune.training": "torch numpy omegaconf",
    "from torchtune.training import ProgressBar, StopSignal, Throughput": "torch pandas",
    "import torchtune.training.metric_logging": "tensorboard wandb mlflow comet_ml omegaconf",
    "from torchtune.training import compile_model, get_dtype, prepare_optimizer, set_activation_checkpointing": (
        "torchao datasets torch._inductor"
    ),
}


def test_names_load_no_more_than_they_need_and_change_no_environment_variable():
    families = modules_in([str(ROOT / "torchtune" / "models")])
    assert len(families) >= 9
    rooms = [*(f"models.{family}" for family in families), "modules.loss", "modules.peft", "training", "data"]
    rooms += ["config", "generation", "models", "modules", "utils"]
    heavy = ("pandas", "pyarrow", "torchvision", "datasets", "transformers", "torchao", "huggingface_hub", "PIL")
    code = f"""if True:
        import importlib, os, sys
        for statement, packages in {LIGHT!r}.items():
            exec(statement)
            print([(statement, name) for name in packages.split() if name in sys.modules] or "", end="")
        # torch itself sets TORCHINDUCTOR_CACHE_DIR and its like
        heavy, before = {heavy!r} + ("torch._dynamo",), dict(os.environ)
        for room in {rooms!r}:
            face = importlib.import_module("torchtune." + room)
            for name in face.__all__ if room.startswith(("models.", "modules.", "data")) else ():
                getattr(face, name)
            print([(room, name) for name in heavy if name in sys.modules] or "", end="")
        print({{key: value for key, value in os.environ.items() if before.get(key) != value}} or "", end="")
        import datasets
        before = dict(os.environ)
        import torchtune.datasets
        print(set(before.items()) ^ set(os.environ.items()) or "", end="")
    """
    assert run_python(code) == ""


@pytest.fixture
def tools(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")


@pytest.mark.usefixtures("tools")
def test_the_committed_configs_are_what_the_templates_make():
    import make_configs

    generated = {f"{name}.yaml": text for name, text in make_configs.configs().items()}
    folder = ROOT / "recipes" / "configs"
    committed = {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*.yaml")}
    assert committed.keys() == generated.keys(), "run `make configs`"
    assert not [name for name, text in committed.items() if generated[name] != text], "run `make configs`"


@pytest.mark.usefixtures("tools")
def test_the_committed_pages_for_agents_are_what_the_command_line_and_the_recipes_say():
    import make_agent_docs

    stale = [path.name for path, text in make_agent_docs.texts().items() if path.read_text() != text]
    assert not stale, "run `make configs`"


@pytest.mark.usefixtures("tools")
def test_the_committed_table_of_models_is_what_the_families_say():
    import make_model_table

    assert (ROOT / "docs" / "model_table.txt").read_text() == make_model_table.page(), "run `make configs`"


@pytest.mark.usefixtures("tools")
def test_template_conditions_select_their_lines():
    from torchtune._config_templates import select_parts

    text = "a\n#if x\nb\n#if y\nc\n#end\n#else\nd\n#end\n#if not x\ne\n#end\nf\n"
    assert [select_parts(text, parts).split() for parts in ({"x", "y"}, {"x"}, {"y"})] == [
        ["a", "b", "c", "f"],
        ["a", "b", "f"],
        ["a", "d", "e", "f"],
    ]


@pytest.mark.usefixtures("tools")
def test_the_committed_picture_of_the_data_flow_is_what_the_script_draws():
    import make_dataflow

    assert (ROOT / "docs" / "dataflow.svg").read_text() == make_dataflow.picture(), "run `make configs`"
    names = set()
    for row in make_dataflow.DATA + make_dataflow.WEIGHTS:
        for _, code in row:
            names.update(re.findall(r"[A-Z]\w+|[a-z]+_\w+", code))
    names.discard("DTensor")
    source = ""
    for folder in ("torchtune", "recipes"):
        source += "".join(path.read_text() for path in (ROOT / folder).rglob("*.py"))
    assert len(names) > 15
    assert not [name for name in names if not re.search(rf"\b{name}\b", source)]


@pytest.mark.usefixtures("tools")
def test_the_committed_pictures_are_what_the_script_draws():
    import make_pictures

    committed = {path.name: path.read_text() for path in (ROOT / "docs" / "pictures").glob("*.svg")}
    assert committed == make_pictures.pictures(), "run `make configs`"


@pytest.mark.usefixtures("tools")
def test_the_table_of_memory_is_what_the_configs_need():
    import make_tables

    stale = [path.name for path, text in make_tables.texts().items() if path.read_text() != text]
    assert not stale, "run `make configs`"


@pytest.mark.usefixtures("tools")
def test_committed_memory_result_equals_a_simulation():
    """A change of the library that moves this one moves the others: ``make_tables.py --anew``."""
    import memory_table

    committed = memory_table.results(memory_table.kept(), memory_table.SAMPLE)
    assert float(memory_table.cell(memory_table.SAMPLE, 1)) == pytest.approx(float(committed[1]), rel=0.03)


def test_configs_show_what_people_edit():
    """A setting that stands in a config differs from its default, or is one that everybody changes."""
    edited = set("batch_size gradient_accumulation_steps epochs dtype enable_activation_checkpointing compile".split())
    edited |= {"max_new_tokens", "temperature", "kd_ratio", "expert_parallel_dim"}  # the last of mixtures of experts
    repeated = []
    seen = 0
    for recipe in get_all_recipes():
        settings = inspect.get_annotations(RecipeTarget(recipe.name, path=recipe.path).load_main(), eval_str=True)[
            "cfg"
        ]
        defaults = {field.name: field.default for field in dataclasses.fields(settings)}
        for config in recipe.configs:
            for name, value in yaml.load(config.path.read_text(), yaml.CSafeLoader).items():
                seen += name in defaults
                if name not in edited and name in defaults and value == defaults[name]:
                    repeated.append(f"{config.path.name}: {name}")
    assert seen > 1000
    assert not repeated


def test_every_dependency_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = {
        re.split("[=@ ]", line)[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
    }
    extras = project["optional-dependencies"]
    wanted = {*project["dependencies"]}.union(*(extras[name] for name in ("check", "gguf", "test", "bench")))
    names = {re.split(r"[\[<>=! ]", requirement)[0].lower().replace("_", "-") for requirement in wanted}
    assert names - {"torchtune"} <= pins
    assert len(project["dependencies"]) <= 13


def test_continuous_integration_runs_the_test_command_of_the_readme():
    script = (ROOT / ".ci" / "run").read_text()
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert [line for line in script.splitlines() if line.startswith("make")] == ["make test"]
    readme = (ROOT / "README.md").read_text()
    verbs = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"make test", "make quickstart"} <= set(re.findall(r"make [a-z]+", readme))
    assert set(re.findall(r"`make ([a-z]+)", readme)) <= verbs


def test_versions_agree():
    import torchtune

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == torchtune.__version__
    assert f"## {torchtune.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_tree_in_the_readme_equals_the_folders():
    block = re.search(r"```text\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    stack: list[str] = []
    for line in block.splitlines():
        name = line.strip().split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        stack = [*stack[:depth], name]
        assert any(ROOT.glob("/".join(stack))), f"README.md shows {'/'.join(stack)}"


def test_the_wheel_has_every_file_of_the_library_and_works_from_its_own_folder(tmp_path):
    packages = ("torchtune", "recipes")
    source = tmp_path / "source"
    site = tmp_path / "site"
    tracked = subprocess.run(
        ["git", "ls-files", "-z", *packages, "pyproject.toml", "README.md", "LICENSE"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    names = {name for name in tracked.stdout.rstrip("\0").split("\0") if (ROOT / name).exists()}
    for name in names:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, source]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("torchtune-*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    files = set()
    for name in packages:
        files.update(path.relative_to(site).as_posix() for path in (site / name).rglob("*.*"))
    assert files == {name for name in names if name.startswith(packages)}

    def run(*arguments: str) -> str:
        # -P keeps the current folder off the path, as the installed command does.
        done = subprocess.run(
            [sys.executable, "-P", *arguments],
            env={**os.environ, "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout

    assert str(site) in run("-c", "import torchtune; print(torchtune.__file__)")
    tune = ("-m", "torchtune._cli.tune")
    listing = run(*tune, "ls", "--all")
    configs = [name.removesuffix(".yaml") for name in files if name.endswith(".yaml")]
    assert all(name.removeprefix("recipes/configs/") in listing for name in configs if "/configs/" in name)
    assert yaml.safe_load(run(*tune, "cat", "llama3_2/1B_full_single_device"))["recipe"] in listing
    run(*tune, "cp", "full_finetune_single_device", "mine.py")
    assert (tmp_path / "mine.py").read_bytes() == (ROOT / "recipes" / "full_finetune_single_device.py").read_bytes()


# Operations of the dispatcher, which Python has no public name for: each stands where its arithmetic does.
OPERATIONS = re.compile(r"torch\.ops\.(aten|mkldnn)\._\w+")
PRIVATE = re.compile(
    r"(?<![\w.\"])(torch|dist|mesh\w*)\.(\w+\.)*_(?!foreach_)[a-z]\w*|from torch(\.\w+)*\._\w+|\._flatten\("
)


def test_private_torch_names_are_imported_in_one_module():
    """Whatever a release takes away is mended there; what checkpoints need of them is theirs."""
    places = {}
    for path in [*(ROOT / "torchtune").rglob("*.py"), *(ROOT / "recipes").rglob("*.py")]:
        if path.name == "_torch_private.py" or "checkpoints" in path.parts:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if PRIVATE.search(OPERATIONS.sub("", line)):
                places[f"{path.relative_to(ROOT)}:{number}"] = line.strip()
    assert not places


@functools.cache
def _parsed(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def _statements(path, *, for_types=True):
    """All statements of a file, at any depth; those under TYPE_CHECKING only if ``for_types``."""
    nodes: list[ast.AST] = [_parsed(path)]
    while nodes:
        node = nodes.pop()
        yield node
        if for_types or not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            inner = (ast.stmt, ast.excepthandler, ast.match_case)
            nodes += [child for child in ast.iter_child_nodes(node) if isinstance(child, inner)]


def _imports(path):
    """Modules of the library that a file imports; a name that is a module itself counts as one."""
    for node in _statements(path):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names if name.name.startswith("_"))


def test_the_face_of_a_room_is_its_only_door():
    violations = []
    for path in (ROOT / "torchtune").rglob("*.py"):
        room = path.relative_to(ROOT).parts[1]
        for module in _imports(path):
            owner, *parts = module.split(".")[1:] if module.startswith("torchtune.") else [room]
            if owner != room and any(part.startswith("_") for part in parts):
                violations.append(f"{path.relative_to(ROOT)}: {module}")
    assert not violations, "import the name from the package instead, and add it to the stub __init__.pyi there"


def test_no_file_imports_itself_by_way_of_others():
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in (ROOT / "torchtune").rglob("*.py")
    }
    graph = {}
    for name, path in files.items():
        statements = _statements(path, for_types=False)
        modules = set()
        for node in statements:
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    # The name is that of a module, or of something that a module defines.
                    inner = f"{node.module}.{alias.name}"
                    modules.add(inner if inner in files else node.module)
        graph[name] = modules & files.keys() - {name}
    TopologicalSorter(graph).prepare()  # raises CycleError, with the files
