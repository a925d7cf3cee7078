"""The simulated step: laws of its schedule, and steps that can be computed by hand."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_ckpt.lab.estimate.simulate import (
    GradientTimes,
    Link,
    Machine,
    Strategy,
    TimedBlock,
    Weights,
    at_least_s,
    in_a_row,
    simulate,
)

seconds, few_bytes, coding_s = st.floats(0, 1), st.floats(0, 8), st.floats(0, 1e-6)
machines = st.builds(
    Machine,
    hosts=st.integers(1, 4),
    local=st.integers(1, 3),
    network=st.builds(Link, st.floats(1e5, 1e8), st.floats(0, 0.01), duplex=st.booleans()),
    inside=st.builds(Link, st.floats(1e6, 1e9), st.floats(0, 0.001)),
    bus_bytes_per_s=st.floats(1e6, 1e9),
    call_s=st.floats(0, 0.001),
    module_s=st.floats(0, 0.001),
    streams=st.booleans(),
    slowest=st.floats(1, 2),
)
one_block = st.builds(
    TimedBlock,
    elements=st.integers(0, 1_000_000),
    trained=st.integers(0, 1_000_000),
    forward_s=seconds,
    backward_s=seconds,
    recompute_s=st.one_of(st.just(0.0), seconds),
    calls=st.integers(1, 6),
    offloaded_bytes=st.one_of(st.just(0), st.integers(1, 10**8)),
    kept=st.booleans(),
)
models = st.lists(one_block, min_size=1, max_size=5)
strategies = st.builds(
    Strategy,
    micro_steps=st.integers(1, 6),
    itemsize=st.sampled_from([2, 4]),
    gradients=st.builds(
        GradientTimes,
        link_bytes=few_bytes,
        inside_bytes=few_bytes,
        encode_s=coding_s,
        decode_s=coding_s,
        accumulate_s=coding_s,
        hops=st.integers(1, 5),
        once=st.booleans(),
        ring=st.booleans(),
    ),
    bucket=st.integers(100_000, 1_000_000),
    prefetch=st.sampled_from([0, 300_000]),
    weights=st.one_of(st.none(), st.builds(Weights, few_bytes, coding_s, coding_s)),
    hpz=st.booleans(),
    gathers_twice=st.booleans(),
    gathers_changed=st.booleans(),
    update_s=seconds,
)


def not_longer(one: float, other: float) -> bool:
    return one <= other * (1 + 1e-9) + 1e-9


@given(machines, models, strategies)
def test_between_the_busiest_resource_and_everything_in_turn(machine, blocks, strategy) -> None:
    step = simulate(machine, blocks, strategy)
    assert not_longer(at_least_s(machine, blocks, strategy), step.seconds)
    for resource in ("compute", "network", "inside", "bus"):
        busy_s = sum(s for (of, _), s in step.busy_s.items() if of == resource)
        assert not_longer(busy_s, step.seconds)
    assert not_longer(step.seconds, sum(step.busy_s.values()))


@given(machines, models, strategies, st.floats(0.1, 1))
def test_faster_links_fewer_bytes_and_less_work_are_never_slower(
    machine, blocks, strategy, share
) -> None:
    before = simulate(machine, blocks, strategy).seconds
    bus = replace(machine, bus_bytes_per_s=machine.bus_bytes_per_s / share)
    faster = [bus, replace(machine, slowest=1.0)]
    for name in ("network", "inside"):
        link = getattr(machine, name)
        wider = replace(link, bytes_per_s=link.bytes_per_s / share)
        for changed in (wider, replace(link, latency_s=link.latency_s * share)):
            faster.append(replace(machine, **{name: changed}))
    g, w = strategy.gradients, strategy.weights
    fewer = [
        replace(g, link_bytes=share * g.link_bytes, inside_bytes=share * g.inside_bytes),
        replace(g, encode_s=share * g.encode_s, decode_s=share * g.decode_s),
    ]
    lighter = [replace(strategy, gradients=changed) for changed in fewer]
    if w is not None:
        lighter.append(replace(strategy, weights=replace(w, link_bytes=share * w.link_bytes)))
    less = [
        replace(b, forward_s=share * b.forward_s, backward_s=share * b.backward_s) for b in blocks
    ]
    found = [simulate(one, blocks, strategy) for one in faster]
    found += [simulate(machine, blocks, one) for one in lighter]
    found.append(simulate(machine, less, strategy))
    assert all(not_longer(step.seconds, before) for step in found)


@given(machines, models, strategies)
def test_left_out_micro_steps_and_steps_in_a_row_cost_the_same(machine, blocks, strategy) -> None:
    found = [simulate(machine, blocks, replace(strategy, micro_steps=n)) for n in (4, 5, 6)]
    first, second = (b.seconds - a.seconds for a, b in itertools.pairwise(found))
    assert first == pytest.approx(second, abs=1e-6)
    first, second = (b.link_bytes - a.link_bytes for a, b in itertools.pairwise(found))
    assert first == pytest.approx(second, abs=1.0)
    one, mean = simulate(machine, blocks, strategy), in_a_row(machine, blocks, strategy, 3)
    assert mean.link_bytes == pytest.approx(one.link_bytes, rel=1e-6, abs=1.0)
    if strategy.weights is None:  # else the first has no changes to wait for
        assert mean.seconds == pytest.approx(one.seconds, rel=1e-6, abs=1e-9)


# By hand: two hosts, 8 bytes a second, without streams.
PAIR = Machine(2, 1, Link(8.0), Link(1e12), streams=False)


def test_gathers_and_reductions_hold_up_a_step_without_streams() -> None:
    blocks = [TimedBlock(2, 2, forward_s=1.0, backward_s=2.0)] * 2
    strategy = Strategy(1, 4, GradientTimes(link_bytes=8.0, ring=True), bucket=2, prefetch=0)
    step = simulate(PAIR, blocks, strategy)
    gather_s = 2 * 4 * (1 / 2) / 8
    assert step.seconds == pytest.approx(2 * 3.0 + 4 * gather_s + 2 * 2 * 8 / 8)
    assert step.waits_s == pytest.approx(step.seconds - 6.0)
    assert step.link_bytes == 4 * 4 + 2 * 16
    # so does the plugin's exchange
    ours = simulate(PAIR, blocks, replace(strategy, gradients=GradientTimes(link_bytes=8.0)))
    assert ours.seconds == pytest.approx(step.seconds)


def test_local_gathers_cost_no_collective() -> None:
    """Python around a module runs in every pass, a collective's call only between ranks."""
    machine = replace(PAIR, network=Link(1e12), call_s=0.1, module_s=0.01)
    blocks = [TimedBlock(2, 0, forward_s=1.0, backward_s=2.0, calls=3)] * 4
    strategy = Strategy(2, 2, GradientTimes(0.0), prefetch=0)
    passes, few_s = 2 * 2 * 3 * 4, 2 * machine.call_s  # few: the update's two all-reduces
    far = simulate(machine, blocks, strategy).seconds - 2 * 12.0 - few_s
    assert far == pytest.approx(passes * (0.1 + 0.01))
    resident = replace(strategy, weights=Weights(0.0))
    alone = simulate(machine, blocks, resident).seconds - 2 * 12.0 - few_s - machine.call_s
    assert alone == pytest.approx(passes * 0.01)
    again = [replace(block, recompute_s=1.0) for block in blocks]
    more = simulate(machine, again, resident).seconds - simulate(machine, blocks, resident).seconds
    assert more == pytest.approx(2 * 4 * (1.0 + 3 * 0.01))


