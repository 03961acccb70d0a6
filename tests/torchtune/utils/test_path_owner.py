"""Folders of other users under a folder like /tmp: refused for reading and for writing."""

import os

import pytest

from torchtune._cli.download import download
from torchtune.config import ConfigError, load_and_check
from torchtune.utils import ForeignPathError, refuse_foreign

OTHER, ME = 54321, 54322


@pytest.fixture
def shared(tmp_path):
    """A folder like /tmp, with one folder of somebody else's."""
    if os.geteuid() != 0:
        pytest.skip("only root can give files to another user")
    for folder in (tmp_path, *tmp_path.parents):  # a user must be able to walk through what pytest made for root
        if folder == tmp_path or folder.name.startswith(("pytest-", "popen-")):
            folder.chmod(0o755)
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    (shared / "theirs").mkdir()
    (shared / "theirs" / "config.json").write_text("{}")
    os.chown(shared / "theirs", OTHER, OTHER)
    os.chown(shared / "theirs" / "config.json", OTHER, OTHER)
    return shared


@pytest.fixture(params=[0, ME], ids=["root", "a user"])
def me(request):
    """Run as root, which reads everybody's files, and as a user."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(request.param)
    yield request.param
    os.seteuid(before)


def test_paths_that_another_user_controls_are_refused(shared, tmp_path, me):
    os.seteuid(0)
    (tmp_path / "own").mkdir()
    (tmp_path / "leads there").symlink_to(shared / "theirs")
    (shared / "link").symlink_to(tmp_path / "own")
    os.chown(shared / "link", OTHER, OTHER, follow_symlinks=False)
    (shared / "theirs" / "mine").mkdir()
    os.chown(shared / "theirs" / "mine", me, me)
    os.seteuid(me)
    for path, message in (
        (shared / "theirs", "the folder .*theirs belongs to another user of this machine .uid 54321."),
        (shared / "theirs" / "config.json", "the folder .*theirs belongs"),
        (shared / "theirs" / "not there" / "yet", "the folder .*theirs belongs"),
        (shared / "theirs" / "mine", "the folder .*theirs belongs"),
        (shared / "link", "the link .*link belongs"),
        (shared / "link" / "x", "the link .*link belongs"),
        (tmp_path / "leads there", "the folder .*theirs belongs"),
        (shared / "x" / ".." / "theirs", "the folder .*theirs belongs"),
    ):
        with pytest.raises(ForeignPathError, match=message):
            refuse_foreign(path)


def test_paths_of_the_user_or_of_root_are_accepted(shared, tmp_path, me):
    os.seteuid(0)
    for name, owner in (("mine", me), ("of root", 0)):
        (shared / name).mkdir()
        os.chown(shared / name, owner, owner)
    (tmp_path / "private").mkdir()  # nobody but its owner writes there, so what is in it was put there by them
    (tmp_path / "private" / "gift").mkdir()
    os.chown(tmp_path / "private" / "gift", OTHER, OTHER)
    os.seteuid(me)
    for path in (
        shared / "mine",
        shared / "mine" / "new",
        shared / "of root",
        shared / "new",
        tmp_path / "private" / "gift",
    ):
        refuse_foreign(path)


def test_configs_and_downloads_name_the_refused_path(shared, tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text(
        f"output_dir: {shared}/theirs/out\ncheckpointer:\n  checkpoint_dir: {shared}/theirs\ntokenizer:\n"
        f"  path: {shared}/theirs/tokenizer.json\nother: {shared}/theirs\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_and_check(config)
    lines = [str(error) for error in caught.value.errors]
    assert [line.split(": ")[:2] for line in lines] == [
        [f"{config}:1", "output_dir"],
        [f"{config}:3", "checkpointer.checkpoint_dir"],
        [f"{config}:5", "tokenizer.path"],
    ]
    assert all("use a folder of your own" in line for line in lines)
    with pytest.raises(ForeignPathError, match=r"--output-dir: the folder .*theirs belongs to another user"):
        download("owner/name", shared / "theirs", token=None, ignore_patterns=None)
