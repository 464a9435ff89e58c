"""What the backward pass may keep where parameters are gathered again."""

import jax
import pytest

from zerojax.adapters.regather import all_but_gathered


@pytest.mark.parametrize(
    ("operation", "shape", "kept"),
    [
        ("convert_element_type", (16, 32), False),
        ("convert_element_type", (32, 1, 16), False),  # transposed, with an axis of a scan's slice
        ("convert_element_type", (2, 8, 32), True),  # an activation of as many elements: kept wide otherwise
        ("reshape", (2, 8, 32), False),
        ("reshape", (2, 8, 31), True),
        ("tanh", (16, 32), True),
    ],
)
def test_no_copy_of_a_gathered_parameter_is_kept(operation, shape, kept):
    primitive = getattr(jax.lax, f"{operation}_p")
    assert all_but_gathered({(16, 32)})(primitive, jax.ShapeDtypeStruct(shape, "float32")) is kept
