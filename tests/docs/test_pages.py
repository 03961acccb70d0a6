"""What is read off a page, and what the runner refuses."""

import re

import pytest

from tests.docs.pages import PAGES, Command, edited
from tests.docs.test_commands import Page
from tests.recipes.killing import shared_forker


def test_edits_of_a_block_are_applied_in_order():
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
def test_output_that_differs_from_the_page_fails(text, output, reason, tmp_path):
    with pytest.raises(AssertionError, match=reason):
        Page(tmp_path, shared_forker()).run(Command(text, output))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_included_files_have_the_lines_that_begin_and_end_an_excerpt(page):
    """The site's build notices as well, but takes half a minute; the code of a recipe changes often."""
    included = ""
    for line in page.read_text().splitlines():
        if path := re.match(r" *\.\. literalinclude:: *(\S+)", line):
            included = (page.parent / path[1]).read_text()
        elif marker := re.match(r" +:(?:start|end)-(?:at|before|after): *(.+)", line):
            assert marker[1] in included, line
