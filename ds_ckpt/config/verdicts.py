"""What `ds-ckpt validate-accuracy` found about a compression section, read back from its record.

A record belongs to settings, not to a file: whatever file has the same compression section was
validated too. Those that come with the package are of the files in `ds_configs/`; a `verdicts.json`
beside a configuration is read as well. Keys that change no number (where residuals live, what
buckets are exchanged beside) are not compared.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from ds_ckpt.compression import methods
from ds_ckpt.config.compression import CompressionConfig
from ds_ckpt.config.load import RENAMED
from ds_ckpt.config.models import plugin_model
from ds_ckpt.config.weights import WeightsConfig
from ds_ckpt.errors import Problem, StateError
from ds_ckpt.files import replacing
from ds_ckpt.telemetry.timings import ResidualStats

FILE_NAME = "verdicts.json"
SHIPPED = Path(__file__).parents[1] / FILE_NAME
LEEWAY = 1.25
"""Limits from a record are what validation saw and a quarter more: another batch is no alarm."""


_DELTAS = "weights.deltas"
"""Of a record's settings, where changes of weights lose something."""
Word = Literal["identical", "equivalent", "better", "worse", "different", "inconclusive"]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class VerdictRecord(_Record):
    """One verdict, with all that it holds for.

    Attributes:
        preset: name of the file that was validated.
        settings: what decides the numbers, by key of the compression section.
        betas: AdamW's in these runs, where they were not the task's own.
        metric, margin: relative held-out loss, or accuracy as a share.
        interval: of the difference to dense training, 90%, more than 0 is worse; None where a run
            diverged.
        steps, warm_up: of each run, and how many of them were dense.
        left: the largest that was seen; None where nothing was left behind.
    """

    preset: str
    settings: dict[str, Any]
    verdict: Word
    task: str
    data: str
    model: str
    betas: tuple[float, float] | None = None
    metric: Literal["loss", "accuracy"]
    margin: float
    seeds: int
    interval: tuple[float, float] | None
    mean: float | None
    fewer_bytes: float
    steps: int
    warm_up: int
    workers: int
    mode: Literal["virtual", "processes"]
    left: ResidualStats | None
    versions: dict[str, str]
    date: str

    @field_validator("settings")
    @classmethod
    def _with_new_names(cls, settings: dict[str, Any]) -> dict[str, Any]:
        section = "compression."
        return {RENAMED.get(section + k, k).removeprefix(section): v for k, v in settings.items()}

    def words(self) -> str:
        """The verdict and what it holds for."""
        unit = "%" if self.metric == "loss" else " points"
        one_point = self.metric == "accuracy" and self.margin == 0.01
        margin = f"margin {100 * self.margin:g}{' point' if one_point else unit}"
        if self.interval is not None:
            low, high = (100 * bound for bound in self.interval)
            found = f"{low:+.2f} to {high:+.2f}{unit}, {margin}"
            if self.verdict == "inconclusive" and self.interval[1] < self.margin:
                found += ": not worse by it"
        else:
            found = f"diverged, {margin}" if self.verdict == "worse" else margin
        return (
            f"{self.verdict} ({found}; {self.fewer_bytes:.1f}x fewer gradient bytes) in "
            f"{self.task}, {self.model}, {self.seeds} seeds of {self.steps} steps, "
            f"{self.workers} workers"
        )


class _File(_Record):
    format: Literal["ds_ckpt verdicts 1"] = "ds_ckpt verdicts 1"
    verdicts: tuple[VerdictRecord, ...] = ()


