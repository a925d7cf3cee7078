"""Helpers shared by the commands: option parsing, error output, progress and output files."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
_MBIT_PER_UNIT = {"kbit": 1e-3, "mbit": 1.0, "gbit": 1e3}


def file_option(description: str) -> Any:
    """Declare an option that takes an existing file."""
    return typer.Option(help=description, exists=True, dir_okay=False, readable=True)


def given_options(context: typer.Context) -> set[str]:
    """Return the parameters that are set on the command line."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source and source.name == "COMMANDLINE"}


def split_names(listed: str) -> tuple[str, ...]:
    """Split a comma-separated list."""
    return tuple(filter(None, (word.strip() for word in listed.split(","))))


def parse_rate(text: str) -> float | None:
    """Parse `200mbit` or `1gbit` into Mbit/s; `unlimited` is None. Raises typer.BadParameter."""
    word = text.strip().lower()
    if word in ("unlimited", "none"):
        return None
    for unit, factor in _MBIT_PER_UNIT.items():
        if word.endswith(unit):
            with contextlib.suppress(ValueError):
                rate = float(word.removesuffix(unit)) * factor
                if 0.1 <= rate <= 1e6:
                    return rate
    raise typer.BadParameter(
        f"{text!r} is not a rate from 100kbit to 1000gbit: write 200mbit, 1.5gbit or unlimited"
    )


@contextlib.contextmanager
def exit_on_error() -> Iterator[None]:
    """Print an error of this package without a traceback and exit with code 1."""
    from ds_ckpt.errors import DsCkptError

    try:
        yield
    except DsCkptError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None


@contextlib.contextmanager
def progress(steps: int) -> Iterator[Callable[[str], None]]:
    """Yield a function to call when a step begins; it moves a bar if stderr is a terminal.

    The time left is computed as if all steps took the same time.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = BarColumn(20), TimeRemainingColumn(compact=True), TextColumn("{task.description}")
    console = Console(stderr=True)
    hidden = not console.is_terminal
    with Progress(*columns, console=console, disable=hidden, transient=True) as bar:
        task = bar.add_task("", total=1 + steps)
        done = -1

        def begin_step(text: str) -> None:
            nonlocal done
            done += 1
            bar.update(task, description=text, completed=min(done, steps))

        yield begin_step


def write_output(path: Path | None, to: Callable[[Path], object]) -> None:
    """Write a file that the user has named, if any; exit with code 1 if that fails."""
    if path is None:
        return
    try:
        to(path)
    except OSError as error:
        typer.echo(f"{path} cannot be written: {error.strerror or error}", err=True)
        raise typer.Exit(1) from None
    typer.echo(f"wrote {path}", err=True)  # stdout may be read by a program
