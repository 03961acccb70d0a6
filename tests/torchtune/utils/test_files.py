"""Files are whole or not there."""

import errno
import os
import resource

import numpy as np
import pytest

from torchtune.utils import UserError, atomic_directory, atomic_write, write_json


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
