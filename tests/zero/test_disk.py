"""State in files between steps: what is computed, what is on the disk and in memory, and what can go wrong."""

import contextlib
import gc
import resource
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax
from tests import runs
from tests.zero.test_offload import (
    BATCHES,
    LARGE_BYTES,
    LAYERS,
    PADDING,
    WIDTH,
    loss_fn,
    make_model,
    on_the_device,
    optimizer,
    same,
    settings,
    train,
)
from zerojax import UserError, Zero, optim
from zerojax.errors import RunError
from zerojax.models.gpt import GPT
from zerojax.weights import load_weights, save_weights
from zerojax.zero.disk import DiskArray, OnDisk


def on_disk(path, **changes):
    return settings(**({"stage": 3, "offload": "optimizer", "offload_path": path} | changes))


@pytest.fixture
def files(tmp_path):
    """Settings whose optimizer state lies in files."""
    return lambda **changes: on_disk(**({"path": tmp_path} | changes))


def in_files(state):
    return [x for x in jax.tree.leaves(state.opt_state) if isinstance(x, DiskArray)]


def contents(state):
    return [file.read_bytes() for x in in_files(state) for file in x.files]


def left(path):
    gc.collect()
    return sorted(path.iterdir())


# --- what is computed


def exact_model(key):
    return {f"{i}": jnp.round(8 * jax.random.normal(jax.random.fold_in(key, i), (30, 16 + 2 * i))) for i in range(4)}


def linear(model, batch, rng):
    """Gradients and, with the optimizers below, moments and updates are exact in float32: a compiler that joins or
    reorders operations, as it may differently in the parts of a program, has nothing to round differently."""
    rows = jnp.mean(batch, axis=0)
    return sum(jnp.sum(w * rows[:, None]) for w in model.values())


EXACT = [np.random.default_rng(i).integers(-8, 8, size=(16, 30)).astype(np.float32) for i in range(4)]
exact_sgd = lambda: optax.sgd(2**-6, momentum=0.5)
SPLIT = {"sgd": exact_sgd, "one turn": lambda: optax.MultiSteps(exact_sgd(), 2)}


@pytest.mark.parametrize(("stage", "name"), [*((stage, "sgd") for stage in range(4)), (3, "one turn")])
def test_training_is_the_same_bit_for_bit(stage, name, files):
    run = lambda zero: train(zero, batches=EXACT, make=exact_model, loss=linear, tx=SPLIT[name]())
    changes = dict(stage=stage, micro_batches=2 - stage % 2, clip_norm=None)
    zero = files(**changes)
    state, history = run(zero)
    assert in_files(state)
    same(state, history, jax.device_get(jax.tree.leaves(run(settings(**changes)))))


@pytest.mark.parametrize("stage", [0, 3])
def test_adamw_differs_by_the_compiler_s_rounding_alone(stage, files):
    """Five steps with a schedule, two micro-batches and clipping that acts."""
    found = jax.device_get(jax.tree.leaves(train(files(stage=stage))))
    for a, b in zip(found, on_the_device(stage), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def test_an_update_s_turns(files):
    """A turn is a parameter's leaves; one that ties all leaves together is a single turn."""
    count = {}
    for name, make in SPLIT.items():
        zero = files()
        state, step = zero.init(exact_model, make()), zero.train_step(linear)
        step(state, EXACT[0])
        count[name] = len(step.turns[state.layout])
    assert count == {"sgd": 4, "one turn": 1}


def test_parameters_in_host_memory_beside_it(files):
    state, _ = train(files(offload=("optimizer", "params"), trainable=lambda path, x: "bias" not in path))
    assert {x.sharding.memory_kind for x in jax.tree.leaves((state.params, state.frozen)) if x.size > 64} == {
        "pinned_host"
    }
    plain, _ = train(settings(stage=3, trainable=lambda path, x: "bias" not in path))
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def test_a_step_that_overflows_writes_nothing(files):
    zero = files(precision="fp16")
    state, step = zero.init(make_model, optimizer()), zero.train_step(loss_fn)
    state, _ = step(state, BATCHES[0])
    before, params = contents(state), jax.device_get(state.params)
    times = [file.stat().st_mtime_ns for x in in_files(state) for file in x.files]
    state, metrics = step(state, jnp.full((32, WIDTH), jnp.inf))
    assert (metrics["skipped"], metrics["step"], state.loss_scale.skipped) == (1, 1, 1)
    assert contents(state) == before
    assert [file.stat().st_mtime_ns for x in in_files(state) for file in x.files] == times
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), params)
    state, metrics = step(state, BATCHES[1])
    assert metrics["step"] == 2 and contents(state) != before


