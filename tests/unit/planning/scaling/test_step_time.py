"""The step time of layouts, against closed forms of a model of equal layers."""

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_transformer.config import Config, load
from hvd_transformer.gradients.transfer_sizes import LEAST_SHARE, MIN_BUCKETS, stage_bucket
from hvd_transformer.gradients.wire.choice import RATIOS
from hvd_transformer.planning.constants import Constants, Link
from hvd_transformer.planning.scaling.buckets import make_buckets
from hvd_transformer.planning.scaling.layer_work import LayerWork, ModelWork, Weight
from hvd_transformer.planning.scaling.layout import Layout, Machine
from hvd_transformer.planning.scaling.step_time import slowest_of, step_time

RATE, PARAMETERS, LAYERS = 1e12, 1e6, 8
FORWARD = 4e9  # FLOPs of a layer; backward twice as many
LAYER_SECONDS = 3 * FORWARD / (0.5 * RATE)
STEP = LAYERS * LAYER_SECONDS
FAST = Link(latency=0.0, bandwidth=1e30)


def machine(link: Link = FAST, *, devices_per_host: int = 1, **more: object) -> Machine:
    known = Constants(
        device="device",
        matmul={"fp32": {64: RATE}},
        training_fraction={"fp32": 0.5},
        memory_bandwidth=1e30,
        memory_bytes=2**40,
        optimizer_seconds=0.0,
        links={"gloo": {"host": link, "network": link}, "nccl": {"host": link, "network": link}},
    )
    return Machine(known.model_copy(update=more), "gloo", devices_per_host)


def model(sums: float = 0.0, backward: Sequence[float] = (), beside: Sequence[float] = ()) -> ModelWork:
    def layer(name: str, ranks: int) -> LayerWork:
        return LayerWork(
            name,
            [Weight(PARAMETERS / ranks)],
            FORWARD / ranks,
            2 * FORWARD / ranks,
            FORWARD / ranks,
            activations=1000 / ranks,
            forward_sums=[sums] if ranks > 1 else [],
            backward_sums=backward if ranks > 1 else [],
            beside_sums=beside if ranks > 1 else [],
        )

    whole, split = ([layer(f"{number}", ranks) for number in range(LAYERS)] for ranks in (1, 2))
    return ModelWork(1, 1000, 64, whole, split, 2)


def config(*words: str) -> Config:
    return load(overrides=["communication.bucket_mb=1", *words])  # a bucket per layer


def test_computing_alone_is_flops_over_the_rate_that_training_reached() -> None:
    assert step_time(model(), config(), Layout(1, 1, 1), machine()).total == pytest.approx(STEP)
    assert step_time(model(), config(), Layout(64, 1, 1), machine()).total == pytest.approx(STEP)  # infinite bandwidth
    assert step_time(model(), config(), Layout(1, 1, 1, 4, 1, 3), machine()).total == pytest.approx(12 * STEP)


def test_each_layer_takes_its_own_seconds_in_every_micro_batch() -> None:
    whole = step_time(model(), config(), Layout(1, 1, 1, 4, 1, 3), machine(layer_seconds=0.25))
    assert whole.total == pytest.approx(12 * (STEP + LAYERS * 0.25))
    split = step_time(model(), config(), Layout(1, 1, 2, 4, 1), machine(layer_seconds=0.25))
    # Two equal stages of four micro-batches: one more stage's time at each end.
    assert split.total == pytest.approx((4 + 1) * (STEP + LAYERS * 0.25) / 2)


def test_a_slow_link_shows_what_backward_cannot_hide() -> None:
    seconds = LAYER_SECONDS / 2  # of a bucket, shorter than a layer's backward: only the last one shows
    link = Link(latency=0.0, bandwidth=4 * PARAMETERS / seconds)
    found = step_time(model(), config(), Layout(2, 1, 1), machine(link))
    assert found.exposed == pytest.approx(seconds)
    assert found.messages.transfer == pytest.approx(LAYERS * seconds, rel=1e-4)  # and the step's sums
    # All of them at the end.
    late = step_time(model(), config("communication.overlap=false"), Layout(2, 1, 1), machine(link))
    assert late.exposed == pytest.approx(LAYERS * seconds)
    # Slower than backward: from the first bucket on the link is busy.
    slow = machine(Link(latency=0.0, bandwidth=4 * PARAMETERS / LAYER_SECONDS))
    first = LAYER_SECONDS * 2 / 3
    found = step_time(model(), config(), Layout(2, 1, 1), slow)
    assert found.exposed == pytest.approx(first + LAYERS * LAYER_SECONDS - LAYERS * first, rel=1e-4)
    assert found.bound == "bandwidth"


