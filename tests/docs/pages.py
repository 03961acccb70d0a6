"""Read the pages and run what they show.

What stands in a block decides what is done with it, in the order of the page, in one folder per page:

- ``console``: lines that begin with ``$ `` are commands and are run; the lines below a command are what it prints,
  with ``...`` for anything. A command with nothing below it may print what it likes, but must succeed.
- ``python``: executed; all blocks of a page share their names.
- ``json``, ``yaml``, ``python`` … with a ``:caption:``: a file of that name, written into the page's folder.
- ``diff`` with a ``:caption:``: an edit of that file; its unchanged and removed lines must occur there exactly once.
- ``yaml`` without a caption: a fragment; it must be YAML.
- a ``literalinclude`` with a ``:caption:``: a copy of that file under the name of the caption.
- ``text``: shown, not run.
"""

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "AGENTS.md", *(ROOT / "docs").glob("*.rst")])

_DIRECTIVE = re.compile(r"^(?P<indent> *)\.\. (?:code-block|code|sourcecode):: *(?P<language>\w*) *$")
_INCLUDE = re.compile(r"^(?P<indent> *)\.\. literalinclude:: *(?P<path>\S+) *$")
_FENCE = re.compile(r"^```(?P<language>\w*) *$")
LANGUAGES = {"console", "python", "json", "yaml", "diff", "text", "toml"}


@dataclass(frozen=True)
class Block:
    """A block of a page."""

    page: Path
    line: int
    language: str
    caption: str | None
    text: str


@dataclass(frozen=True)
class Command:
    """A shown command and what is shown below it."""

    text: str
    output: str


def blocks_of(page: Path) -> list[Block]:
    """The blocks of a page of reStructuredText or Markdown, in order."""
    lines = page.read_text(encoding="utf-8").splitlines()
    return _fenced(page, lines) if page.suffix == ".md" else _directives(page, lines)


def _fenced(page: Path, lines: list[str]) -> list[Block]:
    blocks = []
    start = None
    for number, line in enumerate(lines, start=1):
        match = _FENCE.match(line)
        if match and start is None:
            start = number
            language = match["language"]
        elif line.rstrip() == "```":
            body = "\n".join(lines[start : number - 1]) + "\n"
            blocks.append(Block(page, start, language, None, body))
            start = None
    return blocks


def _directives(page: Path, lines: list[str]) -> list[Block]:
    blocks = []
    for number, line in enumerate(lines):
        match = _DIRECTIVE.match(line) or _INCLUDE.match(line)
        if match is None:
            continue
        body = []
        for following in lines[number + 1 :]:
            if following.strip() and not following.startswith(match["indent"] + " "):
                break
            body.append(following)
        content = textwrap.dedent("\n".join(body)).split("\n")
        caption = None
        while content and re.match(r"^:\w+:", content[0]):
            name, _, value = content.pop(0)[1:].partition(":")
            caption = value.strip() if name == "caption" else caption
        if match.re is _DIRECTIVE:
            text = "\n".join(content).strip("\n") + "\n"
            blocks.append(Block(page, number + 1, match["language"], caption, text))
        elif caption:
            text = (page.parent / match["path"]).read_text(encoding="utf-8")
            blocks.append(Block(page, number + 1, "text", caption, text))
    return blocks


def commands_of(block: Block) -> list[Command]:
    """The commands of a ``console`` block; a backslash at the end continues a line."""
    commands: list[tuple[str, list[str]]] = []
    continued = False
    for line in block.text.splitlines():
        if continued:
            text, output = commands[-1]
            commands[-1] = (text + " " + line.strip(), output)
        elif line.startswith("$ "):
            commands.append((line[2:].strip(), []))
        elif commands:
            commands[-1][1].append(line)
        elif line.strip():
            raise ValueError(f"{block.page.name}:{block.line}: output before any command")
        continued = bool(commands) and not commands[-1][1] and commands[-1][0].endswith("\\")
        if continued:
            commands[-1] = (commands[-1][0][:-1].rstrip(), [])
    return [Command(text, "\n".join(output).strip("\n")) for text, output in commands]


def edited(text: str, diff: str) -> str:
    """``text`` after the edits of ``diff``; a line ``@@`` separates them.

    Raises:
        ValueError: the place of an edit is not there, or there more than once.
    """
    for hunk in re.split(r"^@@.*\n", diff, flags=re.MULTILINE):
        lines = hunk.splitlines()
        if not lines:
            continue
        old = "".join(line[1:] + "\n" for line in lines if not line.startswith("+"))
        new = "".join(line[1:] + "\n" for line in lines if not line.startswith("-"))
        if text.count(old) != 1:
            raise ValueError(f"the place of this edit occurs {text.count(old)} times:\n{old}")
        text = text.replace(old, new)
    return text
