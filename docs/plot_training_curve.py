"""Draws a run's training curve: `python docs/plot_training_curve.py RUN_DIR [--output docs/training_curve.png]`.

Reads train.csv, validation.csv and config.gin of the run's directory: the loss in bits per byte over the steps, beside
what counting bytes and pairs of bytes of the same split gives.
"""

import argparse
import csv
import re
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # draws without a screen

import matplotlib.pyplot as plt
import numpy as np

from zerojax.data import bits_per_byte, entropy_baselines, text_dataset

TRAIN, VALIDATION, BASELINE = "#7aa6d6", "#1f3a5f", "#8a8a8a"
UNIFORM = 8.0  # bits per byte of a model that knows nothing


def main() -> None:
    parser = argparse.ArgumentParser(description="Draws a run's training curve.")
    parser.add_argument("run_dir", type=Path, help="directory of a run of `zerojax train` over byte tokens")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("training_curve.png"))
    arguments = parser.parse_args()

    source = source_of(arguments.run_dir / "config.gin")
    train, validation = (text_dataset(source, "bytes", length=1, split=split) for split in ("train", "validation"))
    baselines = entropy_baselines(train.text, validation.text)
    steps, losses = column(arguments.run_dir / "train.csv", "loss")
    validated, bits = column(arguments.run_dir / "validation.csv", "bits_per_byte")
    figure = draw(steps, np.array([bits_per_byte(loss) for loss in losses]), validated, bits, baselines._asdict())
    figure.savefig(arguments.output, dpi=150)
    print(f"{arguments.output}: validation {bits[-1]:.3f} bits per byte after {validated[-1]:.0f} steps; "
          f"unigram {baselines.unigram:.3f}, bigram {baselines.bigram:.3f}")  # fmt: skip


def source_of(config: Path) -> str:
    """The text that a run's resolved configuration names."""
    found = re.search(r"text_dataset\.source = '([^']*)'", config.read_text(encoding="utf-8"))
    if found is None:
        raise SystemExit(f"{config}: no text_dataset.source; the run is not one over text")
    return found[1]


def column(path: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(rows,) steps and (rows,) values of a column."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return np.array([int(row["step"]) for row in rows]), np.array([float(row[name]) for row in rows])


def draw(
    steps: np.ndarray, train: np.ndarray, validated: np.ndarray, validation: np.ndarray, baselines: dict[str, float]
) -> plt.Figure:
    """The figure; all values are bits per byte."""
    figure, axes = plt.subplots(figsize=(7.2, 4.0), layout="constrained")
    axes.plot(steps, train, color=TRAIN, linewidth=1.2, label="training")
    axes.plot(validated, validation, color=VALIDATION, marker="o", linewidth=1.5, label="validation")
    axes.annotate(
        f"{validation[-1]:.2f}",
        (validated[-1], validation[-1]),
        textcoords="offset points",
        xytext=(0, -8),
        ha="right",
        va="top",
        color=VALIDATION,
        fontweight="bold",
    )
    for name, value in baselines.items():
        axes.axhline(value, color=BASELINE, linewidth=1.0, linestyle=(0, (4, 3)))
        axes.annotate(
            f" {name}\n counts {value:.2f}",
            (1.0, value),
            xycoords=("axes fraction", "data"),
            va="center",
            color=BASELINE,
        )
    axes.set_xlabel("step")
    axes.set_ylabel("loss, bits per byte")
    axes.set_xlim(0, steps[-1] * 1.01)
    axes.set_ylim(min(train.min(), validation.min(), *baselines.values()) - 0.5, UNIFORM + 0.2)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.legend(frameon=False, loc="upper right", bbox_to_anchor=(1.0, 0.99))
    return figure


if __name__ == "__main__":
    main()