def test_latency_counts_per_message() -> None:
    link = Link(latency=LAYER_SECONDS, bandwidth=1e30)
    words = config("communication.overlap=false")
    found = step_time(model(), words, Layout(4, 1, 1), machine(link))
    # 8 buckets and the step's sums, which backward hides, each 2 (P - 1) messages.
    assert found.exposed == pytest.approx(8 * 6 * LAYER_SECONDS + max(0, 6 - 8 * 2 / 3) * LAYER_SECONDS)
    assert found.bound == "latency"


def test_compression_halves_the_transfer() -> None:
    link = Link(latency=0.0, bandwidth=1e6)
    plain, half = (
        step_time(
            model(), config(f"communication.compression={kind}"), Layout(2, 1, 1), machine(link)
        ).messages.transfer
        for kind in ("none", "fp16")
    )
    assert half == pytest.approx(plain / 2, rel=1e-4)  # the step's sums are not compressed


def test_buckets_are_those_of_training() -> None:
    """The rule of `parallel.model_stage.add_buffers`: where transfers overlap, four a stage, and embeddings apart."""
    layers = [LayerWork("embedding", [Weight(100.0, width=10)], 0.0, 0.0)]
    layers += [LayerWork(f"{number}", [Weight(40.0)], 0.0, 0.0) for number in range(4)]
    together = make_buckets(layers, 0, 5, 1000.0, math.inf)
    assert [(bucket.num_elements, bucket.at_end) for bucket in together] == [(260.0, True)]
    apart = make_buckets(layers, 0, 5, 100.0, math.inf, overlaps=True)
    assert [(bucket.num_elements, bucket.first_layer, bucket.at_end) for bucket in apart] == [
        (80.0, 3, False), (80.0, 1, False), (100.0, 0, True),
    ]  # fmt: skip
    assert stage_bucket(100 << 20, 40 << 20, 1, overlaps=True) == 10 << 20
    assert stage_bucket(100 << 20, 40 << 20, 1, overlaps=False) == 100 << 20
    assert stage_bucket(8 << 20, 400 << 20, 1, overlaps=True) == 8 << 20
    assert stage_bucket(100 << 20, 40 << 20, 64, overlaps=True) == 64 * LEAST_SHARE
    one = step_time(model(), load(overrides=[]), Layout(2, 1, 1), machine(Link(latency=1.0, bandwidth=1e30)))
    assert one.messages.latency == pytest.approx(2 * (MIN_BUCKETS + 1))  # and the step's sums


def test_rows_of_an_embedding_travel_in_8_bits_at_least() -> None:
    link = Link(latency=0.0, bandwidth=1e6)
    one = model()
    tied = [*one.whole[:-1], LayerWork("head", [Weight(PARAMETERS, width=10, dense=False)], FORWARD, 2 * FORWARD)]
    work = ModelWork(1, 100, 64, tied, tied, 2)
    seconds = {
        kind: step_time(work, config(f"communication.compression={kind}"), Layout(2, 1, 1), machine(link)).messages
        for kind in ("int8", "int4")
    }
    rows = 10 * 100 * 2 * 4 * RATIOS["int8"] / 2 / 1e6  # bytes sent by each of two ranks over bytes a second
    dense = {kind: found.transfer - rows for kind, found in seconds.items()}
    assert dense["int4"] / dense["int8"] == pytest.approx(RATIOS["int4"] / RATIOS["int8"], rel=1e-3)


def test_zero_gathers_before_forward_and_scatters_after_backward() -> None:
    link = Link(latency=0.0, bandwidth=1e9)
    whole = step_time(model(), config(), Layout(2, 1, 1), machine(link, optimizer_seconds=1e-6))
    words = config("parallel.optimizer_shard=state")
    sharded = step_time(model(), words, Layout(2, 1, 1), machine(link, optimizer_seconds=1e-6))
    assert sharded.messages.transfer == pytest.approx(whole.messages.transfer, rel=1e-4)  # half of it each way
    assert sharded.update == pytest.approx(whole.update / 2)
    words = config("parallel.optimizer_shard=gradients")
    often = step_time(model(), words, Layout(2, 1, 1, 4), machine(link))
    assert often.messages.transfer == pytest.approx(sharded.messages.transfer * 5 / 2, rel=1e-4)  # 4 ways back, 1 forth


def test_tensor_parallelism_splits_computing_and_waits_for_sums() -> None:
    found = step_time(model(sums=250.0), config(), Layout(1, 2, 1), machine(devices_per_host=2))
    assert found.total == pytest.approx(STEP / 2)
    link = Link(latency=0.0, bandwidth=1e6)  # a millisecond for 250 float32 numbers
    found = step_time(model(sums=250.0), config(), Layout(1, 2, 1), machine(link, devices_per_host=2))
    assert found.sums.total == pytest.approx(LAYERS * 1e-3)
    assert found.total == pytest.approx(STEP / 2 + LAYERS * 1e-3, rel=1e-3)
    # Four ranks: by the values at one and two.
    assert step_time(model(), config(), Layout(1, 4, 1), machine(devices_per_host=4)).compute == pytest.approx(STEP / 4)


