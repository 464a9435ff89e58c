"""What fits: bytes per device of compiled steps of a GPT of 1.31 billion parameters, beside the formulas.

    python benchmarks/memory.py --target h100     compiles what benchmarks/memory.json lacks, and writes docs/memory.md
    python benchmarks/memory.py --target cpu      compiles fp32 rows for emulated CPU devices, and prints them
    python benchmarks/memory.py --logits          the loss alone, at once and in chunks, compiled for the CPU
    python benchmarks/memory.py --fits            the cheapest settings that fit some models on some GPUs, by formula

Nothing is allocated. An entry of benchmarks/memory.json is what the compiler says of one row (`memory_analysis`);
delete it to have it compiled again (8 to 70 s each on two cores, 15 minutes for all). `--target h100` compiles for
eight H100 that are not there, and says what it needs where that is missing; `topology.py` has the details. The CPU's
compiler computes bf16 in fp32 with copies, and counts the host's memory as the device's.
"""

import argparse
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

import zerojax
from benchmarks import topology
from zerojax.models.budget import Budget, Fit, Sizes, budget, cheapest
from zerojax.models.chunked import chunked_cross_entropy
from zerojax.models.gpt import GPT, next_token_loss
from zerojax.models.losses import cross_entropy

ROOT = Path(__file__).parents[1]
DEVICES = 8
GPT_1B = Sizes(vocab_size=50304, dim=2048, layers=24, heads=16, length=1024)
ROWS = 2  # sequences of one device
ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}
PAGE, MEASURED = ROOT / "docs" / "memory.md", ROOT / "benchmarks" / "memory.json"

# remat, offload, precision and chunks: every value of each is met at every stage.
SETTINGS: tuple[tuple[Any, str, str, int | None], ...] = (
    ("none", "", "fp32", None),
    ("full", "", "fp32", None),
    ("none", "", "bf16", None),
    ("dots", "", "bf16", None),
    ("full", "", "bf16", None),
    ("full", "", "bf16", 8),
    ("full", "optimizer", "bf16", None),
    ("full", "optimizer+params", "bf16", None),
    ("offload", "optimizer+params", "bf16", None),
)
TABLE = [*((stage, *settings) for stage in range(4) for settings in SETTINGS), (3, "full", "", "fp16", None)]

MODELS = {
    "125M": (Sizes(50304, 768, 12, 12, 1024), 4),
    "1.3B": (GPT_1B, 2),
    "7B": (Sizes(50304, 4096, 32, 32, 2048), 1),
    "13B": (Sizes(50304, 5120, 40, 40, 2048), 1),
    "70B": (Sizes(50304, 8192, 86, 64, 2048), 1),
}
GPUS = (24, 40, 80, 141)
COUNTS = (1, 8, 64)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--target", choices=("h100", "cpu"))
    arguments.add_argument("--logits", action="store_true")
    arguments.add_argument("--fits", action="store_true")
    given = arguments.parse_args()
    topology.prepare(DEVICES)
    if given.target == "h100":
        write_page(measured_for_h100())
    if given.target == "cpu":
        fp32 = [row for row in TABLE if row[3] == "fp32"]
        mesh = Mesh(np.array(jax.devices()), ("data",))
        print("\n".join(table({key(row): measure(GPT_1B, ROWS, mesh, *row) for row in fp32})))
    if given.logits:
        print("\n".join(logits_table()))
    if given.fits:
        print("\n".join(fits_table()))


def key(row: tuple[Any, ...]) -> str:
    return ",".join(str(value) for value in row if value is not None)


def measured_for_h100() -> dict[str, Any]:
    """What the compiler says of each row, compiled now where no run before has."""
    found = json.loads(MEASURED.read_text(encoding="utf-8")) if MEASURED.exists() else {}
    missing = [row for row in TABLE if key(row) not in found]
    mesh = Mesh(np.array(topology.h100(DEVICES)), ("data",)) if missing else None
    for row in missing:
        start = time.time()
        found[key(row)] = measure(GPT_1B, ROWS, mesh, *row)
        print(f"{key(row)}: {time.time() - start:.0f} s", flush=True)
        MEASURED.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


def measure(
    sizes: Sizes, rows: int, mesh: Any, stage: int, remat: Any, offload: str, precision: str, chunks: int | None
) -> dict[str, int]:
    """Bytes of one device and of the host for it, as the compiler counts them."""
    zero = zerojax.Zero(stage=stage, mesh=mesh, precision=precision, remat=remat, offload=names(offload))
    state = zero.abstract_state(lambda rng: model_of(sizes, rng), optax.adamw(1e-3))
    step = zero.train_step(lambda model, batch, rng: next_token_loss(model, batch, rng, chunks))
    batch = {"tokens": jax.ShapeDtypeStruct((mesh.size * rows, sizes.length + 1), jnp.int32)}
    memory = step.lower(state, batch).compile().memory_analysis()
    return {
        "arguments": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "outputs": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "host_arguments": memory.host_argument_size_in_bytes,
        "host_temporaries": memory.host_temp_size_in_bytes,
    }