def test_every_call_waits_for_a_latency_a_hop() -> None:
    machine = replace(PAIR, hosts=4, network=Link(1e12, latency_s=0.5))
    strategy = Strategy(1, 2, GradientTimes(0.0), prefetch=0)
    step = simulate(machine, [TimedBlock(2, 0, forward_s=1.0, backward_s=2.0, calls=3)], strategy)
    gathers_s, few_s = 2 * 3 * 3 * 0.5, 2 * 2 * 2 * 0.5  # of 3 hops; twice there and back of 4
    assert step.seconds == pytest.approx(3.0 + gathers_s + few_s)


@pytest.mark.parametrize("slowest", [1.0, 1.5])
def test_all_wait_for_a_slow_host(slowest: float) -> None:
    gradients = GradientTimes(link_bytes=8.0, encode_s=0.5, decode_s=0.25)
    strategy = Strategy(1, 4, gradients, bucket=4, prefetch=0, update_s=0.1)
    block = [TimedBlock(4, 4, forward_s=1.0, backward_s=2.0, recompute_s=1.0)]
    step = simulate(replace(PAIR, slowest=slowest), block, strategy)
    link_s = 2 * 1.0 + 4.0  # backward has the recompute's gather
    assert step.seconds == pytest.approx(slowest * (4.0 + 0.1 + 4 * 0.75) + link_s)


