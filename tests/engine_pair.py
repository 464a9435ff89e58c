"""One process of two: an engine's loop with this process's share of each micro-batch, its checkpoints, its mistakes."""

import sys
import warnings

import jax
import numpy as np

import zerojax
from tests.engine import tiny
from zerojax.engine import loss as losses_of_engines
from zerojax.errors import RunError
from zerojax.launch.distributed import initialize

STEPS = 3  # an epoch and a half
CONFIG = tiny.config(stage=3, accumulation=2)
DATA = tiny.examples(32)


def start(**more):
    return zerojax.initialize(model=tiny.make_model, loss_fn=tiny.loss_fn, config=CONFIG | more, training_data=DATA)[0]


def train(engine, steps, losses):
    """Losses before and after their steps, and the norms; `losses` gets the losses themselves."""
    early, late, norms = [], losses, []
    while len(norms) < steps:
        for batch in engine.training_dataloader:
            late.append(engine(batch))
            early.append(late[-1].item())
            engine.backward(late[-1])
            at_boundary = engine.is_gradient_accumulation_boundary()
            engine.step()
            if at_boundary:
                norms.append(engine.get_global_grad_norm())
                if len(norms) == steps:
                    break
    return {"early": early, "late": [loss.item() for loss in late], "norms": norms, "rates": engine.get_lr()}


def told(error, action):
    try:
        action()
    except error as raised:
        return str(raised)
    return ""


def main(directory):
    process = jax.process_index()
    engine = start(checkpoint={"tag_validation": "FAIL"})
    losses = []
    found = train(engine, STEPS, losses)
    engine.save_checkpoint(directory, client_state={"by": process})
    engine.save_16bit_model(directory)
    batch = next(iter(engine.training_dataloader))
    found["evaluated"] = float(engine.eval_batch(batch))
    wrong = {
        "tag": told(zerojax.UserError, lambda: engine.save_checkpoint(directory, f"of_{process}")),
        "rows": told(zerojax.UserError, lambda: engine({name: x[1:] for name, x in batch.items()})),
        "absent": told(zerojax.UserError, lambda: engine.load_checkpoint(directory, "absent")),
    }
    if process == 0:  # a loss that one process alone asks for
        losses_of_engines.PATIENCE = 1.0
        wrong["alone"] = told(RunError, engine(batch).item)
        assert float(losses[-1]) == losses[-1].item() > 0  # after its step it may
    _, client_state = engine.load_checkpoint(directory)
    found["client"] = client_state["by"]
    found["on"] = [float(engine.train_batch())]
    engine.config.__dict__["tag_validation"] = "WARN"
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        engine.save_checkpoint(directory, f"of_{process}", save_latest=False)
    wrong["warned"] = " ".join(str(warning.message) for warning in warned)
    np.savez(f"{directory}/results_{process}.npz", **found, **wrong, **engine.module_state_dict())


if __name__ == "__main__":
    address, process, directory = sys.argv[1:]
    initialize(address, 2, int(process))
    main(directory)
