"""`ds-ckpt doctor`: examine the installation."""

import json
from dataclasses import asdict

import typer

from ds_ckpt.cli.common import AsJson


def doctor(as_json: AsJson = False) -> None:
    """Examine versions, DeepSpeed hooks, launchers and memory limits.

    Exit 1 if the installed DeepSpeed lacks something that a hook requires.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from ds_ckpt.lab.doctor import examine

    findings = examine()
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        colours = {"ok": "green", "warning": "yellow", "missing": "yellow", "broken": "bold red"}
        table = Table("status", "group", "item", "found", "remedy", box=None, pad_edge=False)
        for finding in findings:
            texts = (finding.group, finding.name, finding.detail, finding.remedy)
            status = Text(finding.status, colours[finding.status])
            table.add_row(status, *(Text(text, overflow="fold") for text in texts))
        Console().print(table)
    if any(finding.status == "broken" for finding in findings):
        raise typer.Exit(1)
