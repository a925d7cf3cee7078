"""`ds-ckpt validate` and `ds-ckpt schema`: check configuration files without loading DeepSpeed."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ds_ckpt.cli.common import AsJson, write_output


def validate(
    files: Annotated[list[Path], typer.Argument(help="DeepSpeed JSON files.")],
    as_json: AsJson = False,
) -> None:
    """Check configuration files: print the active features, or problems with their remedies.

    Exit 1 if any file has a problem.
    """
    results = [_check(path) for path in files]
    if as_json:
        typer.echo(json.dumps(results, indent=2))
    else:
        for result in results:
            _print_result(result)
    if not all(result["ok"] for result in results):
        raise typer.Exit(1)


def _check(path: Path) -> dict[str, Any]:
    from ds_ckpt.config import load_file, parse
    from ds_ckpt.config.verdicts import accuracy_words, verdicts_on
    from ds_ckpt.errors import ConfigError, StateError

    result: dict[str, Any] = {"file": str(path), "ok": False, "summary": None, "problems": []}
    try:
        config = parse(load_file(path), source=str(path))
        verdicts = verdicts_on(config.compression, path)
    except (ConfigError, StateError) as error:
        return result | {"problems": [asdict(problem) for problem in error.problems]}
    words = accuracy_words(config.compression, verdicts)
    accuracy = [verdict.model_dump(mode="json") for verdict in verdicts]
    found = {"summary": config.summary(), "accuracy": accuracy, "accuracy_words": words}
    return result | {"ok": True, **found}


def _print_result(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(soft_wrap=True, highlight=False)
    if result["ok"]:
        console.print(Text("OK   ", "bold green"), Text(f"{result['file']}: {result['summary']}"))
        for words in result["accuracy_words"]:
            console.print(Text(f"      {words}"))
        return
    console.print(Text("BAD  ", "bold red"), Text(result["file"]))
    for problem in result["problems"]:
        console.print(Text(f"  {problem['where']}", "bold"))
        for label in ("found", "why", "remedy"):
            console.print(Text(f"     {label + ':':8}{problem[label]}"))


def schema(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write to this file.")
    ] = None,
) -> None:
    """Print the JSON Schema of the configuration, for editors."""
    from ds_ckpt.config import json_schema

    text = json.dumps(json_schema(), indent=2)
    if output is None:
        typer.echo(text)
    write_output(output, lambda path: path.write_text(f"{text}\n", encoding="utf-8"))
