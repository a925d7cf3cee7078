"""Records of `ds-ckpt validate-accuracy`: verdicts on compression settings.

A record belongs to settings, not to a file: every file with the same settings is validated. Records
of `ds_configs/` are part of the package; a `verdicts.json` beside a configuration is read as well.
"""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from ds_ckpt.compression import methods
from ds_ckpt.config.compression import CompressionConfig
from ds_ckpt.config.models import plugin_model
from ds_ckpt.errors import Problem, StateError
from ds_ckpt.files import replacing
from ds_ckpt.telemetry.timings import ResidualStats

FILE_NAME = "verdicts.json"
SHIPPED = Path(__file__).parents[1] / FILE_NAME
Verdict = Literal["identical", "equivalent", "better", "worse", "different", "inconclusive"]
LossLimit = Literal["equal", "any"]
"""Accepted loss: `equal` is none that validation found."""
_KEYS = AliasChoices("residual_stats", "left")


class VerdictRecord(BaseModel):
    """One verdict on the settings of the file `preset`, with its conditions.

    Attributes:
        settings: result of `decisive`.
        betas: AdamW's, if they were not the task's own.
        metric, margin: relative held-out loss, or accuracy as a share.
        interval: difference to uncompressed training, 90%, positive is worse; None: diverged.
        steps, warm_up: of each run, and the number of uncompressed ones.
        residual_stats: the largest observed values; None without residuals.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    preset: str
    settings: dict[str, Any]
    verdict: Verdict
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
    residual_stats: ResidualStats | None = Field(validation_alias=_KEYS, serialization_alias="left")
    versions: dict[str, str]
    date: str

    def describe(self, *, details: bool = False) -> str:
        """Describe the verdict in less than 100 columns, or with all of its conditions."""
        unit, found = "%" if self.metric == "loss" else " points", "diverged"
        if self.interval is not None:
            low, high = (100 * bound for bound in self.interval)
            found = f"{low:+.2f} to {high:+.2f}{unit}"
        if not details:
            return f"{self.verdict}, {found}: {self.task.partition(',')[0]}, {self.workers} workers"
        found += f", margin {100 * self.margin:g}{unit}"
        if self.verdict == "inconclusive" and self.interval and self.interval[1] < self.margin:
            found += ": not worse by it"
        return (
            f"{self.verdict} ({found}; {self.fewer_bytes:.1f}x fewer gradient bytes) in "
            f"{self.task}, {self.model}, {self.seeds} seeds of {self.steps} steps, "
            f"{self.workers} workers"
        )


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    format: Literal["ds_ckpt verdicts 1"] = "ds_ckpt verdicts 1"
    verdicts: tuple[VerdictRecord, ...] = ()


def decisive(compression: CompressionConfig) -> dict[str, Any]:
    """Return the settings that influence results, by dotted key of the compression section."""
    known, found = methods(), compression.model_dump(mode="json")
    feedback, when = found["error_feedback"], compression.exchange.when
    flat = {key: found[key] for key in ("method", "rules", "warmup_steps", "min_numel")}
    for method in known.keys() & {*compression.methods_used()}:
        for section in known[method].depends_on():
            flat |= {f"{section}.{key}": value for key, value in found[section].items()}
    flat |= {f"error_feedback.{key}": feedback[key] for key in ("enabled", "dtype")}
    if feedback["dtype"] == "auto":  # the verdicts were measured with fp32
        flat["error_feedback.dtype"] = "fp32"
    if feedback["momentum"] != "none":
        flat["error_feedback.momentum"] = feedback["momentum"]
    if compression.warmup_bits is not None:
        flat["warmup_bits"] = compression.warmup_bits
    waits = compression.lossy and compression.error_feedback.enabled
    if when != "auto" and waits != (when == "accumulation_boundary"):
        flat["exchange.when"] = when
    return flat


def read_verdicts(path: Path) -> list[VerdictRecord]:
    """Return a file's records, none if there is no file; StateError if it has other content."""
    if not path.is_file():
        return []
    try:
        return list(_File.model_validate_json(path.read_text(encoding="utf-8")).verdicts)
    except (ValidationError, UnicodeDecodeError, OSError) as error:
        found = f"no record of this version ({str(error).splitlines()[0]})"
        why = "verdicts of validate-accuracy are read from it"
        problem = Problem(str(path), found, why, "remove the file, and validate again")
        raise StateError(problem, headline="the verdicts cannot be read") from error