def names(offload: str) -> tuple[str, ...]:
    return tuple(offload.split("+")) if offload else ()


def model_of(sizes: Sizes, rng: jax.Array) -> GPT:
    return GPT(
        vocab_size=sizes.vocab_size,
        dim=sizes.dim,
        layers=sizes.layers,
        heads=sizes.heads,
        max_length=sizes.length,
        rngs=nnx.Rngs(rng),
    )


def expected(
    sizes: Sizes, rows: int, stage: int, remat: Any, offload: str, precision: str, chunks: int | None
) -> Budget:
    """The formulas of a row."""
    return budget(
        sizes,
        rows,
        DEVICES,
        stage,
        remat=remat,
        offload=names(offload),
        compute=ITEMSIZE[precision],
        chunks=chunks,
    )


def in_all(found: dict[str, int]) -> int:
    """Of a compiled step, what is on the device: arguments, temporaries, and outputs that take no argument's place."""
    return found["arguments"] + found["temporaries"] + found["outputs"]


def table(measured: dict[str, Any]) -> Iterator[str]:
    """The rows that were measured, in GB, beside the formulas."""
    yield (
        "| stage | remat | offload | precision | state: formula | compiled | in host memory | gradients | copy | kept "
        "| temporaries | in all | formula | bound | ratio |"
    )
    yield "| " + " | ".join(["---"] * 15) + " |"
    for row in TABLE:
        if key(row) in measured:
            found, by_formula = measured[key(row)], expected(GPT_1B, ROWS, *row)
            yield line(row, found, by_formula)


def line(row: tuple[Any, ...], found: dict[str, int], by_formula: Budget) -> str:
    stage, remat, offload, precision, chunks = row
    host = found["host_arguments"] + found["host_temporaries"]
    figures = (
        by_formula.state,
        found["arguments"],
        host,
        by_formula.gradients,
        by_formula.copy,
        by_formula.kept,
        found["temporaries"],
        in_all(found),
        by_formula.formula,
        by_formula.bound,
    )
    settings = (stage, remat, offload or "-", precision + (f", {chunks} chunks" if chunks else ""))
    return cells(*settings, *(f"{n / 1e9:.3f}" for n in figures), f"{in_all(found) / by_formula.total:.3f}")


def logits_table() -> Iterator[str]:
    """Temporaries of the loss and its gradients of 16 sequences, for the 1.3B model's head in fp32 on the CPU."""
    tokens, dim, vocab = 16 * GPT_1B.length, GPT_1B.dim, GPT_1B.vocab_size
    given = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((tokens, dim), (dim, vocab))]
    targets = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    yield "| chunks | temporaries, MB | by the formula |"
    yield "| --- | --- | --- |"
    for chunks in (None, 2, 4, 8, 16):
        memory = jax.jit(jax.grad(_loss(chunks), argnums=(0, 1))).lower(*given, targets).compile().memory_analysis()
        logits, of_head = 4 * tokens * vocab / (chunks or 1), 4 * dim * vocab
        by_formula = max(2 * logits, logits + of_head)
        yield cells(chunks or "at once", f"{memory.temp_size_in_bytes / 1e6:.0f}", f"{by_formula / 1e6:.0f}")


def _loss(chunks: int | None) -> Any:
    if chunks is None:
        return lambda hidden, head, targets: cross_entropy(hidden @ head, targets).total
    return lambda hidden, head, targets: chunked_cross_entropy(hidden, head, targets, chunks=chunks).total


def fits_table() -> Iterator[str]:
    """For each model and GPU the first of the settings, the fastest first, that fits."""
    yield "| model | devices | " + " | ".join(f"{gb} GB" for gb in GPUS) + " |"
    yield "| --- " * (2 + len(GPUS)) + "|"
    for model, (sizes, rows) in MODELS.items():
        for count in COUNTS:
            found = [cheapest(sizes, rows, count, gb * 1e9) for gb in GPUS]
            yield cells(f"{model}, {rows} x {sizes.length}", count, *map(words, found))


def words(fit: Fit | None) -> str:
    if fit is None:
        return "-"
    parts = [f"stage {fit.stage}", *([f"remat {fit.remat}"] if fit.remat != "none" else [])]
    parts += [f"offload {'+'.join(fit.offload)}"] if fit.offload else []
    parts += [f"{fit.chunks} chunks"] if fit.chunks else []
    return f"{', '.join(parts)}: {fit.bytes / 1e9:.3g}"


def cells(*values: Any) -> str:
    return "| " + " | ".join(map(str, values)) + " |"


def write_page(measured: dict[str, Any]) -> None:
    """Puts the tables between their markers in the page."""
    page = PAGE.read_text(encoding="utf-8")
    for name, rows in (("table", table(measured)), ("fits", fits_table()), ("logits", logits_table())):
        page = replaced(page, name, rows)
    PAGE.write_text(page, encoding="utf-8")


def replaced(page: str, name: str, rows: Iterator[str]) -> str:
    between = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
    return between.sub(lambda found: f"{found[1]}\n" + "\n".join(rows) + f"\n\n{found[2]}", page)


if __name__ == "__main__":
    main()
