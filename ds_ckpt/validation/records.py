"""From comparisons to the records that `ds-ckpt validate` and guards read."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, cast

from ds_ckpt.config.verdicts import VerdictRecord, decisive
from ds_ckpt.telemetry.timings import ResidualStats
from ds_ckpt.validation.compare import Comparison


def records(comparisons: Iterable[Comparison]) -> list[VerdictRecord]:
    """One for each comparison of a file that has a method."""
    with_method = (one for one in comparisons if one.candidate.plugin.compression.method != "none")
    return [_record(one) for one in with_method]


def _record(one: Comparison) -> VerdictRecord:
    spec, about = one.plan.task.spec, cast(dict[str, Any], one.about)
    finished = [gap for gap in one.differences.values() if math.isfinite(gap)]
    whole = len(finished) == len(one.differences) and finished
    return VerdictRecord(
        preset=one.candidate.name,
        settings=decisive(one.candidate.plugin.compression),
        verdict=one.verdict,
        task=spec.words(),
        data=one.plan.task.source,
        model=one.plan.task.model,
        metric=spec.metric,
        margin=one.margin,
        seeds=len(one.differences),
        interval=(one.interval.low, one.interval.high) if one.interval else None,
        mean=sum(finished) / len(finished) if whole else None,
        fewer_bytes=one.fewer_bytes,
        steps=spec.steps,
        warm_up=one.warm_up,
        workers=spec.world,
        mode=one.mode,
        left=ResidualStats(error=one.left.error, residual_norm=one.left.residual_norm)
        if one.left
        else None,
        versions=about.get("versions", {}),
        date=about.get("date", ""),
    )
