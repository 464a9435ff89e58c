import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoint_child import abstract, check, mesh_of, on, state, value
from jax.sharding import PartitionSpec as P

import zerojax.checkpoint
from zerojax.checkpoint import CheckpointError
from zerojax.checkpoint.loading import load
from zerojax.checkpoint.saving import start_save
from zerojax.errors import UserError

# Leaves of every kind: numpy values, and how each is cut.
VALUES = {
    "matrix": (value("matrix", (16, 8)), P("data")),
    "columns": (value("columns", (3, 16)), P(None, "data")),
    "a.b": (value("a.b", (8,)), P("data")),
    "a": {"b": (value("a/b", (8,)), P("data"))},
    "a/b": (value("third", (8,)), P()),
    "layers": [(value("0", (5,)), P()), (value("1", (5,)), P())],
    "by_depth": {0: (value("d0", (2,)), P()), 1: (value("d1", (2,)), P())},
    "empty": (np.zeros((0, 8), np.float32), P(None, "data")),
    "half": (value("half", (8, 2)).astype(ml_dtypes.bfloat16), P("data")),
    "rng": (np.array([1, 2**32 - 1], np.uint32), P()),
    "flags": (np.array([True, False]), P()),
    "count": (np.int32(2**31 - 1), P()),
    "scale": (np.float32(0.1), P()),
}
LEAF = {"is_leaf": lambda x: isinstance(x, tuple)}


def tree_on(count):
    return jax.tree.map(lambda leaf: on(mesh_of(count), np.asarray(leaf[0]), leaf[1]), VALUES, **LEAF)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "checkpoint"
    tree = tree_on(8)
    start_save(path, tree, tree, {"row": 7}).wait()
    return path


@pytest.mark.parametrize("count", [8, 4, 1])
def test_restored_on_another_mesh_every_leaf_is_the_same(saved, count):
    wanted = tree_on(count)
    restored, extra = load(saved, abstract(wanted), wanted)
    assert extra == {"row": 7}
    assert jax.tree.structure(restored) == jax.tree.structure(wanted)
    for array, leaf, expected in zip(
        jax.tree.leaves(restored), jax.tree.leaves(wanted), jax.tree.leaves(VALUES, **LEAF), strict=True
    ):
        assert array.dtype == expected[0].dtype
        assert array.sharding == leaf.sharding
        np.testing.assert_array_equal(np.asarray(array), expected[0])


@pytest.mark.parametrize(("before", "after"), [(8, 8), (8, 4), (8, 3), (3, 8), (4, 1), (1, 8)])
def test_padding_follows_the_mesh(tmp_path, before, after):
    # 10 rows in storage of 16, 12, 12, 12 and 10: only the 10 mean anything, the rest is zeros
    there = state(mesh_of(before), 5)
    start_save(tmp_path / "c", there, there.layout.logical, {}).wait()
    here = state(mesh_of(after), 0)
    restored, _ = load(tmp_path / "c", abstract(here), here.layout.logical)
    assert restored.params["w"].shape == here.params["w"].shape
    check(restored, 5)


def test_typed_keys_come_back_as_keys(tmp_path):
    tree = {name: jax.random.key(3, impl=name) for name in ("threefry2x32", "rbg")}
    start_save(tmp_path / "c", tree, tree, {}).wait()
    restored, _ = load(tmp_path / "c", abstract(tree), tree)
    for name, key in tree.items():
        assert restored[name].dtype == key.dtype
        np.testing.assert_array_equal(jax.random.key_data(restored[name]), jax.random.key_data(key))


def test_a_dtype_is_never_cast(tmp_path):
    saved = {"count": jnp.arange(4, dtype=jnp.int32)}
    start_save(tmp_path / "c", saved, saved, {}).wait()
    wanted = {"count": jnp.zeros(4, jnp.float32)}
    with pytest.raises(UserError, match="count is int32 in the checkpoint, float32 here"):
        load(tmp_path / "c", abstract(wanted), wanted)


def test_another_model_is_refused(saved):
    wanted = tree_on(8)
    wanted["more"] = wanted.pop("rng")
    with pytest.raises(UserError, match="more is not in the checkpoint; rng is in the checkpoint only"):
        load(saved, abstract(wanted), wanted)


class FakeZero:
    """Stands for a Zero: the abstract state of the mesh it was made with."""

    def __init__(self, count):
        self.count = count

    def abstract_state(self, make_model, optimizer):
        template = state(mesh_of(self.count), 0)
        return abstract(template)


def test_save_and_restore_one_directory(tmp_path):
    path = tmp_path / "runs" / "one"
    zerojax.checkpoint.save(path, state(mesh_of(8), 3), extra={"position": {"shard": 2}})
    check(zerojax.checkpoint.restore(path, FakeZero(4), None, None), 3)
    assert zerojax.checkpoint.load_extra(path) == {"position": {"shard": 2}}
    assert [entry.name for entry in path.parent.iterdir()] == ["one"]


def test_an_empty_directory_may_be_saved_into(tmp_path):
    zerojax.checkpoint.save(tmp_path, state(mesh_of(8), 3))
    check(zerojax.checkpoint.restore(str(tmp_path), FakeZero(1), None, None), 3)


def test_nothing_is_written_over(tmp_path):
    path = tmp_path / "c"
    zerojax.checkpoint.save(path, state(mesh_of(8), 3))
    with pytest.raises(UserError, match="exists already"):
        zerojax.checkpoint.save(path, state(mesh_of(8), 4))
    check(zerojax.checkpoint.restore(path, FakeZero(8), None, None), 3)
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(UserError, match="exists already"):
        zerojax.checkpoint.save(file, state(mesh_of(8), 4))


def test_restoring_from_nothing(tmp_path):
    with pytest.raises(UserError, match="no such directory"):
        zerojax.checkpoint.restore(tmp_path / "absent", FakeZero(8), None, None)
    with pytest.raises(CheckpointError, match="manifest.json is missing"):
        zerojax.checkpoint.restore(tmp_path, FakeZero(8), None, None)


@pytest.mark.parametrize("extra", [{"a": np.float32(1)}, {1: 2}, {"a": {1: 2}}, {"a": [object()]}, {"a": {1, 2}}])
def test_extra_has_to_be_json(tmp_path, extra):
    with pytest.raises(UserError, match="is not JSON"):
        zerojax.checkpoint.save(tmp_path / "c", state(mesh_of(8), 3), extra=extra)


def test_a_leaf_that_is_no_array_is_named(tmp_path):
    tree = {"a": {"b": np.zeros(3)}}
    with pytest.raises(UserError, match="leaf a/b of the state is a ndarray"):
        start_save(tmp_path / "c", tree, tree, {})