def decisive(
    compression: CompressionConfig, weights: WeightsConfig | None = None
) -> dict[str, Any]:
    """What of the sections decides the numbers, flat, by dotted key of the compression section or
    as `weights.deltas`."""
    wanted = {"method", "rules", "warmup_steps", "min_numel"}
    known = methods()
    for method in compression.methods_used() & known.keys():
        wanted |= set(known[method].depends_on())
    found = compression.model_dump(mode="json")
    flat: dict[str, Any] = {}
    for key in sorted(wanted):
        value = found[key]
        if isinstance(value, dict):
            flat |= {f"{key}.{name}": part for name, part in value.items()}
        else:
            flat[key] = value
    for name in ("enabled", "dtype"):
        flat[f"error_feedback.{name}"] = found["error_feedback"][name]
    if found["error_feedback"]["momentum"] != "none":
        flat["error_feedback.momentum"] = found["error_feedback"]["momentum"]
    if compression.warmup_bits is not None:
        flat["warmup_bits"] = compression.warmup_bits
    when = compression.exchange.when
    held = compression.lossy and compression.error_feedback.enabled
    if when != "auto" and held != (when == "accumulation_boundary"):
        flat["exchange.when"] = when
    if weights is not None and weights.resident and weights.few_bits:
        flat[_DELTAS] = weights.deltas
    return flat


def read_verdicts(path: Path) -> list[VerdictRecord]:
    """The records of a file; none where there is no file.

    Raises:
        StateError: the file holds something else.
    """
    if not path.is_file():
        return []
    try:
        return list(_File.model_validate_json(path.read_text(encoding="utf-8")).verdicts)
    except (ValidationError, UnicodeDecodeError, OSError) as error:
        raise StateError(
            Problem(
                where=str(path),
                found=f"no record of this version ({str(error).splitlines()[0]})",
                why="verdicts of validate-accuracy are read from it",
                remedy="remove the file, and validate again",
            ),
            headline="the verdicts cannot be read",
        ) from error


def write_verdicts(path: Path, records: Iterable[VerdictRecord]) -> None:
    """Add to the file; a record takes the place of an older one of the same preset, settings, task
    and workers."""
    kept = {_place(record): record for record in read_verdicts(path)}
    kept |= {_place(record): record for record in records}
    order = sorted(kept.items(), key=lambda item: item[0])
    text = _File(verdicts=tuple(record for _, record in order)).model_dump(mode="json")
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as unfinished:
        unfinished.write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")


def _place(record: VerdictRecord) -> tuple[str | int, ...]:
    said = json.dumps(record.settings, sort_keys=True)
    found_on = record.task, record.data, record.model, record.mode, record.workers
    return record.preset, *found_on, said


def verdicts_on(
    compression: CompressionConfig,
    beside: Path | None = None,
    weights: WeightsConfig | None = None,
) -> list[VerdictRecord]:
    """Records of these settings: those beside the configuration's file, then the package's own.

    One for each task, data, model and number of workers, the first that is found.
    """
    wanted = decisive(compression, weights)
    if compression.method == "none" and _DELTAS not in wanted:
        return []
    records = read_verdicts(beside.parent / FILE_NAME) if beside is not None else []
    found: dict[tuple[str, str, str, int], VerdictRecord] = {}
    for record in [*records, *read_verdicts(SHIPPED)]:
        if _decisive_of(record.settings) == wanted:
            found.setdefault((record.task, record.data, record.model, record.workers), record)
    return list(found.values())


Loss = Literal["equal", "any"] | float
"""How much of it may be given up: none that validation saw, anything, or a share of it."""


def allows(records: Iterable[VerdictRecord], loss: Loss) -> bool:
    """Whether verdicts on settings, of any task, allow to train with them.

    "equal": every test of a loss came out equivalent, or better, and none of an accuracy was worse.
    A share: the whole interval of every loss lies below it, and no accuracy was worse.
    """
    if loss == "any":
        return True
    losses, others = list[VerdictRecord](), list[VerdictRecord]()
    for record in records:
        (losses if record.metric == "loss" else others).append(record)
    if not losses or any(record.verdict in ("worse", "different") for record in others):
        return False
    if loss == "equal":
        return all(r.verdict in ("identical", "equivalent", "better") for r in losses)
    return all(r.interval is not None and r.interval[1] <= loss for r in losses)


