"""Meshes: the order of devices, and what is refused."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from zerojax import UserError, make_mesh
from zerojax.mesh import as_zero_mesh, data_axes, data_parallel_size


def ids(mesh):
    return np.vectorize(lambda device: device.id)(mesh.devices)


def test_one_data_axis_by_default():
    mesh = make_mesh()
    assert dict(mesh.shape) == {"data": 8}
    assert mesh.axis_types == (AxisType.Auto,)
    np.testing.assert_array_equal(ids(mesh), np.arange(8))


def test_neighbouring_devices_hold_one_copy():
    np.testing.assert_array_equal(ids(make_mesh(replica=2)), [[0, 1, 2, 3], [4, 5, 6, 7]])


def test_model_axes_vary_fastest():
    mesh = make_mesh(replica=2, model=2)
    assert mesh.axis_names == ("replica", "data", "model")
    np.testing.assert_array_equal(ids(mesh), np.arange(8).reshape(2, 2, 2))


def test_chosen_devices_in_their_order():
    chosen = jax.devices()[6:3:-1]
    assert ids(make_mesh(devices=chosen)).tolist() == [6, 5, 4]


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        (dict(data=3), "data 3 does not make 8 devices"),
        (dict(replica=3), r"replica 3 x data \* does not make 8 devices"),
        (dict(data=4, model=4), "data 4 x model 4 does not make 8 devices"),
        (dict(replica=0), "'replica' has size 0; accepted: a positive integer"),
        (dict(data=-2), "'data' has size -2; accepted: a positive integer, or -1"),
        (dict(model=-1), "'model' has size -1; accepted: a positive integer"),
        (dict(data=4.0), "'data' has size 4.0"),
        (dict(replica=True), "'replica' has size True"),
        (dict(devices=[]), "does not make 0 devices"),
    ],
)
def test_sizes_that_are_refused(sizes, said):
    with pytest.raises(UserError, match=said) as error:
        make_mesh(**sizes)
    assert "accepted:" in str(error.value) and "\n" not in str(error.value)


def test_a_mesh_of_explicit_axes_is_taken_with_automatic_ones():
    mesh = as_zero_mesh(jax.make_mesh((2, 4), ("replica", "data"), axis_types=(AxisType.Explicit,) * 2))
    assert mesh.axis_types == (AxisType.Auto,) * 2


def test_a_mesh_needs_a_data_axis():
    with pytest.raises(UserError, match=r"axes \('x',\); accepted: one named 'data'"):
        as_zero_mesh(Mesh(np.array(jax.devices()), ("x",)))


def test_a_mesh_has_to_be_one():
    with pytest.raises(UserError, match="mesh is 8; accepted: a jax.sharding.Mesh"):
        as_zero_mesh(8)


def test_a_batch_is_split_over_data_and_replica_only():
    mesh = make_mesh(replica=2, model=2)
    assert data_axes(mesh) == ("replica", "data")
    assert data_parallel_size(mesh) == 4
