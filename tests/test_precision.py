"""The dtypes of a step: names, defaults, and what is refused."""

import jax
import jax.numpy as jnp
import pytest

from zerojax import LossScale, Precision, UserError, Zero


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


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("bf16,reduce=float32", Precision(compute="bfloat16", reduce="float32")),
        ("fp16, accumulate=fp16", Precision(compute="float16", accumulate="float16", loss_scale=LossScale())),
        ("compute=fp16", Precision(compute="float16")),
        ("master=bf16,compute=bf16,accumulate=float32", Precision(compute="bfloat16", master="bfloat16")),
        ("bf16,compute=float16", Precision(compute="float16")),
    ],
)
def test_places_may_be_named_one_by_one(text, same):
    assert Precision.of(text) == same == Zero(precision=text).policy


@pytest.mark.parametrize("value", ["float8", "", None, 32, jnp.bfloat16])
def test_precisions_that_are_refused(value):
    with pytest.raises(UserError, match="precision is .*; accepted: 'fp32', 'bf16', 'fp16', PLACE=DTYPE of") as error:
        Precision.of(value)
    assert repr(value) in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "bf16,output=float32",
            "precision is 'bf16,output=float32': 'output=float32'; accepted: .* of master, compute, ",
        ),
        ("bf16,fp16", "'fp16'; accepted: 'fp32'"),
        ("reduce=fp32,bf16", "'bf16'; accepted"),
        ("compute=bf16,compute=fp32", "'compute=fp32'; accepted: .* once each"),
        ("bf16,", "''; accepted"),
        ("bf16,reduce=int8", "Precision.reduce is int8; accepted: 'float32', 'bfloat16', 'float16'$"),
        ("bf16,reduce=", "Precision.reduce is ''; accepted: 'float32'"),
    ],
)
def test_places_that_are_refused(text, said):
    with pytest.raises(UserError, match=said):
        Precision.of(text)


WRONG_DTYPES = [
    ("int8", "int8"),
    ("no such", "'no such'"),
    (jnp.complex64, "complex64"),
    ("float8_e4m3fn", "float8_e4m3fn"),  # no other dtype may be mixed with it
    ("float64", "float64"),  # which JAX would make float32
]


@pytest.mark.parametrize("field", ["compute", "reduce", "accumulate", "master"])
@pytest.mark.parametrize(("value", "said"), WRONG_DTYPES)
def test_dtypes_that_are_refused(field, value, said):
    with pytest.raises(UserError, match=rf"Precision\.{field} is {said}; accepted: 'float32', 'bfloat16', 'float16'$"):
        Precision(**{field: value})


def test_float64_is_accepted_where_jax_has_it():
    with jax.enable_x64(True):
        assert Precision(compute="float64", keep="*norm*").compute_of("norm/scale") == jnp.float64


@pytest.mark.parametrize("field", ["compute", "accumulate", "master"])
def test_only_the_reduction_may_be_left_open(field):
    with pytest.raises(UserError, match=rf"Precision\.{field} is None"):
        Precision(**{field: None})


def test_patterns_choose_what_is_seen_in_float32():
    precision = Precision(compute="bf16", keep=["*router/kernel", "head*"])
    assert precision.keep == ("*router/kernel", "head*") and hash(precision)
    wide = [
        path
        for path in ("blocks/router/kernel", "blocks/router/bias", "head")
        if precision.compute_of(path).itemsize > 2
    ]
    assert wide == ["blocks/router/kernel", "head"]
    assert Precision(keep="head").keep == ("head",)
    with pytest.raises(UserError, match="Precision.keep is 3; accepted: a pattern such as"):
        Precision(keep=3)


def test_norms_are_kept_unless_told_otherwise():
    dtype = lambda **settings: Precision(**settings).compute_of("norm/scale", in_norm=True).name
    assert dtype(compute="bf16") == "float32" and dtype(compute="bf16", keep_norms=False) == "bfloat16"
    with pytest.raises(UserError, match="Precision.keep_norms is 1; accepted: True or False"):
        Precision(keep_norms=1)