def test_two_states_at_once(files):
    zero = files(clip_norm=None, micro_batches=1)
    run = lambda batches: train(zero, batches=batches, make=exact_model, loss=linear, tx=exact_sgd())[0]
    states, step = [zero.init(exact_model, exact_sgd()) for _ in range(2)], zero.train_step(linear)
    for i in range(2):
        for n in range(2):
            states[n], _ = step(states[n], EXACT[2 * n + i])
    for state, expected in zip(states, (run(EXACT[:2]), run(EXACT[2:])), strict=True):
        jax.tree.map(np.testing.assert_array_equal, *jax.device_get((state.opt_state, expected.opt_state)))


def test_evaluating_gathering_and_verifying(files):
    state = files().init(make_model, optimizer())
    plain = settings(stage=3).init(make_model, optimizer())
    look = lambda zero, state: (zero.eval_step(loss_fn)(state, BATCHES[0]), zero.gather(state))
    jax.tree.map(np.testing.assert_array_equal, look(files(), state), look(settings(stage=3), plain))
    assert files(micro_batches=1).verify(make_model, optimizer(), loss_fn, BATCHES[0]).ok


def test_loading_weights_begins_the_optimizer_anew(tmp_path):
    make = lambda key: GPT(vocab_size=32, dim=16, layers=1, heads=2, max_length=8, rngs=nnx.Rngs(key))
    precision = zerojax.Precision(compute="bfloat16", master="bfloat16")
    zero = Zero(min_shard_size=16, precision=precision, offload="optimizer", offload_path=tmp_path / "files")
    tx = optim.master_weights(optax.adamw(1e-2))
    first = zero.init(make, tx, seed=1)
    save_weights(tmp_path / "weights", first, "gpt2")
    second = load_weights(tmp_path / "weights", zero.init(make, tx, seed=2), "gpt2")
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get((second.opt_state, first.opt_state)))


# --- on the disk


@pytest.mark.parametrize("stage", [0, 3])
def test_what_is_in_the_files(stage, files, tmp_path):
    """Both moments of each large leaf, once for each process; on several devices with the padding of their shards."""
    zero = files(stage=stage)
    assert {type(x) for x in jax.tree.leaves(zero.abstract_state(make_model, optimizer()).opt_state)} == {
        OnDisk,
        jax.ShapeDtypeStruct,
    }
    assert left(tmp_path) == []
    state = zero.init(make_model, optimizer())
    assert set(b"".join(contents(state))) == {0}
    (directory,) = left(tmp_path)
    step = zero.train_step(loss_fn)
    for _ in range(2):
        held = sum(file.stat().st_size for file in directory.iterdir())
        assert held == 2 * (LARGE_BYTES + (PADDING if stage else 0))
        assert len(list(directory.iterdir())) == 2 * 4 * (8 if stage else 1)
        state, _ = step(state, BATCHES[0])
    array = state.opt_state[0].mu["layers"]["up"]
    assert array.shape == (LAYERS, WIDTH, 60 if stage == 0 else array.shape[2]) and array.nbytes == array.size * 4
    shards = {str(shard.index): np.asarray(shard.data) for shard in array.read().addressable_shards}
    for index, file in zip(array.parts, array.files, strict=True):
        np.testing.assert_array_equal(np.fromfile(file, np.float32), shards[str(index)].ravel())
    del state, array, shards
    assert left(tmp_path) == []


