"""Editors and type checkers find every public name: the stubs of lazy packages name the module that defines it."""

import re
import subprocess
import sys

from docs._ext.faces import public_modules, public_names
from tests.docs.pages import PAGES, ROOT, blocks_of

# Names of modules; attributes of objects are not checked, because a type checker does not follow all that torch does.
ERRORS = re.compile(r"\[missing-(?:import|module-attribute)\]|No attribute `\w+` in module")


def packages():
    """Packages that the API reference documents."""
    names = set(public_modules("torchtune.models"))
    for page in (ROOT / "docs" / "api").glob("*.rst"):
        names.update(re.findall(r"public-face:: (\S+)", page.read_text()))
    return sorted(names)


def check(folder):
    """Return what a type checker says of unknown names in the files of a folder."""
    command = [sys.executable, "-m", "pyrefly", "check", str(folder), "--preset", "default"]
    command += ["--python-interpreter-path", sys.executable]  # else the first Python on the PATH, without torch
    command += ["--output-format", "min-text", "--summary", "none", "--search-path", str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=600)
    assert done.returncode in (0, 1), done.stderr
    return [line for line in done.stdout.splitlines() if ERRORS.search(line)]


def test_public_names_have_definitions_for_type_checkers(tmp_path):
    for package in packages():
        imports = [f"from {package} import {name}\n" for name in public_names(package)]
        (tmp_path / f"names_of_{package.replace('.', '_')}.py").write_text("".join(imports))
    assert not check(tmp_path)


def test_type_checkers_know_which_names_packages_lack(tmp_path):
    stubs = [path.parent.relative_to(ROOT).parts for path in (ROOT / "torchtune").rglob("__init__.pyi")]
    for parts in stubs:
        package = ".".join(parts)
        (tmp_path / f"names_of_{'_'.join(parts)}.py").write_text(f"from {package} import no_such_name")
    assert len(check(tmp_path)) == len(stubs)


def test_type_checkers_know_the_names_in_code_of_the_documentation(tmp_path):
    for page in PAGES:
        folder = tmp_path / page.stem
        folder.mkdir()
        code = []
        for block in blocks_of(page):
            if block.caption and block.caption.endswith(".py"):
                (folder / block.caption).write_text(block.text)
            elif block.language == "python":
                code.append(block.text)
        (folder / "blocks.py").write_text("\n".join(code))
    assert not check(tmp_path)
