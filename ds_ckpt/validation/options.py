"""What a call of the command asks for, and which options cannot be served or would do nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch

from ds_ckpt.config.verdicts import FILE_NAME
from ds_ckpt.errors import ConfigError, Problem
from ds_ckpt.validation.data import has_labels
from ds_ckpt.validation.store import Mode
from ds_ckpt.validation.tasks import DEFAULT_TASKS, KINDS, Kind


@dataclass(frozen=True)
class Wanted:
    """What the options ask for; see `commands.validate_accuracy`. Margins are shares; None is the
    default."""

    files: tuple[Path, ...]
    tasks: tuple[str, ...] | None = None
    seeds: int = 5
    margin: float | None = None
    accuracy_margin: float | None = None
    virtual_workers: int | None = None
    processes: int | None = None
    sizes: dict[str, Any] = field(default_factory=dict)
    device: str | None = None
    link_mbit: float | None = None
    self_check: int | None = None
    output: Path = Path("runs/accuracy")
    record: Path | None = None

    @property
    def records(self) -> list[Path]:
        """The files of verdicts."""
        return [self.output / FILE_NAME, *([self.record] if self.record else [])]

    @property
    def mode(self) -> Mode:
        """Who trains."""
        return "processes" if self.processes else "virtual"

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The tasks, in order."""
        if self.tasks:
            return cast(tuple[Kind, ...], tuple(self.tasks))
        data = self.sizes.get("data")
        if data is None:
            only_check = self.self_check and not self.files
            return ("language",) if only_check or self.sizes.get("model") else DEFAULT_TASKS
        return ("labelled",) if has_labels(data) else ("language",)


def check_options(wanted: Wanted) -> None:
    """Raises ConfigError with every one that is wrong."""
    problems: list[Problem] = []

    def wrong(where: str, found: str, why: str, remedy: str) -> None:
        problems.append(Problem(where, found, why, remedy))

    if not wanted.files and not wanted.self_check:
        wrong("CONFIG", "no file", "there is nothing to compare", "name a DeepSpeed JSON file")
    for kind in wanted.tasks or ():
        if kind not in KINDS:
            wrong("--tasks", kind, "no such task is known", f"choose from {', '.join(KINDS)}")
    if wanted.processes and wanted.virtual_workers:
        why = "both say who trains"
        wrong("--processes", f"{wanted.processes} beside --virtual-workers", why, "give one")
    if wanted.sizes.get("data") and wanted.tasks:
        builtin: Sequence[str] = [kind for kind in wanted.tasks if kind in ("digits", "topics")]
        if builtin:
            why = f"{', '.join(builtin)} have data of their own"
            wrong("--data", str(wanted.sizes["data"]), why, "--tasks language or labelled")
    if wanted.sizes.get("model") and set(wanted.kinds) & {"digits", "topics"}:
        why = "a checkpoint is for language or labelled"
        wrong("--model", str(wanted.sizes["model"]), why, "add --tasks language, or --data FILE")
    for option, path, right in (
        ("--output", wanted.output, wanted.output.is_dir() or not wanted.output.exists()),
        ("--record", wanted.record, wanted.record is None or not wanted.record.is_dir()),
    ):
        if not right:
            kind = "a folder" if option == "--output" else "a file"
            wrong(option, str(path), f"it is not {kind}", f"name {kind}, there or new")
    _check_idle(wanted, wrong)
    if wanted.device is not None and wanted.mode == "virtual":
        try:
            torch.empty(0, device=wanted.device)
        except (RuntimeError, AssertionError) as error:
            wrong("--device", wanted.device, str(error).splitlines()[0], "cpu, or cuda with a GPU")
    if wanted.sizes.get("attention") not in (None, "eager", "sdpa"):
        why = "the built-in model has two kinds"
        wrong("--attention", str(wanted.sizes["attention"]), why, "eager or sdpa")
    if problems:
        raise ConfigError(problems, headline="the comparison cannot be made with these options")


def _check_idle(wanted: Wanted, wrong: Callable[[str, str, str, str], None]) -> None:
    """Options that nothing would come of."""

    def idle(option: str, value: object, why: str) -> None:
        if value is not None:
            wrong(option, str(value), f"it does nothing {why}", "remove it")

    kinds = set(wanted.kinds)
    if wanted.mode == "processes":
        idle("--device", wanted.device, "with --processes, which train on DeepSpeed's accelerator")
        idle("--link-mbit", wanted.link_mbit, "with --processes, whose times are measured")
    if "language" not in kinds or wanted.sizes.get("model"):
        for name in ("hidden_size", "layers", "attention"):
            option = "--" + name.replace("_", "-")
            idle(option, wanted.sizes.get(name), "without the built-in language model")
    if kinds <= {"topics", "digits"}:
        idle("--length", wanted.sizes.get("length"), "where the task has a length of its own")
    if "language" not in kinds:
        idle("--margin", wanted.margin, "where verdicts are on accuracy: --accuracy-margin")
    if kinds == {"language"}:
        idle("--accuracy-margin", wanted.accuracy_margin, "where verdicts are on loss: --margin")
