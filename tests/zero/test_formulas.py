"""The formulas against the figures that their papers and measurements print."""

import pytest

from zerojax.zero import formulas


@pytest.mark.parametrize(
    ("stage", "gigabytes"),
    [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)],  # arXiv:1910.02054, figure 1: 7.5 B parameters, 64 devices
)
def test_figure_1_of_the_paper(stage, gigabytes):
    assert formulas.model_states(7_500_000_000, 64, stage).total / 1e9 == pytest.approx(gigabytes, abs=0.05)


@pytest.mark.parametrize(
    ("shards", "stage", "gigabytes"),
    # arXiv:1910.02054, table 1: 128 B parameters (stages 1, 2, 3) on 4, 64 and 1024 devices
    [(4, 1, 896), (4, 2, 704), (4, 3, 512), (64, 1, 536), (64, 2, 284), (1024, 1, 513), (1024, 2, 257), (1024, 3, 2)],
)
def test_table_1_of_the_paper(shards, stage, gigabytes):
    assert formulas.model_states(128_000_000_000, shards, stage).total / 1e9 == pytest.approx(gigabytes, abs=1)


def test_the_whole_is_the_sum_of_its_parts():
    states = formulas.model_states(1000, 8, 1)
    assert (states.parameters, states.gradients, states.optimizer) == (2000, 2000, 12 * 1000 / 8)


@pytest.mark.parametrize(("stage", "per_element"), [(0, 12), (1, 1.5), (2, 1.5), (3, 1.5)])
def test_stored_state_is_in_shards_from_stage_1(stage, per_element):
    assert formulas.stored(4096, 8, stage, itemsize=12) == 4096 * per_element


@pytest.mark.parametrize(("stage", "per_element"), [(0, 4), (1, 4), (2, 0.5), (3, 0.5)])
def test_accumulated_gradients_are_in_shards_from_stage_2(stage, per_element):
    assert formulas.accumulated(4096, 8, stage) == 4096 * per_element


@pytest.mark.parametrize(
    ("micro_batches", "stage", "over_bf16_bytes"),
    [(1, 0, 1.75), (1, 1, 1.75), (1, 2, 1.75), (1, 3, 2.625), (4, 0, 3.5), (4, 1, 2.625), (4, 2, 4.375), (4, 3, 10.5)],
)
def test_communication_of_eight_devices(micro_batches, stage, over_bf16_bytes):
    sent = formulas.communication(1_000_000, 8, stage, micro_batches=micro_batches)
    assert sent.total / 2_000_000 == over_bf16_bytes


def test_replicas_all_reduce_the_shard():
    # 2 replicas of 4 shards in fp32: the reduce-scatter sends 3/4 P, then the ring of two 2 x 1/2 of P/4.
    sent = formulas.communication(1024, 4, 2, replicas=2, compute=4)
    assert (sent.gather, sent.reduce, sent.replicate) == (0.75 * 4096, 0.75 * 4096, 1024)
    assert formulas.communication(1024, 4, 0, replicas=2, compute=4).reduce == 2 * 7 / 8 * 4096


def test_chosen_reduction_dtype_holds_everywhere():
    sent = formulas.communication(1000, 4, 1, micro_batches=4, replicas=2, reduce=2)
    assert (sent.gather, sent.reduce, sent.replicate) == (1500, 1500, 500)
