"""Counters, memory tracker, time spans and step log."""

from ds_ckpt.telemetry.counters import Counters, CounterValues, Purpose, collective_bytes

__all__ = ["CounterValues", "Counters", "Purpose", "collective_bytes"]