@pytest.mark.parametrize(("burst_bytes", "gather_s"), [(0.0, 0.5), (2.0, 0.25), (4.0, 0.0)])
def test_a_shapers_bucket_passes_what_a_pause_has_earned(burst_bytes, gather_s) -> None:
    """Gathers of 4 bytes at 8 bytes a second, a pause of a second before each but the first."""
    blocks, strategy = (
        [TimedBlock(2, 0, 1.0, 1.0)] * 2,
        Strategy(1, 4, GradientTimes(0), prefetch=0),
    )
    bucket = replace(PAIR, network=Link(8.0, burst_bytes=burst_bytes))
    assert simulate(bucket, blocks, strategy).seconds == pytest.approx(4 * 1.0 + 4 * gather_s)


@pytest.mark.parametrize(
    ("duplex", "ring", "link_s"), [(True, False, 2.0), (False, False, 4.0), (False, True, 2.0)]
)
def test_a_link_that_queues_carries_all_to_alls_one_way_at_a_time(duplex, ring, link_s) -> None:
    machine = replace(PAIR, network=Link(8.0, duplex=duplex))
    strategy = Strategy(1, 4, GradientTimes(8.0, ring=ring), bucket=2)
    step = simulate(machine, [TimedBlock(0, 2, 1.0, 2.0)], strategy)
    assert step.seconds == pytest.approx(3.0 + link_s)
    assert step.link_bytes == 16


@pytest.mark.parametrize("micro_steps", [1, 2, 5])
def test_hpz_gathers_between_hosts_once_a_step(micro_steps: int) -> None:
    machine = Machine(2, 4, Link(1e6), Link(1e9))
    blocks = [TimedBlock(1000, 0, 1.0, 2.0, recompute_s=1.0)] * 3
    strategy = Strategy(micro_steps, 2, GradientTimes(0.0), hpz=True)
    once = 2 * 3 * 1000 * 7 / 8
    assert simulate(machine, blocks, strategy).link_bytes == pytest.approx(once)
    baseline = simulate(machine, blocks, replace(strategy, hpz=False)).link_bytes
    assert baseline == pytest.approx(2 * micro_steps * once)


def test_with_streams_gathers_hide_behind_computing() -> None:
    machine = replace(PAIR, streams=True)
    blocks = [TimedBlock(2, 0, forward_s=1.0, backward_s=2.0)] * 8
    strategy = Strategy(1, 4, GradientTimes(0.0), prefetch=2)
    hidden = simulate(machine, blocks, strategy)
    assert hidden.seconds == pytest.approx(8 * 3.0 + 0.5)  # the first has nothing to hide behind
    exposed = simulate(machine, blocks, replace(strategy, prefetch=0))
    assert exposed.seconds == pytest.approx(8 * 3.0 + 16 * 0.5)


def test_resident_weights_are_sent_once_a_step_beside_forward() -> None:
    machine = replace(PAIR, network=Link(1e6))
    size = 1 << 24  # a shard of 2^23 elements: two chunks
    blocks = [TimedBlock(size // 2, 0, forward_s=100.0, backward_s=0.0)] * 2
    strategy = Strategy(4, 2, GradientTimes(0.0), prefetch=0, weights=Weights(link_bytes=1.0))
    step = simulate(machine, blocks, strategy)
    assert step.sent_bytes == {"changed weights": size}
    # the second chunk arrives while the first block runs
    assert step.seconds == pytest.approx(4 * 200.0 + size / 2 / 1e6, rel=1e-6)
    baseline = simulate(machine, blocks, replace(strategy, weights=None))
    assert baseline.link_bytes == 4 * 2 * 2 * size / 2


def test_offloaded_inputs_come_back_one_block_ahead() -> None:
    machine = Machine(1, 1, Link(1.0), Link(1.0), bus_bytes_per_s=1.0)
    block = TimedBlock(0, 0, forward_s=1.0, backward_s=2.0, recompute_s=1.0, offloaded_bytes=1)
    strategy = Strategy(1, 2, GradientTimes(0.0))
    blocks = [block] * 3 + [replace(block, offloaded_bytes=0)]  # a plan leaves the last one's
    assert simulate(machine, blocks, strategy).seconds == pytest.approx(16.0)
    step = simulate(replace(machine, bus_bytes_per_s=0.1), blocks, strategy)
    assert step.seconds > 16.0
    assert step.busy_s["bus", "offload"] == pytest.approx(10.0 * 2 * 3)
