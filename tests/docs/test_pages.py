"""What is read off a page, and what the runner refuses."""

import pytest

from tests.docs.pages import Block, Command, blocks_of, commands_of, edited
from tests.docs.test_commands import Page
from tests.recipes.killing import shared_forker

RST = """
Title
=====

.. code-block:: console

   $ tune run \\
       --config a
   one
   ...
   $ ls

Text.

.. code-block:: json
   :caption: a/b.json

   {"c": 1}
"""


def test_blocks_and_commands(tmp_path):
    path = tmp_path / "page.rst"
    path.write_text(RST)
    console, file = blocks_of(path)
    assert commands_of(console) == [Command("tune run --config a", "one\n..."), Command("ls", "")]
    assert (file.language, file.caption, file.text) == ("json", "a/b.json", '{"c": 1}\n')
    path = tmp_path / "page.md"
    path.write_text("Text\n\n```console\n$ ls\n```\n")
    (fenced,) = blocks_of(path)
    assert commands_of(fenced) == [Command("ls", "")]
    with pytest.raises(ValueError, match="output before any command"):
        commands_of(Block(path, 1, "console", None, "out\n"))


def test_edits():
    assert edited("a\nb\nc\n", " a\n+x\n@@\n-c\n") == "a\nx\nb\n"
    with pytest.raises(ValueError, match="occurs 0 times"):
        edited("a\n", "-b\n")
    with pytest.raises(ValueError, match="occurs 2 times"):
        edited("a\na\n", "-a\n")


@pytest.mark.parametrize(
    ("text", "output", "reason"),
    [
        ("tune ls --nonsense", "", "exit code 2"),
        ("tune ls", "RECIPE CONFIG", "shown:"),
        ("tune validate smol/135M_lora_single_device epochz=1", "", "exit code 2"),
        ("tune validate smol/135M_lora_single_device", "error: ...", "shown:"),
        ("false", "", "exit code 1"),
        ("no_such_command_anywhere", "", "exit code 127"),
        ("echo yes", "no", "shown:"),
    ],
)
def test_what_is_not_as_shown_fails(text, output, reason, tmp_path):
    with pytest.raises(AssertionError, match=reason):
        Page(tmp_path, shared_forker()).run(Command(text, output))
