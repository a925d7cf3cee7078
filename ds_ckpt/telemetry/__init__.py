"""Typed records with units, counters and sinks. Nothing here reads a clock on its own."""

from ds_ckpt.telemetry.counters import Counters, Purpose, Snapshot, sent_bytes

__all__ = ["Counters", "Purpose", "Snapshot", "sent_bytes"]
