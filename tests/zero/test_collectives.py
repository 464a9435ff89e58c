"""Collectives of compiled programs against counts and bytes worked out by hand."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax.zero.collectives import mesh_axes, read_collectives

P = PartitionSpec
ROW = Mesh(np.array(jax.devices()[:8]), ("data",))
GRID = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("replica", "data"))
H100_STEP = pathlib.Path(__file__).parent / "hlo" / "h100_step.txt"


def compiled_collectives(f, *shapes, in_specs, out_specs, mesh=ROW):
    f = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))
    return read_collectives(f.lower(*shapes).compile().as_text())


def shape(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


def summary(collectives):
    return sorted((c.kind, c.count, c.bytes_sent, c.group_size) for c in collectives)


def test_nested_scans_multiply():
    def outer_of_inner(x, shards):
        def inner(h, shard):
            return jnp.tanh(h @ jax.lax.all_gather(shard, "data", tiled=True)), None

        x, _ = jax.lax.scan(lambda h, _: (jax.lax.scan(inner, h, shards)[0], None), x, None, length=5)
        return jax.lax.psum_scatter(x, "data", tiled=True), jax.lax.psum(x.sum(), "data")

    found = compiled_collectives(
        outer_of_inner,
        shape(16, 64),
        shape(3, 64, 64),
        in_specs=(P(), P(None, "data")),
        out_specs=(P("data"), P()),
    )
    assert summary(found) == [
        ("all-gather", 5 * 3, 5 * 3 * 64 * 64 * 4 * 7 / 8, 8),
        ("all-reduce", 1, 4 * 2 * 7 / 8, 8),
        ("reduce-scatter", 1, 16 * 64 * 4 * 7 / 8, 8),
    ]
    assert [c.kind for c in found if c.tiny] == ["all-reduce"]
    assert all(not c.note and c.groups == (tuple(range(8)),) for c in found)
    gather = next(c for c in found if c.kind == "all-gather")
    assert (gather.dtype, gather.shapes) == ("f32", ((64, 64),))
    assert gather.op_name.endswith("all_gather")
    assert pathlib.Path(gather.source.rpartition(":")[0]).name == "test_collectives.py"


def test_fori_loop():
    found = compiled_collectives(
        lambda x: jax.lax.fori_loop(0, 7, lambda i, h: jax.lax.psum(h * 0.1, "data"), x),
        shape(8, 8),
        in_specs=P(),
        out_specs=P(),
    )
    assert summary(found) == [("all-reduce", 7, 7 * 8 * 8 * 4 * 2 * 7 / 8, 8)]


def test_loop_of_unknown_length_is_noted():
    def until(x, n):
        return jax.lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, jax.lax.psum(c[1] * 0.1, "data")), (0, x))[1]

    found = compiled_collectives(until, shape(8, 8), shape(dtype=jnp.int32), in_specs=(P(), P()), out_specs=P())
    assert summary(found) == [("all-reduce", 1, 8 * 8 * 4 * 2 * 7 / 8, 8)]
    assert "unknown length" in found[0].note


def test_costliest_branch_of_a_conditional():
    def twice_or_once(x, n):
        twice = lambda x: jax.lax.pmax(jax.lax.psum(x, "data") * x, "data")  # noqa: E731
        return jax.lax.cond(n > 3, twice, lambda x: jax.lax.psum(x, "data"), x)

    found = compiled_collectives(twice_or_once, shape(8, 8), shape(dtype=jnp.int32), in_specs=(P(), P()), out_specs=P())
    assert summary(found) == [("all-reduce", 1, 8 * 8 * 4 * 2 * 7 / 8, 8)] * 2
    assert all("conditional" in c.note for c in found)


def test_two_axes_have_their_group_sizes():
    def each(x):
        return (
            jax.lax.psum(x, "replica"),
            jax.lax.all_gather(x, "data", tiled=True),
            jax.lax.psum_scatter(x, ("replica", "data"), tiled=True),
            jax.lax.all_to_all(x, "data", 0, 0, tiled=True),
            jax.lax.ppermute(x, "data", [(i, (i + 1) % 4) for i in range(4)]),
        )

    both = P(("replica", "data"))
    found = compiled_collectives(each, shape(8 * 16, 8), in_specs=both, out_specs=both, mesh=GRID)
    part = 16 * 8 * 4
    assert summary(found) == [
        ("all-gather", 1, 4 * part * 3 / 4, 4),
        ("all-reduce", 1, part * 2 * 1 / 2, 2),
        ("all-to-all", 1, part * 3 / 4, 4),
        ("collective-permute", 1, part, 4),
        ("reduce-scatter", 1, part * 7 / 8, 8),
    ]
    axes = {c.kind: mesh_axes(c.groups, GRID.shape) for c in found}
    assert axes == {
        "all-gather": ("data",),
        "all-reduce": ("replica",),
        "all-to-all": ("data",),
        "collective-permute": ("data",),
        "reduce-scatter": ("replica", "data"),
    }


def test_combined_all_reduce_counts_every_operand():
    found = compiled_collectives(
        lambda x, y: jax.lax.psum((x, y, y.sum()), "data"),
        shape(100),
        shape(30, 2),
        in_specs=(P(), P()),
        out_specs=P(),
    )
    assert sum(c.bytes_sent for c in found) == pytest.approx((100 + 60 + 1) * 4 * 2 * 7 / 8)


# XLA's CPU compiler has no 16-bit floats to compute with but float16, so it widens others on the wire too.
@pytest.mark.parametrize(
    ("dtype", "sent_as", "itemsize"),
    [
        (jnp.bfloat16, "f32", 4),
        (jnp.float8_e4m3fn, "f16", 2),
        (jnp.float16, "f16", 2),
        (jnp.int8, "s8", 1),
        (jnp.uint32, "u32", 4),
        (jnp.bool_, "pred", 1),
    ],
)
def test_bytes_are_as_compiled(dtype, sent_as, itemsize):
    (found,) = compiled_collectives(
        lambda x: jax.lax.all_gather(x, "data", tiled=True),
        shape(512, 8, dtype=dtype),
        in_specs=P("data"),
        out_specs=P(),
    )
    assert (found.dtype, found.bytes_sent) == (sent_as, 512 * 8 * itemsize * 7 / 8)


def test_sharding_constraints_compile_to_all_reduce_on_cpu():
    cut = NamedSharding(ROW, P("data"))
    f = jax.jit(lambda x: x.T @ x, in_shardings=cut, out_shardings=cut)
    found = read_collectives(f.lower(shape(64, 64)).compile().as_text())
    assert summary(found) == [("all-reduce", 1, 64 * 64 * 4 * 2 * 7 / 8, 8)]


def test_asynchronous_collectives_of_a_gpu_program_count_once():
    """Worked out from the JAX program: see hlo/README.md. Its backward loop has one iteration peeled off."""
    found = read_collectives(H100_STEP.read_text())
    whole, shard, batch = 64 * 64 * 2, 3 * 64 * 16 * 2, 8 * 64 * 2
    totals = {}
    for c in found:
        count, sent = totals.get((c.kind, c.group_size), (0, 0))
        totals[c.kind, c.group_size] = count + c.count, sent + c.bytes_sent
    assert totals == {
        ("all-gather", 4): (3 + 3, 6 * whole * 3 / 4),  # forward, and again in the backward pass
        ("reduce-scatter", 4): (3, 3 * whole * 3 / 4),
        ("all-reduce", 2): (1, shard * 2 * 1 / 2),
        ("all-reduce", 8): (1, 4 * 2 * 7 / 8),
        ("collective-permute", 4): (1, batch),
        ("all-to-all", 4): (1, batch * 3 / 4),
    }
    assert {c.dtype for c in found if not c.tiny} == {"bf16"}
    assert {mesh_axes(c.groups, {"replica": 2, "data": 4}) for c in found if c.group_size == 2} == {("replica",)}


def one(instruction, *, module="num_partitions=8", operands="  %x = f32[16,4]{1,0} parameter(0)\n", before=""):
    entry = f"ENTRY %main (x: f32[16,4]) -> f32[] {{\n{operands}  ROOT %r = {instruction}\n}}\n"
    return read_collectives(f"HloModule m, {module}\n\n{before}{entry}")


@pytest.mark.parametrize(
    ("written", "groups"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("{}", (tuple(range(8)),)),
        ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("[2,4]<=[2,2,2]T(2,0,1)", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("mesh['replica'=2,'data'=4] {'data'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['replica'=2,'data'=4] {'replica'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['replica'=2,'data'=4] {'replica','data'}", (tuple(range(8)),)),
        # One resharding, as JAX 0.12 and as JAX 0.10 print its groups.
        ("mesh['x'=4,'y'=2] {'x':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['axis_0'=2,'axis_1'=4], device_ids=([2,2,2]T(0,2,1)) {'axis_1':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['x'=8] {'x':(1)4}", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("mesh['x'=2,'y'=2], device_ids=(0,3,1,2) {'y'}", ((0, 3), (1, 2))),
    ],
)
def test_forms_of_replica_groups(written, groups):
    ids = f"channel_id=1, replica_groups={written}, use_global_device_ids=true"
    (found,) = one(f"f32[16,4]{{1,0}} all-reduce(%x), {ids}, to_apply=%a")
    assert sorted(found.groups) == sorted(groups)
    n = len(groups[0])
    assert found.bytes_sent == 16 * 4 * 4 * 2 * (n - 1) / n


@pytest.mark.parametrize(
    ("instruction", "groups"),
    [
        ("all-reduce(%x), replica_groups={{0,1}}, to_apply=%a", ((0, 2), (1, 3))),  # replicas, for each partition
        ("all-reduce(%x), channel_id=1, replica_groups={{0},{1}}, to_apply=%a", ((0, 1), (2, 3))),  # all partitions
        ("all-to-all(%x), channel_id=1, replica_groups={{0,1}}, dimensions={0}", ((0, 1), (2, 3))),  # partitions
    ],
)
def test_groups_of_replicas_and_of_partitions(instruction, groups):
    (found,) = one(f"f32[16,4]{{1,0}} {instruction}", module="replica_count=2, num_partitions=2")
    assert found.groups == groups


@pytest.mark.parametrize(
    ("pairs", "groups", "bytes_sent"),
    [
        ("{{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}", ((0, 1, 2, 3), (4, 5, 6, 7)), 256),
        ("{{0,0},{1,2},{2,1},{3,3}}", ((1, 2),), 256),
        ("{{0,0},{1,1}}", (), 0),
    ],
)
def test_permutes(pairs, groups, bytes_sent):
    (found,) = one(f"f32[16,4]{{1,0}} collective-permute(%x), channel_id=1, source_target_pairs={pairs}")
    assert (found.groups, found.bytes_sent) == (groups, bytes_sent)


def test_generic_asynchronous_wrapper_counts_once():
    """As XLA writes a collective that has no start and done of its own."""
    inner = (
        "%wrapped (p: f32[16,4]) -> f32[2,4] {\n  %p = f32[16,4]{1,0} parameter(0)\n"
        "  ROOT %rs = f32[2,4]{1,0} reduce-scatter(%p), channel_id=1, replica_groups=[1,8]<=[8], "
        "use_global_device_ids=true, dimensions={0}, to_apply=%a\n}\n\n"
    )
    start = "  %s = ((f32[16,4]{1,0}), f32[2,4]{1,0}, u32[]) async-start(%x), calls=%wrapped\n"
    (found,) = one(
        "f32[2,4]{1,0} async-done(%s), calls=%wrapped",
        before=inner,
        operands="  %x = f32[16,4]{1,0} parameter(0)\n" + start,
    )
    assert (found.kind, found.count, found.bytes_sent) == ("reduce-scatter", 1, 16 * 4 * 4 * 7 / 8)


def test_groups_that_no_mesh_axes_make():
    assert mesh_axes(((0, 1, 2), (3, 4, 5)), {"replica": 2, "data": 4}) == ()
    assert mesh_axes((tuple(range(8)),), {"replica": 1, "data": 8}) == ("data",)
