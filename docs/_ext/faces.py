"""The directive ``public-face:: package``: API reference of all names that a package exports.

Exports are lazy (PEP 562), so names are resolved from ``__all__`` instead of by ``automodule``.
"""

import importlib
import inspect
import re
from typing import ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


def public_names(package: str) -> list[str]:
    """Return ``__all__`` of a package or, without it, the public names that the module defines."""
    module = importlib.import_module(package)
    if hasattr(module, "__all__"):
        return list(module.__all__)
    own = {name: value for name, value in vars(module).items() if getattr(value, "__module__", None) == package}
    return [name for name in own if not name.startswith("_")]


def entry(package: str, name: str) -> list[str]:
    """Return the autodoc directive of an exported name; an empty list for a subpackage."""
    value = getattr(importlib.import_module(package), name)
    if inspect.ismodule(value):
        return []
    full = f"{package}.{name}"
    if inspect.isclass(value):
        if value.__doc__ is None and not value.__module__.startswith("torchtune"):
            return [f".. autodata:: {full}", "   :no-value:", ""]
        return [f".. autoclass:: {full}", "   :members:", "   :show-inheritance:", ""]
    if callable(value) and hasattr(value, "__name__"):
        return [f".. autofunction:: {full}", ""]
    shown = re.sub(r"<function (\w+) at \w+>", r"\1", repr(list(value) if isinstance(value, dict) else value))
    return [f".. py:data:: {full}", f"   :value: {shown[:80]}", ""]


class PublicFace(SphinxDirective):
    """Documents every public name of a package; ``:except: other`` omits names that ``other`` exports, too."""

    required_arguments = 1
    option_spec: ClassVar[dict] = {"except": directives.unchanged}

    def run(self) -> list[nodes.Node]:
        package = self.arguments[0]
        elsewhere = set(public_names(self.options["except"])) if "except" in self.options else set()
        names = [name for name in public_names(package) if name not in elsewhere]
        lines = [line for name in names for line in entry(package, name)]
        node = nodes.container()
        self.state.nested_parse(StringList(lines, source=package), 0, node)
        return node.children


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive (Sphinx entry point)."""
    app.add_directive("public-face", PublicFace)
    return {"parallel_read_safe": True}
