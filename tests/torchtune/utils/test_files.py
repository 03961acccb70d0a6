"""Files are whole or not there, and paths of other users are refused."""

import errno
import os
import resource

import numpy as np
import pytest

from torchtune._cli.download import download
from torchtune.config import ConfigError, load_and_check
from torchtune.utils import (
    ForeignPathError,
    UserError,
    atomic_directory,
    atomic_write,
    refuse_path_of_other_user,
    write_json,
)

# User ids in the tests of foreign paths.
OTHER = 54321
ME = 54322


def test_a_file_appears_whole(tmp_path):
    path = tmp_path / "new" / "file.txt"
    with atomic_write(path, "w") as file:
        file.write("text")
        assert not path.exists()
    assert path.read_text() == "text"
    assert list(path.parent.iterdir()) == [path]


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(ZeroDivisionError), atomic_write(path) as file:
        file.write(b"half" * (1 // 0))
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_directory_appears_whole_and_replaces(tmp_path):
    path = tmp_path / "step_1"
    for content in ("one", "two"):
        with atomic_directory(path) as folder:
            (folder / "sub").mkdir()
            (folder / "sub" / "file").write_text(content)
        assert (path / "sub" / "file").read_text() == content
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_leaves_the_old_directory(tmp_path):
    path = tmp_path / "step_1"
    with atomic_directory(path) as folder:
        (folder / "file").write_text("old")
    with pytest.raises(FileNotFoundError), atomic_directory(path) as folder:
        (folder / "file").rename(folder / "gone")
    assert (path / "file").read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (errno.ENOSPC, "No space left"),
        (errno.EROFS, "No permission"),
        (errno.EACCES, "No permission"),
        (errno.EMFILE, r"file cannot be opened: too many files are open, and this process may open \d+ \(ulimit -n\)"),
        (errno.EISDIR, r"file cannot be written \(Is a directory\): choose another path"),
    ],
)
def test_disk_errors_are_explained(tmp_path, number, text):
    for block in (atomic_write, atomic_directory):
        with pytest.raises(UserError, match=text), block(tmp_path / "file"):
            raise OSError(number, os.strerror(number))


def test_a_partial_write_of_numpy_is_explained(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with (
            pytest.raises(UserError, match=r"No space left while writing .*folder .*nothing that was saved before"),
            atomic_directory(tmp_path / "folder") as folder,
            (folder / "a").open("wb") as file,
        ):
            np.ones(1000).tofile(file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_other_disk_errors_are_raised_unchanged(tmp_path):
    with pytest.raises(OSError, match="Bad file"), atomic_write(tmp_path / "file"):
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))


def test_a_folder_that_cannot_be_made_is_explained():
    with pytest.raises(UserError, match="/proc/none/file cannot be written"), atomic_write("/proc/none/file"):
        pass


def test_json_files_are_indented_utf8(tmp_path):
    write_json(tmp_path / "x.json", {"a": "ü"})
    assert (tmp_path / "x.json").read_text(encoding="utf-8") == '{\n  "a": "ü"\n}\n'


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
            refuse_path_of_other_user(path)


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
        refuse_path_of_other_user(path)


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