def test_only_the_weight_gradient_of_its_own_layer_hides_a_sum_of_backward() -> None:
    weight_grads = FORWARD / 2  # of a layer on one of two ranks
    work = model(backward=[1500.0, 250.0], beside=[weight_grads / 4, 3 * weight_grads / 4])
    beside = weight_grads / (0.5 * RATE)  # seconds: 4 ms, of which 1 ms hide the first sum of 6 ms, and 3 the second
    link = Link(latency=0.0, bandwidth=1e6)
    found = step_time(work, config(), Layout(1, 2, 1), machine(link, devices_per_host=2))
    assert beside == pytest.approx(4e-3)
    assert found.sums.total == pytest.approx(LAYERS * (6e-3 - beside / 4))
    assert found.total == pytest.approx(STEP / 2 + found.sums.total, rel=1e-3)
    # A sum that takes all of the processor has no time in which others could be hidden.
    busy = Link(latency=0.0, bandwidth=1e6, cpu_seconds_per_byte=2e-6)
    found = step_time(work, config(), Layout(1, 2, 1), machine(busy, devices_per_host=2))
    assert found.sums.total == pytest.approx(LAYERS * 7e-3)


@pytest.mark.parametrize(("stages", "count"), [(2, 4), (4, 8), (8, 8)])
def test_pipeline_has_the_bubble_of_its_schedule(stages: int, count: int) -> None:
    found = step_time(model(), config(), Layout(1, 1, stages, count), machine(devices_per_host=stages))
    # (N - 1) / (M + N - 1) of the time: Narayanan et al. 2021, section 2.2.1.
    assert found.total == pytest.approx(STEP * count / stages * (count + stages - 1) / count)
    assert found.bubble / found.total == pytest.approx((stages - 1) / (count + stages - 1))
    assert found.stages == [(LAYERS // stages * stage, LAYERS // stages * (stage + 1)) for stage in range(stages)]


def test_crowding_slows_computing_on_a_full_host() -> None:
    known = machine(devices_per_host=5, crowding=1.4)
    assert step_time(model(), config(), Layout(1, 1, 1), known).total == pytest.approx(STEP)
    assert step_time(model(), config(), Layout(3, 1, 1), known).total == pytest.approx(1.2 * STEP)
    assert step_time(model(), config(), Layout(50, 1, 1), known).total == pytest.approx(1.4 * STEP)


def test_jitter_is_that_of_the_slowest_rank() -> None:
    # Expected maxima of normal samples: Harter 1961, table 1.
    for count, expected in ((2, 0.56419), (10, 1.53875), (100, 2.50759)):
        assert slowest_of(count) == pytest.approx(expected, rel=0.05)
    assert slowest_of(1) == 0
    found = step_time(model(), config(), Layout(100, 1, 1), machine(jitter=0.1))
    assert found.total == pytest.approx(STEP * (1 + 0.1 * slowest_of(100)))
    assert found.bound == "jitter"


def test_an_embedding_whose_rows_are_not_gathered_is_sent_at_the_end() -> None:
    one = model()
    tied = [*one.whole[:-1], LayerWork("head", [Weight(PARAMETERS, width=10)], FORWARD, 2 * FORWARD)]
    work = ModelWork(1, 1000, 64, tied)
    link = Link(latency=0.0, bandwidth=4 * PARAMETERS / (LAYER_SECONDS / 2))  # a bucket takes half a layer
    late = step_time(work, config("communication.embedding_rows=never"), Layout(2, 1, 1), machine(link))
    assert late.exposed == pytest.approx(2 * LAYER_SECONDS / 2)  # the last layer's, then the head's
    rows = step_time(work, config("communication.embedding_rows=always"), Layout(2, 1, 1), machine(link))
    gathered = 2 * 1000 * 10 * 4 / 2 / link.bandwidth  # two ranks' rows, of which each sends its own
    assert rows.exposed == pytest.approx(LAYER_SECONDS / 2 + gathered)


@given(dp=st.integers(1, 4096), more=st.integers(1, 4), bandwidth=st.floats(1e6, 1e12), latency=st.floats(0, 1e-2))
def test_more_replicas_never_make_a_step_faster(dp: int, more: int, bandwidth: float, latency: float) -> None:
    known = machine(Link(latency=latency, bandwidth=bandwidth), jitter=0.02)
    few, many = (step_time(model(), config(), Layout(count, 1, 1), known).total for count in (dp, dp * more))
    assert STEP * (1 - 1e-9) <= few <= many * (1 + 1e-9)
    assert math.isfinite(many)
