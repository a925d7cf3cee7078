"""From what a person asks `ds-ckpt measure` for to a spec and a launch backend."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from ds_ckpt.config import load_file, parse
from ds_ckpt.errors import ConfigError, Problem
from ds_ckpt.hosts import Launcher
from ds_ckpt.hosts.backends import Backend, Hostfile, Loopback
from ds_ckpt.hosts.commands import parse_rate
from ds_ckpt.hosts.emulated import missing
from ds_ckpt.measure.cluster import account, cluster, rate_mbit
from ds_ckpt.measure.report import Report
from ds_ckpt.measure.run import emulated
from ds_ckpt.measure.spec import METHODS, POLICIES, SHAPE, Spec

CALIBRATION = "calibration"
DEFAULT_RATES: tuple[float | None, ...] = (200.0,)


def backend_of(
    spec: Spec,
    rates: tuple[float | None, ...] | None,
    console: Console,
    given: Collection[str] = (),
    *,
    hostfile: Path | None,
    loopback: bool,
    launcher: Launcher,
    interface: str | None,
    port: int,
    ssh_port: int | None,
) -> tuple[Spec, AbstractContextManager[Backend]]:
    """The spec with its place, and that place, to be entered.

    Rates that a place cannot give stay in the spec, and `check` refuses them; None are those that
    nobody has named. Raises typer.BadParameter where one of the options `given` has no meaning at
    that place.
    """
    if hostfile is None:
        refuse_unused(given, ("interface", "ssh_port"), "there is no --hostfile")
    else:
        refuse_unused(given, ("hosts", "slots", "on_loopback"), "the hostfile says so")
        machines = Hostfile(hostfile, interface, launcher, port, ssh_port)
        count, slots = len(machines.names), next(iter(machines.counts.values()))
        spec = replace(spec, where="hostfile", hosts=count, slots=slots, rates=rates or (None,))
        return spec, nullcontext(machines)
    reasons = missing()
    if loopback or reasons:
        refuse_unused(given, ("hosts", "launcher", "port"), "this runs on loopback")
        if not loopback:
            console.print(f"No emulated hosts here: {'; '.join(reasons)}.", highlight=False)
        here = Loopback(spec.slots if "slots" in given else 2)
        spec = replace(
            spec, where="loopback", hosts=1, slots=here.processes, rates=rates or (None,)
        )
        return spec, nullcontext(here)
    spec = replace(spec, where="emulated", rates=rates or DEFAULT_RATES)
    return spec, emulated(spec.hosts, spec.slots, launcher, port)


def refuse_unused(given: Collection[str], unused: Sequence[str], why: str) -> None:
    """Raises typer.BadParameter where somebody has given an option that would change nothing."""
    names = {"on_loopback": "loopback"}
    found = [f"--{names.get(n, n).replace('_', '-')}" for n in unused if n in given]
    if found:
        raise typer.BadParameter(f"{', '.join(found)} would change nothing, for {why}: leave out")


def rates_of(text: str | None) -> tuple[float | None, ...] | None:
    """`50mbit,unlimited` in Mbit/s; None where nobody has named any."""
    if text is None:
        return None
    found = tuple(parse_rate(rate) for rate in text.split(","))
    if len(set(found)) < len(found):
        raise typer.BadParameter(f"{text!r} names a rate twice")
    return found


def batches_of(text: str) -> tuple[int, ...]:
    """`2,4` as numbers, each once, the smallest first."""
    try:
        return tuple(sorted({int(word) for word in text.split(",")}))
    except ValueError:
        raise typer.BadParameter(f"{text!r}: write numbers with commas, such as 2,4") from None


def sections_of(
    policies: str, methods: str
) -> tuple[tuple[str, ...], tuple[str, ...], dict[str, dict[str, Any]]]:
    """Names of both lists; a name that ends in .json is a file, whose section is taken.

    Raises ConfigError where a file cannot be used, lacks the section, or has a name that is taken.
    """
    sections: dict[str, dict[str, Any]] = {}
    problems = []
    chosen = []
    for listed, section, known in (
        (policies, "activation", POLICIES),
        (methods, "compression", METHODS),
    ):
        names = []
        for name in filter(None, (word.strip() for word in listed.split(","))):
            if name.endswith(".json"):
                content = load_file(Path(name))
                parse(content, source=name)
                path, name = name, Path(name).stem
                own = content.get("ds_ckpt", {}).get(section)
                key = f"{section}/{name}"
                if name in known or key in sections:
                    why = "the report tells configurations apart by it"
                    problems.append(Problem(path, f"{name} is a name already", why, "rename it"))
                elif not own:
                    why = "nothing would differ from stock DeepSpeed"
                    found = f"no ds_ckpt.{section} section"
                    problems.append(Problem(path, found, why, "write one, or name another file"))
                else:
                    sections[key] = own
            names.append(name)
        chosen.append(tuple(names))
    if problems:
        raise ConfigError(problems, headline="these files make no configurations")
    return chosen[0], chosen[1], sections


def shape_of(text: str) -> dict[str, int]:
    found = {}
    for word in filter(None, text.split(",")):
        name, _, value = word.partition("=")
        if name not in SHAPE or not value.isdigit():
            raise typer.BadParameter(f"{word!r}: write NAME=NUMBER with one of {', '.join(SHAPE)}")
        found[name] = int(value)
    return found


def alike(
    spec: Spec,
    output: Path,
    measured: Callable[[Spec, Path], None],
    console: Console,
    text: str,
    hardware: Path | None,
    links: Path | None,
) -> tuple[Spec, list[str]]:
    """The spec at the rate that makes this machine like the named cluster, and why."""
    other = cluster(text, hardware=hardware, links=links)
    short = replace(
        spec,
        rates=(None,),
        policies=("none", "block"),
        methods=(),
        sections={},
        batches=spec.batches[:1],
        loss_steps=0,
        equal_memory=False,
        repetitions=min(spec.repetitions, 4),
    )
    folder = output.with_name(f"{output.name}-{CALIBRATION}")
    console.print("Measuring this machine on a link that is not shaped ...", highlight=False)
    measured(short, folder)
    (row,) = [r for r in Report.of(folder).findings.rows if r.configuration == "block/dense"]
    compute = [v.value for k, v in row.parts_s.items() if k.startswith(("compute", "recompute"))]
    here = {"compute_s": sum(compute), "link_bytes": row.number("link_bytes")}
    lines = account(other, **here)
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    rate = max(0.1, round(rate_mbit(other, **here), 1))
    return replace(spec, rates=(rate,)), lines