def write_verdicts(path: Path, records: Iterable[VerdictRecord]) -> None:
    """Add to the file; a record replaces an older one of the same preset, settings and task."""

    def key(record: VerdictRecord) -> tuple[Any, ...]:
        conditions = record.task, record.data, record.model, record.mode, record.workers
        return record.preset, *conditions, json.dumps(record.settings, sort_keys=True)

    by_key = {key(record): record for record in [*read_verdicts(path), *records]}
    content = _File(verdicts=tuple(by_key[k] for k in sorted(by_key)))
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as unfinished:
        text = json.dumps(content.model_dump(mode="json", by_alias=True), indent=1)
        unfinished.write_text(f"{text}\n", encoding="utf-8")


def verdicts_on(
    compression: CompressionConfig, beside: Path | None = None, *, any_warm_up: bool = False
) -> list[VerdictRecord]:
    """Return one record of these settings per task, data, model and world; `beside` comes first.

    With `any_warm_up` the records of the nearest `warmup_steps`.
    """
    records = read_verdicts(beside.parent / FILE_NAME) if beside is not None else []
    wanted, steps = decisive(compression), compression.warmup_steps
    found: dict[int, dict[tuple[str, str, str, int], VerdictRecord]] = {steps: {}}
    for record in [*records, *read_verdicts(SHIPPED)] if compression.method != "none" else ():
        settings = _with_defaults(record.settings) or {"warmup_steps": steps}
        if {**settings, "warmup_steps": steps} == wanted:
            alike = found.setdefault(settings["warmup_steps"], {})
            alike.setdefault((record.task, record.data, record.model, record.workers), record)
    others = found.keys() - {steps} if any_warm_up and not found[steps] else ()
    return list(found[min(others, key=lambda other: abs(other - steps), default=steps)].values())


def _with_defaults(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Add the defaults of newer keys to a record's settings; None if a key is unknown."""
    try:
        plugin = plugin_model().model_validate({"compression": _section(settings)})
    except ValidationError:
        return None
    return decisive(plugin.compression)


def _section(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by dotted key as a section, without nulls."""
    found: dict[str, Any] = {}
    for path, value in settings.items():
        section, _, key = path.rpartition(".")
        if value is not None:
            (found.setdefault(section, {}) if section else found)[key] = value
    found["rules"] = tuple(_section(rule) for rule in found.get("rules", ()))
    return found


def allows(records: list[VerdictRecord], loss: LossLimit) -> bool:
    """Return whether the verdicts on settings, of all tasks, allow to train with them.

    "equal": every test of a loss was equivalent or better, and no accuracy was worse.
    """
    return loss == "any" or (any(r.metric == "loss" for r in records) and not refusing(records))


def refusing(records: Iterable[VerdictRecord]) -> list[VerdictRecord]:
    """Return the verdicts that "equal" does not accept."""
    accepted = {"identical", "equivalent", "better"}
    by_metric = {"loss": accepted, "accuracy": accepted | {"inconclusive"}}
    return [r for r in records if r.verdict not in by_metric[r.metric]]


def sections_on_record() -> dict[str, tuple[dict[str, Any], list[VerdictRecord]]]:
    """Return the package's validated compression sections, by the shortest name of their files."""
    by_section: dict[str, list[VerdictRecord]] = {}
    for record in read_verdicts(SHIPPED):
        section = _section(record.settings)
        if section.get("error_feedback", {}).get("enabled") is False:
            section["error_feedback"] = {"enabled": False}  # without residuals no dtype
        by_section.setdefault(json.dumps(section, sort_keys=True), []).append(record)
    found = {}
    for text, records in by_section.items():
        names = [r.preset.removeprefix("zero3_").removeprefix("block_") for r in records]
        found[min(names, key=len)] = (json.loads(text), records)
    return found


def describe_accuracy(
    compression: CompressionConfig, verdicts: list[VerdictRecord], *, details: bool = False
) -> list[str]:
    """Return one line per verdict, the worst first; none if the settings are lossless."""
    if not compression.lossy:
        return []
    if not verdicts:
        return ["accuracy never validated: ds-ckpt validate-accuracy FILE does it"]
    steps, other = compression.warmup_steps, verdicts[0].settings.get("warmup_steps")
    title = f"accuracy validated with warm-up {other}, not {steps}"
    if steps == other:
        title = "accuracy against uncompressed training"
    betas = {verdict.betas for verdict in verdicts}
    if len(betas) == 1 and (pair := betas.pop()):
        title += f", betas {pair[0]:g}, {pair[1]:g}"
    worst_first = sorted(verdicts, key=lambda one: -one.interval[1] if one.interval else -math.inf)
    lines = (f"  {verdict.describe(details=details)}" for verdict in worst_first)
    return [f"{title}; plus is worse:", *lines]
