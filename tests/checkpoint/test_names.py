from typing import NamedTuple

import jax
import pytest

from zerojax.checkpoint.names import named_leaves
from zerojax.errors import UserError


class Moments(NamedTuple):
    mu: dict
    nu: dict


def test_names_of_every_kind_of_entry():
    tree = {"opt": (Moments({"w": 1}, {"w": 2}), 3), "by depth": {0: 4, 10: 5}, "pairs": {("a", 1): 6}}
    assert named_leaves(tree) == {
        "by%20depth/[0]": 4,
        "by%20depth/[10]": 5,
        "opt/[0]/mu/w": 1,
        "opt/[0]/nu/w": 2,
        "opt/[1]": 3,
        "pairs/(%28%27a%27%2C%201%29)": 6,
    }


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a.b": 0}, {"a": {"b": 0}}),
        ({"a/b": 0}, {"a": {"b": 0}}),
        ({"[0]": 0}, {0: 0}),
        ({"a%2Fb": 0}, {"a/b": 0}),
        ({"0": 0}, {0: 0}),
        ({(1, 2): 0}, {"(1, 2)": 0}),
    ],
)
def test_what_looks_alike_is_named_apart(one, other):
    assert named_leaves(one).keys() != named_leaves(other).keys()


def test_two_leaves_of_one_name_are_an_error():
    class Odd:
        pass

    jax.tree_util.register_pytree_with_keys(
        Odd,
        lambda _: (((jax.tree_util.DictKey("x"), 1), (jax.tree_util.GetAttrKey("x"), 2)), None),
        lambda _, children: Odd(),
    )
    with pytest.raises(UserError, match="the name 'x'"):
        named_leaves(Odd())
