"""Counters, memory tracker, time spans and step log."""

from ds_ckpt.telemetry.counters import Counters, Purpose, Snapshot, sent_bytes

__all__ = ["Counters", "Purpose", "Snapshot", "sent_bytes"]
