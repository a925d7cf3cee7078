"""`ds-ckpt`: validate configurations, print the schema, look at the installation, emulate hosts.

Heavy imports stay inside the commands: `validate` and `schema` load no DeepSpeed.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from ds_ckpt.cli import hosts as commands
from ds_ckpt.cli import measure as measure_command
from ds_ckpt.cli import validate_accuracy as validation_commands
from ds_ckpt.cli.plan import plan
from ds_ckpt.cli.profile import profile

app = typer.Typer(
    name="ds-ckpt",
    help="Activation checkpointing and gradient compression for DeepSpeed ZeRO-3.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
EXAMPLES = {
    "validate": "ds-ckpt validate ds_configs/zero3_3bit.json",
    "schema": "ds-ckpt schema -o ds_ckpt.schema.json",
    "doctor": "ds-ckpt doctor",
    "profile": "ds-ckpt profile llama-7b --tokens 4096 --dtype bf16 --world 8 --limit-gib 80",
    "plan": 'ds-ckpt plan llama-7b --cluster "4 nodes x 8 A100, 100 Gbit/s" -o plan.json',
    "measure": "sudo ds-ckpt measure -o runs/first --rates 50mbit,1gbit",
    "report": "ds-ckpt report runs/first --against runs/second",
    "validate-accuracy": "ds-ckpt validate-accuracy ds_configs/zero3_3bit.json --tasks topics",
    "probe": "sudo ds-ckpt probe --rate 200mbit -o links.json",
    "hosts run": "sudo ds-ckpt hosts run --hosts 2 -- deepspeed train.py --deepspeed_config C.json",
    "hosts list": "ds-ckpt hosts list",
    "hosts down": "sudo ds-ckpt hosts down --all",
}
"""What `--help` of each command ends with."""


def _add(to: typer.Typer, name: str, function: Callable[..., None], **settings: Any) -> None:
    """With the docstring as help, in paragraphs that the terminal breaks, not the source."""
    text = inspect.getdoc(function) or ""
    paragraphs = [" ".join(part.split()) for part in text.split("\n\n")]
    settings |= {"help": "\n\n".join(paragraphs), "epilog": f"Example: `{EXAMPLES[name]}`"}
    to.command(name.split()[-1], **settings)(function)


_add(commands.hosts, "hosts run", commands.run, context_settings={"ignore_unknown_options": True})
_add(commands.hosts, "hosts list", commands.list_sets)
_add(commands.hosts, "hosts down", commands.down)
app.add_typer(commands.hosts, name="hosts")
_add(app, "probe", commands.probe)
_add(app, "validate-accuracy", validation_commands.validate_accuracy)
_add(app, "profile", profile)
_add(app, "plan", plan)
_add(app, "measure", measure_command.measure)
_add(app, "report", measure_command.report)
_AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"ds-ckpt {version('ds_ckpt')}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print it."),
    ] = False,
) -> None:
    """Activation checkpointing and gradient compression for DeepSpeed ZeRO-3."""


def validate(
    files: Annotated[list[Path], typer.Argument(help="DeepSpeed JSON files.")],
    as_json: _AsJson = False,
) -> None:
    """Check files: what would be active, or every problem with its remedy. Exit 1 if any is bad."""
    results = [_validate_one(path) for path in files]
    if as_json:
        typer.echo(json.dumps(results, indent=2))
    else:
        for result in results:
            _print_result(result)
    if not all(result["ok"] for result in results):
        raise typer.Exit(1)


def _validate_one(path: Path) -> dict[str, Any]:
    from dataclasses import asdict

    from ds_ckpt.config import load_file, parse
    from ds_ckpt.config.verdicts import accuracy_words, verdicts_on
    from ds_ckpt.errors import ConfigError, StateError

    result: dict[str, Any] = {"file": str(path), "ok": False, "summary": None, "problems": []}
    try:
        config = parse(load_file(path), source=str(path))
        verdicts = verdicts_on(config.compression, path, config.weights)
    except (ConfigError, StateError) as error:
        return result | {"problems": [asdict(problem) for problem in error.problems]}
    words = accuracy_words(config.compression, config.weights, verdicts)
    accuracy = [verdict.model_dump(mode="json") for verdict in verdicts]
    found = {"summary": config.summary(), "accuracy": accuracy, "accuracy_words": words}
    return result | {"ok": True, **found}


def _print_result(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(soft_wrap=True, highlight=False)
    problems = result["problems"]
    if result["ok"]:
        console.print(Text("OK   ", "bold green"), Text(f"{result['file']}: {result['summary']}"))
        for words in result["accuracy_words"]:
            console.print(Text("      " + words))
        return
    count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
    console.print(Text("BAD  ", "bold red"), Text(f"{result['file']}: {count}"))
    for index, problem in enumerate(problems, 1):
        console.print(Text(f"  {index}. {problem['where']}", "bold"))
        for label in ("found", "why", "remedy"):
            console.print(Text(f"     {label + ':':8}", "dim"), Text(problem[label]), sep="")


def schema(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write to this file.")
    ] = None,
) -> None:
    """Print the JSON Schema of the configuration, for editors."""
    from ds_ckpt.config import json_schema

    text = json.dumps(json_schema(), indent=2) + "\n"
    if output is None:
        typer.echo(text, nl=False)
        return
    commands.write(output, lambda path: path.write_text(text, encoding="utf-8"))


def doctor(as_json: _AsJson = False) -> None:
    """Look at versions, the hooks into DeepSpeed, launchers, memory limits and network interfaces.

    Exit 1 if the installed DeepSpeed lacks what a hook leans on.
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
    table = Table("", "what", "found", "what to do", box=None, pad_edge=False)
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


_add(app, "validate", validate)
_add(app, "schema", schema)
_add(app, "doctor", doctor)
