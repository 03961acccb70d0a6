"""Recipes are copied, never inherited; these tests keep the copies from drifting."""

import ast
import functools
import importlib
import itertools
import shutil
from pathlib import Path

import pytest

from tools.recipe_table import RecipeTableError, groups, recipe_files, recipes_in, table
from torchtune._recipe_registry import get_all_recipes

ROOT = Path(__file__).parents[2]
FILES = recipe_files()
RECIPES = list(FILES.values())
TRAINING = [FILES[name] for name in recipes_in("training")]
NAMES = list(FILES)
TABLE = table()  # read once, as the recipes are: they are many


@functools.cache
def tree(path):
    return ast.parse(path.read_text())


@functools.cache
def classes(path):
    return {node.name: node for node in tree(path).body if isinstance(node, ast.ClassDef)}


def recipe_class(path):
    (name,) = classes(path).keys() - {"Settings"}
    return classes(path)[name]


@functools.cache
def lines_of(path):
    return path.read_text().splitlines()


def source(path, node):
    first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
    return "\n".join(lines_of(path)[first - 1 : node.end_lineno])


def comment_above(path, line):
    lines = lines_of(path)
    comments = []
    while lines[line - 2].strip().startswith("#"):
        line -= 1
        comments.insert(0, lines[line - 1].strip("# "))
    return " ".join(comments)


@functools.cache
def settings(path):
    """Setting -> (type, default, comment)."""
    described = {}
    for node in classes(path)["Settings"].body:
        if not isinstance(node, ast.AnnAssign) or "ClassVar" in ast.unparse(node.annotation):
            continue
        default = None
        if node.value is not None:
            default = ast.unparse(node.value)
        described[node.target.id] = (ast.unparse(node.annotation), default, comment_above(path, node.lineno))
    return described


@functools.cache
def methods(path):
    return {node.name: node for node in recipe_class(path).body if isinstance(node, ast.FunctionDef)}


def test_a_shared_setting_has_one_type_default_and_comment():
    for first, second in itertools.combinations(RECIPES, 2):
        first_settings, second_settings = settings(first), settings(second)
        kin = first in TRAINING and second in TRAINING
        for name in first_settings.keys() & second_settings.keys():
            if name not in TABLE["own_settings"] or (kin and name not in ("model", "collate_fn")):
                assert first_settings[name] == second_settings[name], (
                    f"'{name}' differs between {first.name} and {second.name}"
                )


def test_settings_listed_as_different_between_recipes_do_differ():
    for name, reason in TABLE["own_settings"].items():
        assert reason
        assert len({settings(path)[name] for path in RECIPES if name in settings(path)}) > 1, f"{name} is no exception"


@pytest.mark.parametrize("path", RECIPES, ids=NAMES)
def test_every_setting_says_what_it_does(path):
    silent = [name for name, (_, _, comment) in settings(path).items() if len(comment) < 15]
    assert not silent, f"settings of {path.name} without a comment: {silent}"


def test_every_recipe_is_declared():
    assert set(groups()) == set(FILES)


def test_recipes_of_the_same_groups_would_be_one_method():
    """The command line tells methods apart by their groups: a config for one is not run by another."""
    declared = {name: frozenset(group_names) for name, group_names in groups().items()}
    same = [(a, b) for a, b in itertools.combinations(declared, 2) if declared[a] == declared[b]]
    assert not same, "give the newer one a group of its own in recipes/features.yaml"
    recipes = {recipe.name: recipe for recipe in get_all_recipes()}
    assert set(recipes) == set(declared)
    assert sorted(name for name in recipes if recipes[name].supports_distributed) == sorted(recipes_in("distributed"))
    single, several = recipes["lora_finetune_single_device"], recipes["lora_finetune_distributed"]
    assert single.method == several.method != recipes["full_finetune_distributed"].method


def test_former_names_lead_to_recipes():
    current = {recipe.name for recipe in get_all_recipes()}
    former = {}
    for recipe in get_all_recipes():
        former |= dict.fromkeys(recipe.former_names, recipe.name)
    assert len(former) >= 17
    assert not former.keys() & current
    assert former["lora_dpo_single_device"] == "dpo"
    assert former["qat_lora_finetune_distributed"] == "lora_finetune_distributed"


def copy_of_recipes(folder):
    shutil.copytree(ROOT / "recipes", folder / "recipes", ignore=shutil.ignore_patterns("configs", "__pycache__"))
    shutil.copytree(ROOT / "tools", folder / "tools", ignore=shutil.ignore_patterns("configs", "__pycache__"))
    return folder / "recipes"


