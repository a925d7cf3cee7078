"""The arithmetic behind what an accelerator's trace says."""

from __future__ import annotations

import pytest

from ds_ckpt.profile.device import KernelSpan, busy, gaps, highest


def test_the_highest_sum_is_the_peak() -> None:
    assert highest([10, 5, -10, 3, 4, -12]) == 15
    assert highest([-5, 3]) == 0
    assert highest([]) == 0


def test_gaps_are_times_without_any_kernel() -> None:
    kernels = [
        KernelSpan(0.0, 1.0),
        KernelSpan(0.5, 2.0),
        KernelSpan(3.0, 4.0),
        KernelSpan(3.1, 3.2),
        KernelSpan(4.5, 5.0),
    ]
    span_s, idle_s = gaps(kernels[::-1])
    assert span_s == pytest.approx(5.0)
    assert idle_s == pytest.approx(1.5)
    assert gaps([]) == (0.0, 0.0)


def test_busy_counts_what_lies_inside_once() -> None:
    kernels = [KernelSpan(0.0, 1.0), KernelSpan(0.5, 2.0), KernelSpan(3.0, 9.0)]
    assert busy(kernels, KernelSpan(0.8, 4.0)) == pytest.approx(1.2 + 1.0)
    assert busy(kernels, KernelSpan(2.1, 2.9)) == 0.0
