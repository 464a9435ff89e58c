"""zerojax's training step against a hand-written `jax.jit` step, and two processes against one.

    python benchmarks/step.py

The same GPT, the same optax.adamw with clipping, the same batch; the hand-written step is the usual one: parameters
and optimizer state placed by `jax.sharding`, the compiler left to find the collectives. Both run in turn in one
process, so that what else the machine does meets both; each line ends with the median over turns of zerojax's time
divided by the other's (below 1: zerojax is faster). The last lines compare tokens per second of two processes of one
device each with one process of two devices.
"""

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time

SIZES = dict(vocab_size=256, dim=128, layers=4, heads=4, max_length=128, remat=False)
ROWS_PER_DEVICE = {1: 16, 2: 32, 8: 4}
FIGURE = "tokens a second: "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=20, help="pairs of measurements")
    parser.add_argument("--steps", type=int, default=4, help="steps in a measurement")
    parser.add_argument("--only", help="run one comparison: 1, 8 or processes")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return worker(*arguments.worker, turns=arguments.turns, steps=arguments.steps)
    passed_on = [f"--turns={arguments.turns}", f"--steps={arguments.steps}"]
    for devices in ("1", "8"):
        if arguments.only in (None, devices):
            start(["pairs"], int(devices), passed_on).wait()
    if arguments.only in (None, "processes"):
        compare_processes(passed_on)


def start(words: list[str], devices: int, passed_on: list[str], **options: object) -> subprocess.Popen[str]:
    """A fresh process with so many emulated devices."""
    environ = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    command = [sys.executable, os.path.abspath(__file__), *passed_on, "--worker", *words]
    return subprocess.Popen(command, env=environ, text=True, **options)


def worker(kind: str, *words: str, turns: int, steps: int) -> None:
    if kind == "pairs":
        compare_steps(turns, steps)
    else:
        measure_speed(turns, steps, *words)


def make_model(key):
    from flax import nnx

    from zerojax.models.gpt import GPT

    return GPT(**SIZES, rngs=nnx.Rngs(key))


def make_optimizer():
    import optax

    return optax.adamw(1e-3)


def zerojax_step(stage, mesh, batch):
    """A function that takes one step, and keeps the state."""
    import zerojax
    from zerojax.models.gpt import next_token_loss

    zero = zerojax.Zero(stage=stage, mesh=mesh, clip_norm=1.0)
    step = zero.train_step(next_token_loss)
    held = [zero.init(make_model, make_optimizer())]

    def run():
        held[0], metrics = step(held[0], batch)
        return metrics["loss"]

    return run


def hand_written_step(sharded, mesh, batch):
    """The usual step: one jit, states placed whole or in shards by NamedSharding."""
    import jax
    import optax
    from flax import nnx
    from jax.sharding import NamedSharding, PartitionSpec

    from zerojax.models.gpt import next_token_loss

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), make_optimizer())
    graph, params = nnx.split(make_model(jax.random.key(0)))

    def place(x):
        dims = [i for i, n in enumerate(x.shape) if n % mesh.size == 0] if sharded and x.size >= 1024 else []
        cut = max(dims, key=lambda i: (x.shape[i], i), default=None)
        return NamedSharding(mesh, PartitionSpec(*("data" if i == cut else None for i in range(x.ndim))))

    state = params, optimizer.init(params)
    shardings = jax.tree.map(place, state)
    split, everywhere = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())

    def step(state, batch):
        params, opt_state = state

        def loss_of(params):
            loss = next_token_loss(nnx.merge(graph, params), batch, None)
            return loss.total / loss.weight

        loss, gradients = jax.value_and_grad(loss_of)(params)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    compiled = jax.jit(step, in_shardings=(shardings, split), out_shardings=(shardings, everywhere), donate_argnums=0)
    held = [jax.device_put(state, shardings)]

    def run():
        held[0], loss = compiled(held[0], batch)
        return loss

    return run


