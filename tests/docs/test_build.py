"""The documentation builds without a warning, and names everything that is public."""

import html
import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs._ext.faces import public_modules
from tools.recipe_table import groups, recipe_files, recipes_in, table

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# Looking for garbage in what stays until the end would take a quarter of the time. Looking for the same name again and
# again, lines of definitions, which only an extension shows, comments "#:", which the library has none of, quotation
# marks, the words of the search, and each page's menu of all objects would take a tenth each.
SPHINX = """if True:
    import functools, gc, logging, sys
    gc.disable()
    logging.disable(logging.DEBUG)
    from sphinx.builders.html import StandaloneHTMLBuilder
    from sphinx.cmd.build import main
    from sphinx.domains.python import PythonDomain
    from sphinx.pycode.parser import Parser
    StandaloneHTMLBuilder.search = False
    Parser.parse_definition = Parser.parse_comments = lambda self: None
    PythonDomain.find_obj = functools.cache(PythonDomain.find_obj)
    sys.exit(main())
"""


FASTER = ["-D", "smartquotes=0", "-D", "toc_object_entries=0"]


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_is_complete(tmp_path):
    command = [sys.executable, "-c", SPHINX, "-W", "--keep-going", "-q", *FASTER, str(DOCS), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-8000:]
    reference = "".join(page.read_text() for page in sorted((tmp_path / "api").glob("*.html")))
    missing = [name for name in public_names() if f'id="{name}"' not in reference]
    assert not missing, "names that are exported and not in docs/api"
    models = (tmp_path / "models.html").read_text()
    missing = [name for name in sizes() if f'#{name}"' not in models]
    assert not missing, "builders that are not in the table of models"
    assert "134,515,008" in models  # the parameters of SmolLM2 135M, as its checkpoint has them
    check_recipe_tables(html.unescape((tmp_path / "recipes.html").read_text()))


def check_recipe_tables(page):
    """The page shows every recipe, every feature, and for each cell the setting or the reason in the features table."""
    rows = []
    for html_table in re.findall(r"<table.*?</table>", page, re.DOTALL):
        for html_row in re.findall(r"<tr.*?</tr>", html_table, re.DOTALL):
            cells = re.findall(r"<t[hd].*?</t[hd]>", html_row, re.DOTALL)
            rows.append([re.sub(r"<.*?>|\s+", " ", cell).strip() for cell in cells])
    groups_on_page = {row[0]: row[1].split(", ") for row in rows if row[0] in groups()}
    expected_groups = {}
    for name, names in groups().items():
        expected_groups[name] = [group.replace("_", " ") for group in names]
    assert groups_on_page == expected_groups
    training = recipes_in("training")
    content = table()
    (head,) = [row for row in rows if row[0] == "feature"]
    assert head == ["feature", "setting", *training]
    for feature, setting in content["features"].items():
        (row,) = [row for row in rows if row[0] == feature]
        assert row[1] == setting
        for name, cell in zip(training, row[2:], strict=True):
            has = re.search(rf"^    {setting}:", recipe_files()[name].read_text(), re.MULTILINE)
            assert cell == ("yes" if has else f"no: {content['reasons'][name][feature]}")


def public_names():
    """Dotted path of everything that the packages export, subpackages aside."""
    paths = []
    top = importlib.import_module("torchtune")
    # Names that training exports for recipes of earlier releases are documented in their own rooms.
    elsewhere = set()
    for room in (top.checkpoints, top.config, top.estimate, top.supervision):
        elsewhere.update(room.__all__)
    for face in top.__all__:
        module = getattr(top, face)
        if not inspect.ismodule(module):
            paths.append(f"torchtune.{face}")
            continue
        excluded = elsewhere if face == "training" else set()
        names = [
            name for name in module.__all__ if name not in excluded and not inspect.ismodule(getattr(module, name))
        ]
        paths += [f"torchtune.{face}.{name}" for name in names]
    return paths


def sizes():
    """Dotted path of every builder that is a row of a family's table; those with adapters are called alike."""
    builders = []
    for family in public_modules("torchtune.models"):
        module = importlib.import_module(family)
        rows = getattr(module, "BUILDERS", ())  # none: parts of other families
        builders += [f"{family}.{name}" for name in rows if name in module.__all__ and "lora_" not in name]
    return builders