def test_a_recipe_that_is_not_declared_is_named_with_the_line_to_edit(tmp_path):
    recipes = copy_of_recipes(tmp_path)
    shutil.copy(recipes / "generate.py", recipes / "my_dpo.py")
    lines = (recipes / "features.yaml").read_text().splitlines()
    message = f"recipes/features.yaml:{lines.index('recipes:') + 1}: recipes/my_dpo.py belongs to no group: add a line"
    with pytest.raises(RecipeTableError) as caught:
        groups(recipes)
    assert str(caught.value).startswith(message)
    assert "'my_dpo: [...]'" in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("generate: [inference", "generate: [infrence", ": 'infrence' is not a group: use training, "),
        ("generate: [inference, one_device, distributed]", "generate: []", ": generate belongs to no group"),
        ("  generate: [", "  generator: [inference]\n  generate: [", ": there is no recipes/generator.py"),
    ],
)
def test_a_wrong_line_of_the_table_is_named(old, new, said, tmp_path):
    recipes = copy_of_recipes(tmp_path)
    path = recipes / "features.yaml"
    path.write_text(path.read_text().replace(old, new))
    line = next(i for i, text in enumerate(path.read_text().splitlines(), 1) if new.split("\n")[0] in text)
    with pytest.raises(RecipeTableError) as caught:
        groups(recipes)
    assert str(caught.value).startswith(f"recipes/features.yaml:{line}{said}")


def test_training_recipes_have_one_order_and_one_set_of_names():
    for first, second in itertools.combinations(TRAINING, 2):
        for names in (settings, methods):
            first_names, second_names = list(names(first)), list(names(second))
            assert [n for n in first_names if n in second_names] == [n for n in second_names if n in first_names], (
                f"{first} and {second}"
            )
    assert len({tuple(methods(FILES[name])) for name in recipes_in("supervised")}) == 1


@pytest.mark.parametrize("path", RECIPES, ids=NAMES)
def test_a_recipe_stands_alone(path):
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom | ast.Import):
            paths = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                paths = [f"{node.module}.{name}" for name in paths]
            for dotted_path in paths:
                parts = dotted_path.split(".")
                assert not any(part.startswith("_") for part in parts), dotted_path
                assert parts[0] != "recipes", dotted_path
        if isinstance(node, ast.ClassDef):
            assert not node.bases, f"{node.name} inherits; recipes are copied"
        if isinstance(node, ast.Attribute):
            assert not (node.attr.startswith("_") and not node.attr.startswith("__")), f"private name {node.attr}"


@pytest.mark.parametrize("path", RECIPES, ids=NAMES)
def test_a_recipe_takes_every_name_from_the_package_that_defines_it(path):
    """``torchtune.training`` has names of other packages for recipes of earlier releases alone."""
    nodes = list(ast.walk(tree(path)))
    packages = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module == "torchtune":
            packages.update(alias.name for alias in node.names)
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in packages:
            value = getattr(importlib.import_module(f"torchtune.{node.value.id}"), node.attr)
            home = getattr(value, "__module__", "")
            if home.startswith("torchtune."):
                assert home.startswith(f"torchtune.{node.value.id}"), f"{ast.unparse(node)} is defined in {home}"


def depth(node):
    """Levels of indented blocks inside a function."""
    blocks = (ast.With, ast.For, ast.While, ast.If, ast.Try)
    return max((isinstance(child, blocks) + depth(child) for child in ast.iter_child_nodes(node)), default=0)


@pytest.mark.parametrize("path", RECIPES, ids=NAMES)
def test_the_loop_of_a_recipe_is_flat(path):
    for node in recipe_class(path).body:
        if isinstance(node, ast.FunctionDef) and node.name == "train":
            assert depth(node) <= 4, "train is at most four levels deep"


@pytest.mark.parametrize("path", TRAINING, ids=lambda path: path.stem)
def test_ranks_agree_in_a_visible_line_and_the_library_is_not_given_the_recipe(path):
    """Ranks agree in one visible line, no function of the library gets the recipe, and what a user edits is plain."""
    text = path.read_text()
    for node in ast.walk(recipe_class(path)):
        if isinstance(node, ast.Call):
            arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
            assert not any(isinstance(value, ast.Name) and value.id == "self" for value in arguments), ast.unparse(node)
    assert 1 <= text.count("control.synchronize(") <= 2  # an optimizer in the backward pass asks before it
    assert "make sync" not in text
    assert "# twin" not in text


@pytest.mark.parametrize("path", TRAINING, ids=lambda path: path.stem)
def test_no_default_hides_in_the_code(path):
    assert "cfg.get(" not in path.read_text()
    read = {node.attr for node in ast.walk(tree(path)) if isinstance(node, ast.Attribute)}
    unread = [name for name in settings(path) if name not in read]
    assert not unread, f"settings that {path.name} never reads: {unread}"


@pytest.mark.parametrize("path", TRAINING, ids=lambda path: path.stem)
def test_every_feature_is_there_or_has_a_reason(path):
    reasons = TABLE["reasons"].get(path.stem, {})
    for feature, setting in TABLE["features"].items():
        if setting in settings(path):
            assert feature not in reasons, f"{path.stem} has '{feature}': remove its reason"
        else:
            assert reasons.get(feature), f"{path.stem} lacks '{feature}' ({setting}): add it or say why"
