"""Random edits of configs, such as people make them, each with what a good message names."""

import inspect
import random
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

import yaml

from torchtune.config._locate import locate
from torchtune.config._reader import _Loader
from torchtune.config._schema import PLAIN, members, settings_fields, split_annotated
from torchtune.config._signature import accepts

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Edit:
    """An edited config: its text, overrides, the dotted key that must be named, and the name to suggest."""

    kind: str
    text: str
    key: str
    suggestion: str | None = None
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Entry:
    """One ``key: value`` of the file; ``component`` is the path of the component that it belongs to, if any."""

    path: Path
    key: yaml.Node
    value: yaml.Node
    component: str | None

    @property
    def dotted(self) -> str:
        return ".".join(map(str, self.path))


def _entries(node: yaml.Node, path: Path = ()) -> Iterator[Entry]:
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _entries(item, (*path, index))
    if isinstance(node, yaml.MappingNode):
        named = {key.value: value.value for key, value in node.value}
        for key, value in node.value:
            if not path or "_component_" in named:  # other mappings hold free keys
                yield Entry((*path, key.value), key, value, named.get("_component_"))
            yield from _entries(value, (*path, key.value)) if not path or "_component_" in named else ()


class Mutator:
    """Makes edits of one config; ``settings`` is the recipe's dataclass."""

    def __init__(self, text: str, settings: type, rng: random.Random) -> None:
        self.text, self.settings, self.rng = text, settings, rng
        self.entries = [e for e in _entries(yaml.compose(text, Loader=_Loader)) if e.path != ("recipe",)]
        self.kinds: dict[str, Callable[[], Edit | None]] = {
            "misspelt key": lambda: self._misspell([e for e in self.entries if e.component is None]),
            "misspelt argument": lambda: self._misspell(
                [e for e in self.entries if e.component and e.path[-1] != "_component_"]
            ),
            "wrong type": self._wrong_type,
            "missing required key": self._missing,
            "duplicate key": self._duplicate,
            "unknown component": self._unknown_component,
            "swallowed argument": self._swallowed,
            "override of no section": self._no_section,
            "negative learning rate": self._negative_rate,
            "bad choice": self._bad_choice,
        }

    def edit(self, kind: str) -> Edit | None:
        """One random edit of ``kind``, or ``None`` where the config offers no place for it."""
        found = self.kinds[kind]()
        return None if found is None else Edit(kind, found.text, found.key, found.suggestion, found.overrides)

    def typo(self, word: str, taken: set[str]) -> str:
        """``word`` with one letter dropped, doubled, replaced or swapped; never one of ``taken``."""
        while True:
            at = self.rng.randrange(len(word))
            letter = self.rng.choice(string.ascii_lowercase)
            changed = self.rng.choice(
                (
                    word[:at] + word[at + 1 :],
                    word[:at] + word[at] + word[at:],
                    word[:at] + letter + word[at + 1 :],
                    word[:at] + word[at + 1 : at + 2] + word[at] + word[at + 2 :],
                )
            )
            if changed not in {word, "", *taken} and changed.isidentifier():
                return changed

    def _annotation(self, entry: Entry) -> Any:
        if entry.component is None:
            found = settings_fields(self.settings).get(str(entry.path[-1]))
            return Any if found is None else found.annotation
        return getattr(accepts(locate(entry.component)).named.get(entry.path[-1]), "annotation", Any)

    def _names(self, entry: Entry) -> set[str]:
        known = settings_fields(self.settings) if entry.component is None else accepts(locate(entry.component)).named
        return set(known)

    def _replace(self, node: yaml.Node, text: str) -> str:
        return self.text[: node.start_mark.index] + text + self.text[node.end_mark.index :]

    def _lines(self, entry: Entry) -> tuple[int, int] | None:
        """First line and line after the last of an entry in block style, alone on its lines."""
        lines = self.text.splitlines()
        start = entry.key.start_mark.line
        if lines[start][: entry.key.start_mark.column].strip():
            return None
        end = entry.value.end_mark.line
        if entry.value.end_mark.column > 0 or end == start:
            end += 1
        return start, end

    def _misspell(self, places: list[Entry]) -> Edit | None:
        if not places:
            return None
        entry = self.rng.choice(places)
        name = str(entry.path[-1])
        wrong = self.typo(name, self._names(entry))
        return Edit("", self._replace(entry.key, wrong), ".".join(map(str, (*entry.path[:-1], wrong))), name)

    def _wrong_type(self) -> Edit | None:
        places = []
        for entry in self.entries:
            base, _ = split_annotated(self._annotation(entry))
            if isinstance(entry.value, yaml.ScalarNode) and all(member in PLAIN for member in members(base)):
                places.append((entry, members(base)))
        if not places:
            return None
        entry, kinds = self.rng.choice(places)
        wrong = ["[1, two]", "{some: thing}"] + ([] if str in kinds else ["many"])
        return Edit("", self._replace(entry.value, self.rng.choice(wrong)), entry.dotted)

    def _missing(self) -> Edit | None:
        places = []
        for entry in self.entries:
            if entry.component is None:
                field = settings_fields(self.settings).get(str(entry.path[-1]))
                required = field is not None and field.required
            else:
                argument = accepts(locate(entry.component)).named.get(entry.path[-1])
                required = argument is not None and argument.required
            if required and self._lines(entry):
                places.append(entry)
        if not places:
            return None
        entry = self.rng.choice(places)
        start, end = self._lines(entry)
        lines = self.text.splitlines(keepends=True)
        return Edit("", "".join(lines[:start] + lines[end:]), entry.dotted)

    def _duplicate(self) -> Edit | None:
        entry = self.rng.choice([e for e in self.entries if self._lines(e)])
        start, end = self._lines(entry)
        lines = self.text.splitlines(keepends=True)
        copy = lines[start:end]
        copy[-1] = copy[-1].rstrip("\n") + "\n"
        return Edit("", "".join(lines[:end] + copy + lines[end:]), entry.dotted)

    def _unknown_component(self) -> Edit | None:
        entry = self.rng.choice([e for e in self.entries if e.path[-1] == "_component_"])
        parts = entry.value.value.split(".")
        at = self.rng.randrange(len(parts))
        name = parts[at]
        owner = locate(".".join(parts[:at])) if at else None
        parts[at] = self.typo(name, set(dir(owner)))
        return Edit("", self._replace(entry.value, ".".join(parts)), entry.dotted, name)

    def _swallowed(self) -> Edit | None:
        places = []
        for entry in self.entries:
            if entry.path[-1] == "_component_" and self._lines(entry):
                target = locate(entry.value.value)
                kinds = {parameter.kind for parameter in inspect.signature(target).parameters.values()}
                signature = accepts(target)
                given = {e.path[-1] for e in self.entries if e.path[:-1] == entry.path[:-1]}
                absent = [name for name in signature.named if name not in given and len(name) > 3]
                if inspect.Parameter.VAR_KEYWORD in kinds and absent and not signature.open:
                    places.append((entry, absent, set(signature.named)))
        if not places:
            return None
        entry, absent, taken = self.rng.choice(places)
        name = self.rng.choice(absent)
        wrong = self.typo(name, taken)
        line = entry.key.start_mark.line + 1
        lines = self.text.splitlines(keepends=True)
        added = " " * entry.key.start_mark.column + f"{wrong}: 1\n"
        return Edit(
            "", "".join([*lines[:line], added, *lines[line:]]), ".".join(map(str, (*entry.path[:-1], wrong))), name
        )

    def _no_section(self) -> Edit | None:
        entry = self.rng.choice([e for e in self.entries if len(e.path) == 2])
        section = str(entry.path[0])
        wrong = self.typo(section, set(settings_fields(self.settings)))
        return Edit("", self.text, wrong, section, (f"{wrong}.{entry.path[1]}=1",))

    def _negative_rate(self) -> Edit | None:
        rates = [e for e in self.entries if e.path == ("optimizer", "lr")]
        return Edit("", self._replace(rates[0].value, f"-{rates[0].value.value}"), "optimizer.lr") if rates else None

    def _bad_choice(self) -> Edit | None:
        places = []
        for entry in self.entries:
            base, _ = split_annotated(self._annotation(entry))
            choices = [c for m in members(base) if get_origin(m) is Literal for c in get_args(m)]
            if entry.value.value in choices:
                places.append((entry, choices))
        if not places:
            return None
        entry, choices = self.rng.choice(places)
        return Edit("", self._replace(entry.value, self.typo(entry.value.value, set(choices))), entry.dotted)
