"""The dtypes of a step: names, defaults, and what is refused."""

import jax.numpy as jnp
import pytest

from zerojax import Precision, UserError


def dtypes(precision):
    return tuple(x and x.name for x in (precision.compute, precision.reduce, precision.accumulate, precision.master))


def test_fp32_is_float32_everywhere():
    assert dtypes(Precision.of("fp32")) == ("float32", None, "float32", "float32")


def test_bf16_computes_in_bfloat16_and_keeps_a_float32_master():
    assert dtypes(Precision.of("bf16")) == ("bfloat16", None, "float32", "float32")


def test_a_precision_is_itself():
    precision = Precision(compute=jnp.bfloat16, reduce="float32")
    assert Precision.of(precision) is precision
    assert dtypes(precision) == ("bfloat16", "float32", "float32", "float32")


def test_names_and_dtypes_are_the_same():
    assert Precision(compute="bf16") == Precision(compute="bfloat16") == Precision(compute=jnp.dtype("bfloat16"))
    assert hash(Precision(compute="bf16")) == hash(Precision(compute=jnp.bfloat16))


@pytest.mark.parametrize("value", ["float8", "", None, 32, jnp.bfloat16])
def test_precisions_that_are_refused(value):
    with pytest.raises(UserError, match="precision is .*; accepted: 'fp32', 'bf16', 'fp16' or a") as error:
        Precision.of(value)
    assert repr(value) in str(error.value)


@pytest.mark.parametrize("field", ["compute", "reduce", "accumulate", "master"])
@pytest.mark.parametrize(("value", "said"), [("int8", "int8"), ("no such", "'no such'"), (jnp.complex64, "complex64")])
def test_dtypes_that_are_refused(field, value, said):
    with pytest.raises(UserError, match=rf"Precision\.{field} is {said}; accepted: a floating dtype"):
        Precision(**{field: value})


@pytest.mark.parametrize("field", ["compute", "accumulate", "master"])
def test_only_the_reduction_may_be_left_open(field):
    with pytest.raises(UserError, match=rf"Precision\.{field} is None"):
        Precision(**{field: None})
