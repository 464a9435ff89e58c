import json

import jax
import numpy as np
import pytest

from zerojax.checkpoint import CheckpointError
from zerojax.checkpoint.manifest import (
    FILE,
    FileRecord,
    Manifest,
    check_same_model,
    encode,
    leaf_records,
    read_manifest,
)
from zerojax.errors import UserError


def records(**leaves):
    return leaf_records({name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, dtype) in leaves.items()})


MANIFEST = Manifest(
    records(w=((2, 3), np.float32), empty=((0, 4), np.int32)),
    {"position": [1, 2.5, None], "loss": float("inf"), "name": "ü"},
    {"d/0": FileRecord(10, 2**32 - 1)},
)


def test_a_manifest_comes_back_as_it_was(tmp_path):
    (tmp_path / FILE).write_text(encode(MANIFEST))
    assert read_manifest(tmp_path) == MANIFEST


def test_every_changed_byte_is_noticed(tmp_path):
    whole = encode(MANIFEST).encode()
    for position in range(0, len(whole), 7):
        changed = bytearray(whole)
        changed[position] ^= 0x01
        (tmp_path / FILE).write_bytes(changed)
        try:
            assert read_manifest(tmp_path) == MANIFEST  # white space changed
        except CheckpointError as error:
            assert str(tmp_path) in str(error)


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "null", "garbage", "[" * 100_000, '{"format": 1, "crc32": 0, "body": {}}']
)
def test_garbage_is_damage(tmp_path, text):
    (tmp_path / FILE).write_text(text)
    with pytest.raises(CheckpointError, match="damaged"):
        read_manifest(tmp_path)


def test_a_missing_manifest_is_damage(tmp_path):
    with pytest.raises(CheckpointError, match="missing"):
        read_manifest(tmp_path)


def test_a_newer_format_is_no_damage(tmp_path, monkeypatch):
    monkeypatch.setattr("zerojax.checkpoint.manifest.FORMAT", 2)
    text = encode(MANIFEST)
    monkeypatch.undo()
    assert json.loads(text)["format"] == 2
    (tmp_path / FILE).write_text(text)
    with pytest.raises(UserError, match="format, 2, is newer"):
        read_manifest(tmp_path)


def test_another_model_is_told_by_what_differs(tmp_path):
    stored = records(a=((2,), np.float32), b=((2,), np.float32), c=((2,), np.int32))
    wanted = records(b=((3,), np.float32), c=((2,), np.float32), d=((1,), np.float32))
    with pytest.raises(UserError) as caught:
        check_same_model(tmp_path, stored, wanted)
    message = str(caught.value)
    for part in (
        "d is not in the checkpoint",
        "a is in the checkpoint only",
        "b has shape (2,) in the checkpoint, (3,) here",
        "c is int32 in the checkpoint, float32 here",
    ):
        assert part in message
    assert "\n" not in message


def test_a_long_list_of_differences_is_cut(tmp_path):
    with pytest.raises(UserError, match="and 92 more"):
        check_same_model(tmp_path, {}, records(**{f"w{i}": ((1,), np.float32) for i in range(100)}))
