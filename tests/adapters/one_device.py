"""A run in shards beside the same run on one device."""

import jax
import numpy as np
import optax

import zerojax
from zerojax import Zero


def both(make, loss, batches, micro_batches=1, optimizer=None, stage=3, **settings):
    """(losses, model, variables) of a run on 8 devices and of one on a single one."""
    results = []
    for zero in (
        Zero(stage=stage, micro_batches=micro_batches, min_shard_size=8, **settings),
        Zero(stage=0, micro_batches=micro_batches, mesh=zerojax.make_mesh(devices=jax.devices()[:1]), **settings),
    ):
        state = zero.init(make, optimizer or optax.sgd(0.1))
        step, losses = zero.train_step(loss), []
        for batch in batches:
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
        results.append((losses, zero.gather(state), state, step))
    return results


def assert_equal_runs(make, loss, batches, rtol=1e-5, **settings):
    """Losses, parameters and variables are equal to `rtol` of a leaf's largest entry; returns the sharded run's."""
    (losses, _, state, step), (want_losses, _, want, _) = both(make, loss, batches, **settings)
    np.testing.assert_allclose(losses, want_losses, rtol=rtol)
    for field in ("params", "variables"):
        got = zip(
            jax.tree_util.tree_leaves_with_path(getattr(state, field)),
            jax.tree.leaves(state.layout.leaves[field]),
            jax.tree.leaves(getattr(want, field)),
            strict=True,
        )
        for (path, a), leaf, b in got:
            a, b = np.asarray(a)[tuple(map(slice, leaf.shape))], np.asarray(b)
            np.testing.assert_allclose(
                a, b, rtol=rtol, atol=rtol * np.abs(b).max(initial=0), err_msg=jax.tree_util.keystr(path)
            )
    return state, step


def entered(state, step):
    """Parameters that are gathered when the model is entered, by the search's finding."""
    from zerojax.zero.gradients import on_entry

    leaves = [*state.layout.param_leaves, *state.layout.frozen_leaves]
    uses = step.uses[state.layout].params
    return {
        leaf.name for leaf, use in zip(leaves, uses, strict=True) if leaf.cut.dim is not None and on_entry(leaf, use)
    }
