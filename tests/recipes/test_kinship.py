"""Recipes are copied, never inherited; these tests keep the copies from drifting."""

import ast
import itertools
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
RECIPES = sorted(path for path in (ROOT / "recipes").glob("*.py") if path.name != "__init__.py")
TRAINING = [path for path in RECIPES if "finetune" in path.stem]
NAMES = [path.stem for path in RECIPES]


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def classes(path: Path) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in tree(path).body if isinstance(node, ast.ClassDef)}


def recipe_class(path: Path) -> ast.ClassDef:
    (name,) = classes(path).keys() - {"Settings"}
    return classes(path)[name]


def source(path: Path, node: ast.stmt) -> str:
    first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
    return "\n".join(path.read_text().splitlines()[first - 1 : node.end_lineno])


def comment_above(path: Path, line: int) -> str:
    lines, found = path.read_text().splitlines(), []
    while lines[line - 2].strip().startswith("#"):
        line -= 1
        found.insert(0, lines[line - 1].strip("# "))
    return " ".join(found)


def settings(path: Path) -> dict[str, tuple[str, str | None, str]]:
    """Setting -> (type, default, comment)."""
    fields = [node for node in classes(path)["Settings"].body if isinstance(node, ast.AnnAssign)]
    return {
        node.target.id: (
            ast.unparse(node.annotation),
            None if node.value is None else ast.unparse(node.value),
            comment_above(path, node.lineno),
        )
        for node in fields
        if "ClassVar" not in ast.unparse(node.annotation)
    }


def twins(path: Path) -> dict[str, str]:
    """Methods under a ``# twin`` comment, by name."""
    methods = [node for node in recipe_class(path).body if isinstance(node, ast.FunctionDef)]
    return {
        node.name: source(path, node)
        for node in methods
        if comment_above(path, min([node.lineno, *(d.lineno for d in node.decorator_list)])) == "twin"
    }


# What a setting is told differently for, where the words must name the recipe's own model.
OWN_WORDS = {"model", "model_converters", "checkpointer"}


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(RECIPES, 2)), ids=lambda path: path.stem)
def test_a_shared_setting_has_one_type_default_and_comment(one: Path, other: Path) -> None:
    mine, theirs = settings(one), settings(other)
    both = TRAINING if one in TRAINING and other in TRAINING else None
    for name in mine.keys() & theirs.keys():
        if name in OWN_WORDS or (both is None and name in {"seed", "checkpointer", "model", "tokenizer"}):
            continue
        assert mine[name] == theirs[name], f"'{name}' differs between {one.name} and {other.name}"


@pytest.mark.parametrize("path", RECIPES, ids=NAMES)
def test_every_setting_says_what_it_does(path: Path) -> None:
    silent = [name for name, (_, _, comment) in settings(path).items() if len(comment) < 15]
    assert not silent, f"settings of {path.name} without a comment: {silent}"


def test_twin_methods_are_equal_to_the_letter() -> None:
    known: dict[str, tuple[Path, str]] = {}
    for path in TRAINING:
        assert twins(path), f"{path.name} marks no method as twin"
        assert len(twins(path)) <= 5, f"{path.name}: a sixth twin belongs in the library"
        for name, text in twins(path).items():
            first, expected = known.setdefault(name, (path, text))
            assert text == expected, f"{name} differs between {first.name} and {path.name}: run make sync"


def test_training_recipes_have_one_order_and_one_set_of_names() -> None:
    orders = {tuple(node.name for node in recipe_class(path).body if hasattr(node, "name")) for path in TRAINING}
    assert len(orders) == 1, orders
    for one, other in itertools.combinations(TRAINING, 2):
        mine, theirs = list(settings(one)), list(settings(other))
        assert [n for n in mine if n in theirs] == [n for n in theirs if n in mine], "settings are in another order"


@pytest.mark.parametrize("path", RECIPES, ids=NAMES)
def test_a_recipe_stands_alone(path: Path) -> None:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom | ast.Import):
            modules = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            names = [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
            assert not any(part.startswith("_") for module in modules for part in module.split(".")), modules
            assert not any(name.startswith("_") for name in names), names
            assert not any(module.split(".")[0] == "recipes" for module in modules), modules
        if isinstance(node, ast.ClassDef):
            assert not node.bases, f"{node.name} inherits; recipes are copied"
        if isinstance(node, ast.Attribute):
            assert not (node.attr.startswith("_") and not node.attr.startswith("__")), f"private name {node.attr}"


def depth(node: ast.AST) -> int:
    """Levels of indented blocks inside a function."""
    blocks = (ast.With, ast.For, ast.While, ast.If, ast.Try)
    return max((isinstance(child, blocks) + depth(child) for child in ast.iter_child_nodes(node)), default=0)


@pytest.mark.parametrize("path", RECIPES, ids=NAMES)
def test_a_recipe_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400
    for node in recipe_class(path).body:
        if isinstance(node, ast.FunctionDef) and node.name == "train":
            assert node.end_lineno - node.lineno <= 65
            assert depth(node) <= 4, "train is at most four levels deep"


@pytest.mark.parametrize("path", TRAINING, ids=lambda path: path.stem)
def test_no_default_hides_in_the_code(path: Path) -> None:
    assert "cfg.get(" not in path.read_text()
    read = {node.attr for node in ast.walk(tree(path)) if isinstance(node, ast.Attribute)}
    unread = [name for name in settings(path) if name not in read]
    assert not unread, f"settings that {path.name} never reads: {unread}"


@pytest.mark.parametrize("path", TRAINING, ids=lambda path: path.stem)
def test_every_feature_is_there_or_has_a_reason(path: Path) -> None:
    table = yaml.safe_load((ROOT / "recipes" / "features.yaml").read_text())
    reasons = table["reasons"].get(path.stem, {})
    for feature, setting in table["features"].items():
        if setting in settings(path):
            assert feature not in reasons, f"{path.stem} has '{feature}': remove its reason"
        else:
            assert reasons.get(feature), f"{path.stem} lacks '{feature}' ({setting}): add it or say why"