def compare_steps(turns, steps):
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    import zerojax

    mesh = zerojax.make_mesh()
    rows = ROWS_PER_DEVICE[mesh.size] * mesh.size
    tokens = np.random.default_rng(0).integers(0, 256, (rows, SIZES["max_length"] + 1)).astype(np.int32)
    batch = jax.device_put({"tokens": tokens}, NamedSharding(mesh, PartitionSpec("data")))
    for stage in (0, 3) if mesh.size > 1 else (0,):
        ours, theirs = zerojax_step(stage, mesh, batch), hand_written_step(stage > 0, mesh, batch)
        first = float(ours()), float(theirs())
        np.testing.assert_allclose(*first, rtol=1e-4)  # the same model on the same batch
        ratios, times = [], ([], [])
        for turn in range(turns):
            pair = [(0, ours), (1, theirs)]
            for which, run in pair if turn % 2 else pair[::-1]:
                times[which].append(timed(run, steps))
            ratios.append(times[0][-1] / times[1][-1])
        ms = [1000 * statistics.median(t) for t in times]
        print(
            f"{mesh.size} device{'s' * (mesh.size > 1)}, stage {stage}: zerojax {ms[0]:.1f} ms, hand-written "
            f"{ms[1]:.1f} ms, median ratio {statistics.median(ratios):.3f}",
            flush=True,
        )


def timed(run, steps):
    """Seconds a step."""
    import jax

    began = time.perf_counter()
    for _ in range(steps):
        last = run()
    jax.block_until_ready(last)
    return (time.perf_counter() - began) / steps


def compare_processes(passed_on):
    """Both configurations at once would share the cores, so they take turns, each told when to measure."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    pair = [start(["speed", address, "2", str(i)], 1, passed_on, **pipes) for i in range(2)]
    single = [start(["speed", address, "1", "0"], 2, passed_on, **pipes)]
    turns = int(passed_on[0].partition("=")[2])
    speeds = {"two": [], "one": []}
    for _ in range(turns):
        for name, group in (("two", pair), ("one", single)):
            for process in group:
                process.stdin.write("go\n")
                process.stdin.flush()
            speeds[name].append(min(map(answer, group)))
    for process in pair + single:
        process.stdin.close()  # all of them first: the pair leave together
    for process in pair + single:
        process.wait()
    ratio = statistics.median(a / b for a, b in zip(speeds["two"], speeds["one"], strict=True))
    print(
        f"two processes of one device: {statistics.median(speeds['two']):,.0f} tokens/s, one process of two: "
        f"{statistics.median(speeds['one']):,.0f} tokens/s, median ratio {ratio:.3f}",
        flush=True,
    )


def answer(process):
    """The next figure that a worker prints, past what libraries say."""
    while not (line := process.stdout.readline()).startswith(FIGURE):
        if not line:
            raise SystemExit("a worker ended early; what it said stands above")
    return float(line.removeprefix(FIGURE))


def measure_speed(turns, steps, address, processes, index):
    if processes == "2":  # each on its own half of the cores, as a launcher binds them; jax sizes its threads by that
        cores = sorted(os.sched_getaffinity(0))
        half = len(cores) // 2
        os.sched_setaffinity(0, cores[half * int(index) :][: half or None])
    import jax

    if processes == "2":
        jax.distributed.initialize(address, 2, int(index))
    import numpy as np

    import zerojax

    rows = ROWS_PER_DEVICE[2] * 2 // int(processes)
    tokens = np.random.default_rng(int(index)).integers(0, 256, (rows, SIZES["max_length"] + 1)).astype(np.int32)
    run = zerojax_step(3, zerojax.make_mesh(), {"tokens": tokens})
    jax.block_until_ready(run())
    for _ in sys.stdin:
        seconds = timed(run, steps)
        print(f"{FIGURE}{ROWS_PER_DEVICE[2] * 2 * SIZES['max_length'] / seconds}", flush=True)


if __name__ == "__main__":
    main()
