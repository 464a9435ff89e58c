"""Files that are whole at every moment."""

import resource
from contextlib import contextmanager

import pytest

from zerojax.errors import RunError
from zerojax.monitor.files import AppendedFile, replace_text


@contextmanager
def largest_file(size):
    """No file can grow beyond `size` bytes, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_is_appended_is_there_at_once(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"before ")
    file = AppendedFile(path)
    file.write(b"after")
    assert path.read_bytes() == b"before after"
    file.close()


def test_a_full_disk_is_one_line_and_closing_says_nothing_more(tmp_path):
    file = AppendedFile(tmp_path / "log")
    with largest_file(10):
        file.write(b"12345678")
        with pytest.raises(RunError) as error:
            file.write(b"12345678")
    assert str(error.value) == f"cannot write {tmp_path}/log: File too large"
    file.close()


def test_a_file_that_cannot_be_replaced_stays(tmp_path):
    path = tmp_path / "config.gin"
    replace_text(path, "one")
    with largest_file(10), pytest.raises(RunError, match="cannot write .*config.gin: File too large"):
        replace_text(path, "two" * 100)
    assert path.read_text() == "one"
    replace_text(path, "three")
    assert path.read_text() == "three"
    assert [found.name for found in tmp_path.iterdir()] == ["config.gin"]


def test_a_directory_that_is_not_there(tmp_path):
    with pytest.raises(RunError, match="cannot write .*/gone/log: No such file or directory"):
        AppendedFile(tmp_path / "gone" / "log")
