"""Each transform against its definition, and back."""

import numpy as np
import pytest

from zerojax.weights.transforms import Heads, Joined, JoinedHeads, Same

HEADS = Heads(kv_heads=2, group=3)
WIDTH = 5  # of a head

CASES = {
    "same": (Same(), (4, 6), [(4, 6)]),
    "transposed": (Joined(), (4, 6), [(6, 4)]),
    "halves": (Joined(2), (4, 6), [(3, 4), (3, 4)]),
    "heads": (HEADS, (4, 10 * WIDTH), [(6 * WIDTH, 4), (2 * WIDTH, 4), (2 * WIDTH, 4)]),
    "biases": (HEADS, (10 * WIDTH,), [(6 * WIDTH,), (2 * WIDTH,), (2 * WIDTH,)]),
    "one tensor": (JoinedHeads(Heads(2, 1)), (4, 6 * WIDTH), [(4, 6 * WIDTH)]),
}


@pytest.mark.parametrize("transform, shape, shapes", CASES.values(), ids=CASES)
def test_shapes_and_both_ways(transform, shape, shapes):
    tensors = [np.random.default_rng(i).normal(size=s) for i, s in enumerate(shapes)]
    parameter = transform.join(tensors)
    assert parameter.shape == shape and transform.shapes(shape) == tuple(shapes)
    for got, want in zip(transform.split(parameter), tensors, strict=True):
        np.testing.assert_array_equal(got, want)


def test_heads_lie_group_by_group():
    q, k, v = (np.arange(n * WIDTH) + start for n, start in ((6, 0), (2, 100), (2, 200)))
    joined = HEADS.join([q, k, v]).reshape(2, 5, WIDTH)
    for group in range(2):
        np.testing.assert_array_equal(joined[group, :3], q.reshape(6, WIDTH)[3 * group : 3 * group + 3])
        np.testing.assert_array_equal(joined[group, 3], k.reshape(2, WIDTH)[group])
        np.testing.assert_array_equal(joined[group, 4], v.reshape(2, WIDTH)[group])
