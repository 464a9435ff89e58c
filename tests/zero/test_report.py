"""The report of a small step whose every figure is worked out by hand."""

import dataclasses
import functools
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import zerojax
from tests.zero import gpt
from zerojax import Zero
from zerojax.precision import Precision
from zerojax.zero.report import LeafNote, make_report

P = PartitionSpec
MESH = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("replica", "data"))
ROWS, COLUMNS = 62, 32  # 62 is stored as 64: the 4 shards do not divide it
NOTE = LeafNote("params/w", (ROWS, COLUMNS), ROWS * COLUMNS * 4, "padded from 62 to 64 along its dimension 0")


def sharded_state():
    """A weight with Adam's moments, cut over 4 of 8 devices, and what Adam and the step count."""
    cut, whole = NamedSharding(MESH, P("data")), NamedSharding(MESH, P())
    leaf = lambda rows, sharding: jax.ShapeDtypeStruct((rows, COLUMNS), jnp.float32, sharding=sharding)  # noqa: E731
    scalar = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)
    key = jax.ShapeDtypeStruct((2,), jnp.uint32, sharding=whole)
    rest = dict(frozen={}, variables={}, rng=key, step=scalar, loss_scale=None)
    fields = lambda w: dict(params={"w": w}, opt_state=(w, w, scalar), **rest)
    layout = types.SimpleNamespace(logical=fields(leaf(ROWS, None)))
    return types.SimpleNamespace(**fields(leaf(64, cut)), layout=layout)


def compiled_step(dtype=jnp.float32):
    def local(w, x):
        whole = jax.lax.all_gather(w.astype(dtype), "data", tiled=True)
        gradient = jax.lax.psum_scatter(whole * x.sum().astype(dtype), "data", tiled=True)
        return w - jax.lax.psum(gradient.astype(w.dtype), "replica"), jax.lax.pmean(x.sum(), ("replica", "data"))

    batch = P(("replica", "data"))
    step = jax.shard_map(local, mesh=MESH, in_specs=(P("data"), batch), out_specs=(P("data"), P()), check_vma=False)
    shapes = (
        jax.ShapeDtypeStruct((64, COLUMNS), jnp.float32, sharding=NamedSharding(MESH, P("data"))),
        jax.ShapeDtypeStruct((64,), jnp.float32, sharding=NamedSharding(MESH, batch)),
    )
    return jax.jit(step, donate_argnums=0).lower(*shapes).compile()


@pytest.fixture(scope="module")
def report():
    return make_report(
        compiled=compiled_step(),
        state=sharded_state(),
        mesh=MESH,
        stage=2,
        precision=Precision.of("fp32"),
        notes=[NOTE],
    )


def test_memory_is_that_of_the_shards(report):
    whole, stored = ROWS * COLUMNS * 4, 64 * COLUMNS * 4
    assert report.n_parameters == ROWS * COLUMNS
    assert (report.parameters.bytes, report.parameters.expected) == (stored / 4, whole / 4)
    assert (report.optimizer.bytes, report.optimizer.expected) == (2 * stored / 4 + 4, (2 * whole + 4) / 4)
    assert report.other.bytes == 4 + 2 * 4
    assert report.state.bytes == 3 * stored / 4 + 4 + 4 + 8
    assert (report.gradients.bytes, report.gradients.expected) == (None, whole / 4)
    assert report.model_states.expected == pytest.approx(whole + whole / 4 + 3 * whole / 4 + 1)
    assert report.model_states.formula == "4P + 4P/N + 4P/N + 8P/N"


def test_compiled_memory(report):
    assert report.arguments == 64 * COLUMNS * 4 / 4 + 64 / 8 * 4
    assert report.aliased == 64 * COLUMNS * 4 / 4
    assert report.outputs >= report.aliased + 4
    assert report.temporaries >= 64 * COLUMNS * 4  # the gathered weight
    assert report.peak == report.arguments + report.temporaries + report.outputs - report.aliased


