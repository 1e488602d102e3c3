"""Atomic writing: complete or unchanged, private drafts, modes by the umask, errors with a name."""

import os
import stat
from pathlib import Path

import pytest

from regard.atomic_file import open_atomically, write_atomically


@pytest.mark.parametrize("content", ["Où ?\n", "Où ?\n".encode()])
def test_text_and_bytes_replace_the_file(tmp_path, content):
    path = tmp_path / "a.txt"
    path.write_text("old, and longer")
    write_atomically(path, content)
    assert path.read_bytes() == "Où ?\n".encode()
    assert os.listdir(tmp_path) == ["a.txt"]


def test_an_error_while_writing_leaves_the_old_file_and_no_draft(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def fail(file):
        file.write(b"new")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, fail)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_the_file_appears_only_when_the_block_ends(tmp_path):
    path = tmp_path / "a.txt"
    with open_atomically(path) as file:
        file.write(b"half")
        file.flush()
        assert not path.exists()
    assert path.read_bytes() == b"half"


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_the_mode_follows_the_umask(tmp_path, mask, mode):
    before = os.umask(mask)
    try:
        write_atomically(tmp_path / "a.txt", "text")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.txt").stat().st_mode) == mode


def test_a_planted_symbolic_link_is_not_followed(tmp_path, monkeypatch):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    # Even where somebody guesses the draft's name, and where the target itself is a link.
    monkeypatch.setattr("secrets.token_hex", lambda size: "guessed")
    draft = tmp_path / ".a.txt.guessed.new"
    draft.symlink_to(victim)
    with pytest.raises(FileExistsError):
        write_atomically(tmp_path / "a.txt", "new")
    monkeypatch.undo()
    target = tmp_path / "b.txt"
    target.symlink_to(victim)
    write_atomically(target, "new")
    assert victim.read_text() == "precious"
    assert target.read_text() == "new"
    assert not target.is_symlink()


def test_a_full_disk_is_reported_with_the_name_of_the_file(tmp_path):
    path = tmp_path / "a.txt"

    def fill(file):
        with open("/dev/full", "wb", buffering=0) as full:
            full.write(b"x")

    with pytest.raises(OSError, match=r"No space left on device: .*a\.txt"):
        write_atomically(path, fill)
    assert os.listdir(tmp_path) == []


def test_a_missing_folder_is_reported_with_the_name_of_the_file(tmp_path):
    path = tmp_path / "no" / "a.txt"
    with pytest.raises(FileNotFoundError) as error:
        write_atomically(path, b"")
    assert (error.value.filename, error.value.filename2) == (str(path), None)


def test_an_error_about_another_file_keeps_its_name(tmp_path):
    with pytest.raises(FileNotFoundError) as error:
        write_atomically(tmp_path / "a.txt", lambda file: Path("/no/such").open().close())
    assert error.value.filename == "/no/such"


def test_a_folder_at_the_path_is_refused_and_kept(tmp_path):
    path = tmp_path / "folder"
    path.mkdir()
    with pytest.raises(IsADirectoryError) as error:
        write_atomically(path, b"")
    assert error.value.filename == str(path)
    assert os.listdir(tmp_path) == ["folder"]


def test_the_longest_names_can_be_written(tmp_path):
    path = tmp_path / ("é" * 127)
    write_atomically(path, b"x")
    assert path.read_bytes() == b"x"


def test_content_and_folder_are_flushed_to_the_disk(tmp_path, monkeypatch):
    synced = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.fstat(fd).st_mode), real(fd)))
    write_atomically(tmp_path / "a.txt", "x")
    assert [stat.S_IFMT(mode) for mode in synced] == [stat.S_IFREG, stat.S_IFDIR]
