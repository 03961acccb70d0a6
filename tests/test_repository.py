"""What holds for the repository as a whole: budgets, light imports, one truth in one place, a wheel that works."""

import dataclasses
import inspect
import os
import re
import shutil
import subprocess
import sys
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
FILE_BUDGET = {"torchtune": 500, "recipes": 400, "tools": 400, "examples": 400, "benchmarks": 400}
ROOM_BUDGET = {
    # What every field of a config.json may be, and is where it is left out; mixers that are not attention, and the
    # families of 2026, are 1,300 of these. A family is 60 to 100 lines, half of them its published numbers: ten more
    # of known shapes are 800. Mamba 2 (its numbers, names and fields) and the families that have it are 600. Latent
    # attention, in three families of 80 lines and what they share, is 450; Llama 4 is 200.
    # Images to tiles, and text with images to tokens, tiles and masks, are 300. Llama 3.2 Vision is 1,500: an encoder
    # of images, numbers and signatures that configs name, and three formats of files with another layout each.
    "torchtune/models": 11600,
    # The interface of conversions, with a docstring and a default for every method, and how adapters are sharded over
    # tensor-parallel ranks, are 450 of these; a head of classes, and names that copied recipes import, are 150.
    # Quantized bases, quantization-aware training and float8, and layers that are not attention, are 3,000.
    # Experts on processes of their own, and mixers with a state, are 800; the state space of Mamba 2 is 350.
    # That documents go on from a prefix that they share, in every kernel, is 120. Latent attention is 200.
    # Products of float32 on CPU, twice as fast as MKL on half of the processors, are 140.
    # Names and tokenizers of transformers, where they are given to these, are named: 30.
    # What is done to images (canvas, resizing, tiles, masks) is 270. The vision transformer, its tiles without a mask
    # in memory, cross-attention, and models of an encoder and a decoder are 760.
    # Ids of what stands between two spaces, as bytes and arrays, are 150: a fifth of the time of chats.
    "torchtune/modules": 16200,
    # Checkpoints are half of it: any number of processes reads and writes them in slices, behind training's back.
    # What a run says of itself (time, operations, hangs, lack of memory, what it is about to do and what came of it) is
    # a fifth, so that recipes need not; what keeps it from starting is found in one place, before anything is loaded.
    # That nothing is lost in silence (contents of a save, settings of a resume, of adapters' files) is 400 of these.
    # Watching all of a run, and one message a step in the place of five, are 200 lines.
    # 600 of it see to it that no file has two writers and that no damage goes unnoticed: parts travel to the one that
    # writes, state is read from the files of any number of ranks, and whatever is wrong with a file is one sentence.
    # 600 are what recipes copied from earlier releases call (compat/, quantization.py): half of it docstrings.
    # What is read of a recipe's settings has its names, types and defaults in one place: 200 lines.
    # A simulated cluster (operators, devices and links, the search for a configuration that fits), low-bit optimizers,
    # the export of quantized weights: 2,500 lines.
    # Optimizers by name (states in few bits, groups by pattern, matrices of which ranks have shards) are 500.
    # Quantizers, and checkpoints written and read as compressed-tensors and as GGUF, are 900.
    # A mesh with a dimension of experts, evaluation while training and the best checkpoint are 800.
    # Examples in docstrings, which are run, are 250. Files of float8 weights with scales for blocks are 120.
    # That a validation, or a parameter in the optimizer, is missing is said before the run: 60.
    # What a simulated run has in the place of a row or a cache is said where it is asked for: 20.
    # What images need of memory, and where a model of text and images cannot be split, sampled or simulated, is 70.
    "torchtune/training": 17590,
    # Of these a third is docstrings and blank lines: what is left over 1,200 is what messages cost that name the file,
    # the line, the reason and the nearest right name, and that follow **kwargs to the function that takes them.
    # Another quarter is what a config from anywhere costs: sizes counted before anything recurses, references resolved
    # in an order in which nothing doubles, and secrets known by origin, name and shape. What a component refuses when
    # it is built, as a mistake of the config, is 15.
    "torchtune/config": 2575,
    # What a file of data holds, before it is trained on, a chat with what came out, and how it compares with another
    # model on rows of the user's, are commands of 850 lines.
    "torchtune/_cli": 2100,
    # Fifteen losses with their formulas are 1,200; samplers, rewards and the record of rollouts 1,200.
    # Servers that answer in the sampler's place are 500: two protocols, and the weights of every step with proof that
    # they arrived. A value model beside the policy is 450, a teacher's likeliest tokens on disk 300.
    # Examples in docstrings, which are run, are 150.
    # Refusals before a run starts (data that do not fit the loss, teachers that teach nothing) and checksums of what
    # is computed once are 150 of these.
    "torchtune/rlhf": 5100,
    "recipes": 10000,
}


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


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
        path: FILE_BUDGET[folder] + 50 * ("grpo_" in path.name or "ppo_" in path.name)
        for path in (ROOT / folder).rglob("*.py")
    }
    long = {str(path.relative_to(ROOT)): lines(path) for path in most if lines(path) > most[path]}
    assert not long, f"more than {FILE_BUDGET[folder]} lines are a sign of two ideas: {long}"


@pytest.mark.parametrize("room", ROOM_BUDGET)
def test_no_room_is_too_full(room: str) -> None:
    total = sum(lines(path) for path in (ROOT / room).rglob("*.py"))
    assert total <= ROOM_BUDGET[room], f"{room} has {total} lines"


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


def test_the_committed_configs_are_what_the_templates_make() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "make_configs.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, f"run `make configs`:\n{done.stdout}{done.stderr}"


def test_the_committed_table_of_models_is_what_the_families_say() -> None:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import make_model_table
    finally:
        sys.path.remove(str(ROOT / "tools"))
    assert (ROOT / "docs" / "model_table.txt").read_text() == make_model_table.page(), "run `make configs`"


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


def test_twin_methods_are_copied(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    shutil.copytree(ROOT / "tools", tmp_path / "tools")
    done = subprocess.run([sys.executable, tmp_path / "tools" / "sync_recipes.py"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), f"run `make sync`:\n{done.stdout}{done.stderr}"


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
    shown = tune("ls")
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
