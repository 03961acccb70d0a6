"""API reference of public names: the directives ``public-face:: package`` and ``public-faces:: package``.

The first documents all names that a package exports, the second all names of its public modules. Exports are lazy
(PEP 562), so names are resolved from ``__all__`` instead of by ``automodule``.
"""

import importlib
import inspect
import re
from pkgutil import iter_modules
from typing import ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import nested_parse_with_titles


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


def public_modules(package: str) -> list[str]:
    """Return the dotted names of a package's public modules and subpackages."""
    path = importlib.import_module(package).__path__
    return [f"{package}.{module.name}" for module in iter_modules(path) if not module.name.startswith("_")]


class PublicFace(SphinxDirective):
    """Documents every public name of a package; ``:except: …`` omits names that other packages export, too."""

    required_arguments = 1
    option_spec: ClassVar[dict] = {"except": directives.unchanged}

    def run(self) -> list[nodes.Node]:
        package = self.arguments[0]
        elsewhere = set()
        for other in self.options.get("except", "").split():
            elsewhere.update(public_names(other))
        names = [name for name in public_names(package) if name not in elsewhere]
        lines = [line for name in names for line in entry(package, name)]
        node = nodes.container()
        self.state.nested_parse(StringList(lines, source=package), 0, node)
        return node.children


class PublicFaces(SphinxDirective):
    """Documents every public module of a package, one section each.

    A name that two modules export, such as a tokenizer of two families, is documented once.
    """

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        seen = set()
        lines = []
        for module in public_modules(self.arguments[0]):
            lines += [module, "-" * len(module), ""]
            for name in public_names(module):
                key = (name, id(getattr(importlib.import_module(module), name)))
                if key not in seen:
                    lines += entry(module, name)
                seen.add(key)
        node = nodes.section()
        node.document = self.state.document
        nested_parse_with_titles(self.state, StringList(lines, source=self.arguments[0]), node)
        return node.children


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive (Sphinx entry point)."""
    app.add_directive("public-face", PublicFace)
    app.add_directive("public-faces", PublicFaces)
    return {"parallel_read_safe": True}
