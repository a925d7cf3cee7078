"""`ds-ckpt doctor`: examine the installation."""

from __future__ import annotations

import json
from typing import Any

import typer

from ds_ckpt.cli.common import AsJson


def doctor(as_json: AsJson = False) -> None:
    """Examine versions, DeepSpeed hooks, launchers, memory limits and network interfaces.

    Exit 1 if the installed DeepSpeed lacks something that a hook requires.
    """
    from dataclasses import asdict

    from ds_ckpt.lab.doctor import examine

    findings = examine()
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        _print_findings(findings)
    if any(finding.status == "broken" for finding in findings):
        raise typer.Exit(1)


def _print_findings(findings: list[Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {"ok": "green", "warning": "yellow", "missing": "yellow", "broken": "bold red"}
    table = Table("", "item", "found", "remedy", box=None, pad_edge=False)
    group = ""
    for finding in findings:
        if finding.group != group:
            group = finding.group
            table.add_row("", Text(group, "bold"))
        table.add_row(
            Text(finding.status, colours[finding.status]),
            Text(f"  {finding.name}", overflow="fold"),
            Text(finding.detail, overflow="fold"),
            Text(finding.remedy, overflow="fold"),
        )
    Console().print(table)