def test_traffic(report):
    stored, p = 64 * COLUMNS * 4, ROWS * COLUMNS * 4
    assert (report.gather.bytes, report.gather.expected) == (stored * 3 / 4, p * 3 / 4)
    # the reduce-scatter over 4, the ring of 2 replicas on the shard, and the loss over 8
    assert report.reduce.bytes == stored * 3 / 4 + 2 * 1 / 2 * stored / 4 + 4 * 2 * 7 / 8
    assert report.reduce.expected == p * 3 / 4 + 2 * 1 / 2 * p / 4
    assert report.sent.bytes == report.gather.bytes + report.reduce.bytes
    assert report.sent.expected == report.gather.expected + report.reduce.expected
    assert report.sent.formula == "1.750 x P in float32"


def test_as_dict_is_json(report):
    data = json.loads(json.dumps(report.as_dict()))
    assert data == report.as_dict()
    assert data["mesh"] == {"replica": 2, "data": 4}
    assert data["state"]["bytes"] == report.state.bytes
    assert data["peak"] == report.peak
    assert {(c["kind"], tuple(c["axes"])) for c in data["collectives"]} == {
        ("all-gather", ("data",)),
        ("reduce-scatter", ("data",)),
        ("all-reduce", ("replica",)),
        ("all-reduce", ("replica", "data")),
    }
    assert data["notes"] == [dict(path="params/w", shape=[62, 32], bytes=7936, note=NOTE.note)]


def test_table_is_aligned_and_names_everything(report):
    text = str(report)
    lines = text.splitlines()
    assert "stage 2 on 8 devices (replica 2 x data 4), P = 1,984 parameters" in lines[0]
    assert "10^9" in text
    rows = {line.split("  ")[0]: line for line in lines}
    assert "2.05 kB" in rows["master parameters"] and "4P/N" in rows["master parameters"]
    assert "1.98 kB" in rows["master parameters"] and "1.032" in rows["master parameters"]  # 64 / 62
    assert "6.14 kB" in rows["all-gather"] and "data" in rows["all-gather"]
    assert "7 B" in rows["tiny ones"]
    assert NOTE.note in rows["params/w"] and "62x32" in rows["params/w"]
    for start in (i for i, line in enumerate(lines) if line.startswith("---")):
        header, rule = lines[start - 1], lines[start]
        assert len(header) <= len(rule)
        block = lines[start + 1 : lines.index("", start)] if "" in lines[start:] else lines[start + 1 :]
        gaps = [i for i in range(len(rule)) if rule[i : i + 2] == "  "]
        assert block and all(line[i : i + 2].strip() == "" for line in block for i in gaps)
        assert all(line == line.rstrip() for line in block)


def test_cpu_says_that_it_widens_bf16():
    """Twice ZeRO's bytes for a bf16 program on the CPU, and the report says why."""
    report = make_report(
        compiled=compiled_step(jnp.bfloat16), state=sharded_state(), mesh=MESH, stage=2, precision=Precision.of("bf16")
    )
    assert report.gather.bytes / report.gather.expected == pytest.approx(2 * 64 / 62)
    assert "widens bfloat16" in str(report)


def test_stage_0_stores_the_whole():
    whole = NamedSharding(MESH, P())
    state = sharded_state()
    on_all = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole)  # noqa: E731
    state.params, state.opt_state = jax.tree.map(
        on_all, (state.layout.logical["params"], state.layout.logical["opt_state"])
    )
    report = make_report(
        compiled=compiled_step(), state=state, mesh=MESH, stage=0, precision=Precision.of("bf16"), micro_batches=4
    )
    assert report.parameters.bytes == report.parameters.expected == ROWS * COLUMNS * 4
    assert report.optimizer.bytes == report.optimizer.expected == 2 * ROWS * COLUMNS * 4 + 4
    assert report.model_states.formula == "2P + 4P + 4P + 8P"
    assert report.gather.expected == 0
    assert report.reduce.expected == 2 * 7 / 8 * ROWS * COLUMNS * 4  # the accumulated sum, in fp32
    assert "4 micro-batches" in str(report)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("micro_batches", "precision", "itemsize"), [(1, "fp32", 4), (4, "fp32", 4), (1, "bf16", 2)])