def test_the_report_counts_them_apart(files):
    zero = files()
    report = zero.report(zero.abstract_state(make_model, optimizer()), zero.train_step(loss_fn), BATCHES[0])
    assert report.disk.bytes == 2 * (LARGE_BYTES + PADDING) / 8 and report.disk.expected == 2 * LARGE_BYTES / 8
    assert report.host == {} and report.optimizer.bytes == 2 * 4 * WIDTH + 2 * 4
    assert "optimizer state, on disk" in str(report) and "on disk to the device in 3 turns" in str(report)
    assert report.as_dict()["disk"]["bytes"] == report.disk.bytes


@pytest.mark.parametrize(("before", "after"), [(True, False), (False, True)])
def test_a_checkpoint_knows_nothing_of_it(before, after, files, tmp_path):
    choose = lambda there: files(path=tmp_path / "files") if there else settings(stage=3)
    state, _ = train(choose(before), batches=BATCHES[:1])
    zerojax.save(tmp_path / "saved", state)
    restored = zerojax.restore(tmp_path / "saved", choose(after), make_model, optimizer())
    assert bool(in_files(restored)) is after
    jax.tree.map(np.testing.assert_array_equal, *map(jax.device_get, (restored.opt_state, state.opt_state)))


# --- in memory


def large_model(n):
    return lambda key: {f"{i:02}": jnp.ones((256, 256)) for i in range(n)}


def cube(model, batch, rng):
    return sum(jnp.mean((batch @ w) ** 2) for w in model.values())


LEAF = 4 * 256 * 256


@pytest.fixture
def alive(monkeypatch):
    """How many arrays of a leaf's shape are on the device, at every reading and writing of its files."""
    counts = []

    def counted(method):
        def counting(self, *args):
            counts.append(sum(x.shape == (256, 256) and not x.is_deleted() for x in jax.live_arrays()))
            return method(self, *args)

        return counting

    for name in ("load", "write"):
        monkeypatch.setattr(DiskArray, name, counted(getattr(DiskArray, name)))
    return counts


def test_the_peak_stays_flat_as_the_state_grows_fourfold(files, tmp_path, alive):
    zero = files(mesh=zerojax.make_mesh(devices=jax.devices()[:1]), clip_norm=None, micro_batches=1)
    one, tx, turn = jnp.ones((8, 256)), optax.adam(1e-3), 2 * LEAF
    for n in (6, 24):
        state, step = zero.init(large_model(n), tx), zero.train_step(cube)
        assert len(alive) == 2 * n and max(alive) <= n + 3
        alive.clear()
        tracemalloc.start()
        state, _ = step(state, one)
        trace = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*/zerojax/zero/streaming.py")])
        tracemalloc.stop()
        assert 0 <= sum(entry.size for entry in trace.statistics("filename")) - 3 * turn < 10_000
        assert len(alive) == 4 * n
        assert max(alive) <= 2 * n + 9  # parameters, gradients, and three turns of a parameter and two moments
        for work in (zerojax.save, lambda path, _: zerojax.restore(path, zero, large_model(n), tx)):  # noqa: B023
            alive.clear()
            work(tmp_path / f"{n}", state)
            assert len(alive) >= 2 * n and max(alive) - min(alive) <= 2
        del state
        alive.clear()


# --- what can go wrong


def test_a_run_that_is_killed_in_the_middle_of_a_step_goes_on_from_its_checkpoint(tmp_path):
    path, checkpoint = tmp_path / "files", tmp_path / "checkpoint"
    command = ["-m", "tests.zero.disk_child", "killed", str(path), str(checkpoint)]
    ((code, _, errors),) = runs.finish([runs.start(command, devices=8)])
    assert code == -9, errors
    (left_over,) = left(path)
    assert any(set(file.read_bytes()) != {0} for file in left_over.iterdir())
    zero = on_disk(path)
    restored = zerojax.restore(checkpoint, zero, make_model, optimizer())
    assert int(restored.step) == 2 and left_over not in left(path)
    resumed, rest = train(zero, restored, BATCHES[2:])
    uninterrupted, history = train(zero)
    same(resumed, rest, jax.device_get(jax.tree.leaves((uninterrupted, history[2:]))))


