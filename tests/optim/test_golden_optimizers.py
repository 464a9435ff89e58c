"""Every optimizer against the trajectories of DeepSpeed and torch in tests/golden/optimizers.json."""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from zerojax import optim

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "optimizers.json").read_text())
CASES = {case["name"]: case for case in GOLDEN["cases"]}

MAKERS = {
    "torch.optim.AdamW": functools.partial(optim.adam, adam_w_mode=True),
    "torch.optim.Adam": functools.partial(optim.adam, adam_w_mode=False),
    "DeepSpeedCPUAdam": optim.adam,
    "FusedAdam": optim.adam,
    "lamb kernel transcription": optim.lamb,
    "DeepSpeedCPULion": optim.lion,
    "Lion formula": optim.lion,
    "torch.optim.Adagrad": optim.adagrad,
    "DeepSpeedCPUAdagrad": optim.adagrad,
    "torch.optim.SGD": optim.sgd,
}
RENAMED = {"lr": "learning_rate", "adamw_mode": "adam_w_mode"}

# Relative to the largest entry of a tensor, 1e-6 but for:
BOUNDS = {
    # DeepSpeed's kernel takes 1 - b2 in float32, which makes the second moment 1.3e-5 too small. The bias correction
    # takes the same difference and hides it; without one it shows. See test_adam_without_bias_correction_in_float64.
    "ds_cpuadam_adamw_nobc": 2e-6,
    # Newton-Schulz in 16 bits: products are rounded in an order of their own, which moves an entry of U by up to 0.1 in
    # bfloat16 and 0.015 in float16. Ten steps of 0.02 add up, tensors have entries up to 2.8.
    "ds_muon_standard_wd0.1": 10 * 0.02 * 0.1 / 2.8,
    "ds_muon_gram_wd0.0": 10 * 0.02 * 0.015 / 2.8,
}


def make(case: dict[str, Any]) -> optax.GradientTransformation:
    args = dict(case["args"])
    if case["optimizer"] == "MuonWithAuxAdam":
        matrices, rest = args["muon"], args["aux_adam"]
        return optim.muon(
            matrices["lr"],
            matrices["momentum"],
            matrices["weight_decay"],
            ns_method=matrices["ns_method"],
            ns_dtype=jnp.float32 if "fp32ns" in case["name"] else None,
            adam_lr=rest["lr"],
            betas=rest["betas"],
            eps=rest["eps"],
        )
    return MAKERS[case["optimizer"]](**{RENAMED.get(name, name): value for name, value in args.items()})


def arrays(case: dict[str, Any], values: list[Any]) -> dict[str, jax.Array]:
    """The three tensors. Torch's matrices are (outputs, inputs), ours (inputs, outputs), which matters to Muon."""
    dtype = jnp.bfloat16 if case["name"].endswith("bf16params") else jnp.float32
    turn = case["optimizer"] == "MuonWithAuxAdam"
    made = [jnp.asarray(value, dtype) for value in values]
    return {f"w{i}": x.mT if turn and x.ndim > 1 else x for i, x in enumerate(made)}


def distance(got: Any, wanted: Any) -> float:
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    return np.abs(got - wanted).max() / np.abs(wanted).max()


@pytest.mark.parametrize("name", CASES)
def test_trajectory(name: str) -> None:
    case = CASES[name]
    optimizer = make(case)
    params = arrays(case, GOLDEN["init_params"])
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    expected = CASES[case.get("same_as", name)]["params_after_step"]
    for step, (gradients, after) in enumerate(zip(GOLDEN["grads"], expected, strict=True), 1):
        updates, state = update(arrays(case, gradients), state, params)
        params = optax.apply_updates(params, updates)
        for key, wanted in arrays(case, after).items():
            assert distance(params[key], wanted) < BOUNDS.get(name, 1e-6), (step, key)


def test_adam_without_bias_correction_in_float64() -> None:
    lr, b1, b2, eps, decay = 0.01, 0.9, 0.999, 1e-8, 0.01
    wanted = [np.array(x) for x in GOLDEN["init_params"]]
    m, v = [0 * p for p in wanted], [0 * p for p in wanted]
    params = {str(i): jnp.asarray(p, jnp.float32) for i, p in enumerate(wanted)}
    optimizer = optim.adamw(lr, (b1, b2), eps, decay, bias_correction=False)
    state = optimizer.init(params)
    for gradients in GOLDEN["grads"]:
        for i, g in enumerate(map(np.array, gradients)):
            m[i], v[i] = b1 * m[i] + (1 - b1) * g, b2 * v[i] + (1 - b2) * g * g
            wanted[i] = wanted[i] - lr * (m[i] / (np.sqrt(v[i]) + eps) + decay * wanted[i])
        updates, state = optimizer.update({str(i): jnp.asarray(g) for i, g in enumerate(gradients)}, state, params)
        params = optax.apply_updates(params, updates)
    assert max(distance(params[str(i)], p) for i, p in enumerate(wanted)) < 4e-7
