"""What an all_reduce takes on more devices, and what of it a step feels."""

import pytest

from raybench.stats.communication import Exposure, Link, ReduceTimes, fit_growth, wire_factor

TIMES = ReduceTimes(by_world={2: [(1e3, 0.01), (1e9, 3.0)], 4: [(1e3, 0.02), (1e9, 4.5)]})


def test_measured_sizes_are_met_and_larger_ones_go_by_bandwidth():
    assert TIMES.time_ms(2, 1e9) == pytest.approx(3.0)
    assert TIMES.time_ms(2, 2e9) == pytest.approx(6.0)
    assert 0.01 < TIMES.time_ms(2, 1e6) < 3.0


def test_more_devices_send_more_bytes_and_wait_for_more_steps():
    wire_ms = (4.5 - 0.02) * wire_factor(8) / wire_factor(4)
    assert TIMES.time_ms(8, 1e9) == pytest.approx(0.02 * 3 / 2 + wire_ms)


def test_times_of_one_device_alone_are_none():
    assert ReduceTimes.of([(1, 1e3, 0.1)]) is None


def test_a_link_takes_its_latency_for_each_message_and_doubling_of_nodes():
    link = Link(bus_gb_s=50.0, latency_us=20.0)
    assert link.time_ms(8, 4, 1e9, 10) == pytest.approx(10 * 0.02 * 2 + 1.75 * 20.0)


def test_what_fits_beside_the_computation_keeps_its_share_and_the_rest_is_exposed():
    exposure = Exposure(comm_ms=2.0, exposed_ms=1.0, hideable_ms=3.0, local_ms=5.0)
    assert exposure.growth_ms(3.0) == pytest.approx(0.5)
    assert exposure.growth_ms(4.0) == pytest.approx(0.5 + 1.0)


def test_growth_of_several_worlds_is_a_line_that_never_falls():
    constant, slope = fit_growth([2, 4], [1.5, 2.0])
    assert (constant, slope) == pytest.approx((0.5, 1.0))
    assert fit_growth([2], [1.5]) == (0.0, 1.5)
    assert fit_growth([2, 4], [2.0, 1.0])[1] == pytest.approx(0.0)