@contextlib.contextmanager
def files_of_at_most(limit):
    """The operating system's limit on the size of a file, which a write beyond it is told as a full disk is."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


FULL = r"^offload_path \S+: the disk, a quota or a limit on a file's size is exhausted: [\d,.]+ MB free, 0\.1 MB needed"


def test_a_disk_that_is_full_at_the_start(files, tmp_path):
    with files_of_at_most(2000), pytest.raises(RunError, match=FULL):
        files().init(make_model, optimizer())
    assert left(tmp_path) == []


def test_a_disk_that_fills_in_the_middle_of_a_step(files, tmp_path):
    zero = files(path=tmp_path / "files")
    state, step = zero.init(make_model, optimizer()), zero.train_step(loss_fn)
    state, _ = step(state, BATCHES[0])
    zerojax.save(tmp_path / "saved", state)
    with files_of_at_most(2000), pytest.raises(RunError, match=FULL + ".*checkpoints are intact"):
        step(state, BATCHES[1])
    with pytest.raises(UserError, match="state was given to a step before"):
        step(state, BATCHES[1])
    restored = zerojax.restore(tmp_path / "saved", zero, make_model, optimizer())
    state, history = train(zero, restored, BATCHES[1:])
    same(state, history, jax.device_get(jax.tree.leaves((lambda s, h: (s, h[1:]))(*train(zero)))))


def test_a_file_that_is_gone(files):
    zero = files()
    state = zero.init(make_model, optimizer())
    in_files(state)[-1].files[0].unlink()
    with pytest.raises(RunError, match="^optimizer state in offload_path .*: No such file or directory: .*checkpoints"):
        train(zero, state)


def test_the_state_before_a_step_is_deleted(files):
    zero = files()
    before = zero.init(make_model, optimizer())
    train(zero, before, BATCHES[:1], loss=lambda model, batch, rng: jnp.mean(model["out"] ** 2))
    array = before.opt_state[0].mu["out"]
    assert array.is_deleted()
    with pytest.raises(UserError, match="belongs to a state that was given to a step; accepted: the state it returned"):
        array.read()


def test_paths_that_nothing_can_be_written_to(tmp_path):
    (tmp_path / "file").write_text("")
    for path, why in ((tmp_path / "file", "File exists"), (tmp_path / "file/in", "Not a directory")):
        with pytest.raises(UserError, match=f"^offload_path is '{path}': {why}; accepted: a directory to write in$"):
            on_disk(path).init(make_model, optimizer())


@pytest.mark.parametrize("path", ["", 3, True])
def test_what_is_no_path(path):
    with pytest.raises(UserError, match="^offload_path is .*; accepted: the path of a directory, or None$"):
        Zero(offload="optimizer", offload_path=path)


@pytest.mark.parametrize("offload", [(), "params"])
def test_a_path_for_nothing(offload):
    with pytest.raises(UserError, match="^offload_path is '/x', and offload is .*; accepted: 'optimizer' in offload"):
        Zero(offload=offload, offload_path="/x")


@pytest.mark.slow
def test_two_processes_of_two_devices(tmp_path):
    """Each has files of its own, half of the state in each, and both train as one process of four devices does."""
    address = runs.free_address()
    command = ["-m", "tests.zero.disk_child", "pair", address]
    outputs = runs.finish(
        [runs.start([*command, str(i), str(tmp_path / "files"), str(tmp_path)], devices=2) for i in range(2)]
    )
    assert [code for code, _, _ in outputs] == [0, 0], outputs
    zero = settings(stage=3, mesh=zerojax.make_mesh(devices=jax.devices()[:4]))
    state, history = train(zero, tx=optax.adamw(1e-2))
    for process in range(2):
        found = np.load(tmp_path / f"{process}.npz")
        assert found["directories"] == 1 and found["held"] == 2 * LARGE_BYTES / 2  # 4 divides 60
        np.testing.assert_allclose(found["losses"], [metrics["loss"] for metrics in history], rtol=1e-5)
        for i, x in enumerate(jax.tree.leaves(jax.device_get(zero.gather(state)))):
            np.testing.assert_allclose(found[f"arr_{i}"], x, rtol=1e-4, atol=1e-6)
    assert left(tmp_path / "files") == []