def sections_on_record() -> dict[str, tuple[dict[str, Any], list[VerdictRecord]]]:
    """Every compression section that the package has verdicts on, with them; by the shortest name
    of the files that have it."""
    found: dict[str, tuple[str, dict[str, Any], list[VerdictRecord]]] = {}
    for record in read_verdicts(SHIPPED):
        if _DELTAS in record.settings:
            continue
        name = record.preset.removeprefix("zero3_").removeprefix("block_")
        section = _section(record.settings)
        if section.get("error_feedback", {}).get("enabled") is False:
            section["error_feedback"] = {"enabled": False}  # no residuals that have a dtype
        key = json.dumps(section, sort_keys=True)  # settings that are gone made no difference
        former, section, records = found.get(key, (name, section, []))
        shorter = min(former, name, key=len)
        found[key] = (shorter, section, [*records, record])
    return {name: (section, records) for name, section, records in found.values()}


_CONCERN = {"worse": -3, "different": -2, "inconclusive": -1}


def accuracy_words(
    compression: CompressionConfig, weights: WeightsConfig, verdicts: list[VerdictRecord]
) -> list[str]:
    """A line on each thing that was validated, the worst first; none where nothing can be lost."""
    if not compression.lossy and not (weights.resident and weights.few_bits):
        return []
    if not verdicts:
        return ["accuracy never validated: ds-ckpt validate-accuracy FILE does it"]
    worst_first = sorted(verdicts, key=lambda one: (_CONCERN.get(one.verdict, 0), one.task))
    return ["accuracy against dense, plus is worse:", *(f"  {one.words()}" for one in worst_first)]


def largest(seen: Iterable[ResidualStats]) -> ResidualStats | None:
    """The largest values of all; None of none."""
    each = list(seen)
    if not each:
        return None
    return ResidualStats(max(s.error for s in each), max(s.residual_norm for s in each))


def with_leeway(seen: ResidualStats) -> ResidualStats:
    """Limits that a run like the validated one keeps to; an error above 1 there is none."""
    return ResidualStats(
        error=min(1.0, LEEWAY * seen.error), residual_norm=LEEWAY * seen.residual_norm
    )


def _decisive_of(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Of a record's settings; None where they have a key that nobody knows any more."""
    weights = {key: value for key, value in settings.items() if key == _DELTAS}
    gradients = {key: value for key, value in settings.items() if key != _DELTAS}
    try:
        return (
            decisive(
                plugin_model().model_validate({"compression": _section(gradients)}).compression
            )
            | weights
        )
    except ValidationError:
        return None


def _section(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted key as a section has them, without settings that are gone since and were
    what they always are now, and without nulls."""
    found: dict[str, Any] = {}
    for path, value in settings.items():
        section, _, key = path.rpartition(".")
        if section:
            found.setdefault(section, {})[key] = value
        elif value is not None:
            found[key] = dict(value) if isinstance(value, dict) else value
    for name in found.keys() & methods().keys():
        removed = methods()[name].removed
        found[name] = {
            k: v
            for k, v in found[name].items()
            if k not in removed or removed[k].values or removed[k].stays != v
        }
    if "rules" in found:
        found["rules"] = tuple(_section(rule) for rule in found["rules"])
    return found


def limits(compression: CompressionConfig) -> ResidualStats | None:
    """What the guard holds the run to: the section's numbers, or else what validation saw with
    some leeway.

    None where neither is known. A number that is absent beside one that stands is no limit.
    """
    guard = compression.guard
    if guard.error is None and guard.residual_norm is None:
        seen = largest(r.left for r in verdicts_on(compression) if r.left is not None)
        return None if seen is None else with_leeway(seen)
    return ResidualStats(
        error=guard.error if guard.error is not None else math.inf,
        residual_norm=guard.residual_norm if guard.residual_norm is not None else math.inf,
    )


def without_range(compression: CompressionConfig) -> Iterator[Problem]:
    """A guard that has nothing to hold the run to."""
    if compression.lossy and compression.guard.active and limits(compression) is None:
        yield Problem(
            where="$.ds_ckpt.compression.guard",
            found=f'action "{compression.guard.action}" without error and residual_norm',
            why="no verdict that comes with ds_ckpt is on these settings, so nobody knows what to "
            "expect of them",
            remedy="write the error and residual_norm that ds-ckpt validate-accuracy prints for "
            "this file, or remove the guard",
        )