def test_activations_of_an_mlp(stage, micro_batches, precision, itemsize):
    """A sine keeps its cosine, a product its input, a square its doubled argument; batch and weights do not count."""
    rows, dims = 16, (24, 40, 56, 8)  # no two arrays are of one size

    def make_model(key):
        return [jax.random.normal(key, shape) for shape in zip(dims, dims[1:], strict=False)]

    def loss_fn(weights, batch, rng):
        h = batch.astype(weights[0].dtype)
        for w in weights[:-1]:
            h = jnp.sin(h @ w)
        return jnp.mean((h @ weights[-1]) ** 2)

    zero = Zero(stage=stage, precision=precision, micro_batches=micro_batches, min_shard_size=64)
    state = zero.abstract_state(make_model, optax.sgd(0.1))
    step = zero.train_step(loss_fn)
    of_a_row = 2 * dims[1] + 2 * dims[2] + dims[3]
    batch = jax.ShapeDtypeStruct((8 * rows, dims[0]), jnp.float32)
    assert step.activations(state, batch) == rows // micro_batches * of_a_row * itemsize


def activations_of_a_gpt(remat, rows, vocab):
    """Bytes that the backward pass reads of a GPT's forward pass on `rows` rows, by hand, in fp32 and int32.

    A layer normalisation keeps what it normalised, before its scale, and the inverse of the deviation; a linear layer
    its input; the GELU its argument. Attention goes over the queries in four quarters, of which each keeps its queries,
    the keys and values up to them, the weights before and after the division, and what they were divided by and shifted
    by.
    """
    tokens, dim, heads, layers = rows * gpt.LENGTH, gpt.DIM, gpt.HEADS, gpt.LAYERS
    norm = tokens * dim + tokens
    # Indices into the embedding, the last norm and its result, logits, targets, their normalisers and weights; a flag.
    head = 4 * (tokens + norm + tokens * dim + tokens * vocab + 3 * tokens) + 1
    if remat:
        return 4 * layers * tokens * dim + head  # each layer's input
    quarter = gpt.LENGTH // 4
    keys = [quarter, 2 * quarter, 3 * quarter, 4 * quarter]
    weights = sum(rows * heads * quarter * n for n in keys)
    attention = tokens * dim + sum(2 * rows * n * dim for n in keys) + 2 * weights + 2 * 4 * rows * heads * quarter
    layer = 2 * (norm + tokens * dim) + tokens * dim + 2 * tokens * 4 * dim + attention
    masks = weights + 4 * weights  # booleans and what stands in the place of hidden weights, the same in all layers
    return 4 * layers * layer + masks + head


@pytest.mark.parametrize(("stage", "remat"), [(1, True), (3, True), (1, False)])
def test_activations_of_a_gpt(stage, remat):
    vocab = 520  # logits of another size than the embedding, by which stage 3 would know it
    zero = Zero(stage=stage, mesh=zerojax.make_mesh())
    state = zero.abstract_state(functools.partial(gpt.make_gpt, vocab_size=vocab, remat=remat), optax.adamw(1e-3))
    found = zero.train_step(gpt.next_token_loss).activations(state, gpt.BATCH_SHAPE)
    assert found == activations_of_a_gpt(remat, gpt.BATCH // 8, vocab)


def test_activations_and_the_largest_buffers_are_in_the_report():
    report = gpt.report(3)
    data = json.loads(json.dumps(report.as_dict()))
    assert report.activations == activations_of_a_gpt(True, gpt.BATCH // 8, gpt.VOCAB)
    assert data["activations"] == report.activations
    assert len(report.buffers) == len(data["buffers"]) == 5
    assert data["buffers"][0] == json.loads(json.dumps(dataclasses.asdict(report.buffers[0])))
    assert [b.bytes for b in report.buffers] == sorted((b.bytes for b in report.buffers), reverse=True)
    (row,) = [line for line in str(report).splitlines() if line.startswith("activations kept")]
    assert "2.10 MB" in row
    for b in report.buffers:
        rows = [line for line in str(report).splitlines() if line.startswith(f"{b.name}  ")]
        assert any(b.source in row and b.phase in row and f"[{','.join(map(str, b.shape))}]" in row for row in rows)
        assert b.source.startswith("zerojax/models/")
