"""Helpers shared by the commands: option parsing, error output, progress and output files."""

import contextlib
import errno
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from ds_ckpt.errors import DsCkptError, Problem

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Modules = Annotated[str, typer.Option(help="Class names or patterns of a plain model's blocks.")]
Tokens = Annotated[
    int | None, typer.Option(min=1, help="Sequence length, in tokens. [default: the model's]")
]


def file_option(description: str) -> Any:
    """Declare an option that takes an existing file."""
    return typer.Option(help=description, exists=True, dir_okay=False, readable=True)


def given_options(context: typer.Context) -> set[str]:
    """Return the parameters that are set on the command line."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source and source.name == "COMMANDLINE"}


def refuse_options(context: typer.Context, options: dict[str, str], why: str) -> None:
    """Raise typer.BadParameter if any of the options, with their parameters, is set."""
    given = given_options(context)
    if found := [option for option, parameter in options.items() if parameter in given]:
        raise typer.BadParameter(f"{', '.join(found)} would change nothing: {why}; leave out")


def split_names(listed: str) -> tuple[str, ...]:
    """Split a comma-separated list."""
    return tuple(filter(None, (word.strip() for word in listed.split(","))))


def parse_rate(text: str) -> float | None:
    """Parse `200mbit` or `1gbit` into Mbit/s; `unlimited` is None. Raises typer.BadParameter."""
    word = text.strip().lower()
    if word in ("unlimited", "none"):
        return None
    if found := re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", word):
        rate = float(found[1]) * {"k": 1e-3, "m": 1.0, "g": 1e3}[found[2]]
        if 0.1 <= rate <= 1e6:
            return rate
    raise typer.BadParameter(
        f"{text!r} is not a rate from 100kbit to 1000gbit: write 200mbit, 1.5gbit or unlimited"
    )


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)


def unusable(error: OSError, path: Path | None = None) -> DsCkptError:
    """Return the error of a file that cannot be read or written, with the path if it is known."""
    remedy = "name a place that you may read and write"
    if error.errno in _FULL:
        remedy = "free some space, then run the same command again"
    where, why = str(path or error.filename or "disk"), "the command uses a file there"
    problem = Problem(where, error.strerror or str(error), why, remedy)
    return DsCkptError(problem, headline="a file cannot be read or written")


def error_text(error: Exception) -> str | None:
    """Return what is printed without a traceback: this package's errors, those of files."""
    if isinstance(error, OSError) and error.errno in (*_FULL, *_NOT_ALLOWED):
        error = unusable(error)
    return str(error) if isinstance(error, DsCkptError) else None


@contextlib.contextmanager
def exit_on_error() -> Iterator[None]:
    """Print an expected error without a traceback, and exit with code 1. Every command has it."""
    try:
        yield
    except Exception as error:
        if (text := error_text(error)) is None:
            raise
        typer.echo(text, err=True)
        raise typer.Exit(1) from None


@contextlib.contextmanager
def progress(steps: int) -> Iterator[Callable[[str], None]]:
    """Yield a function to call when a step begins; it moves a bar if stderr is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("", total=1 + steps)
        yield lambda text: bar.update(task, description=text, advance=1)


def write_output(path: Path | None, to: Callable[[Path], object]) -> None:
    """Write a file that the user has named, if any."""
    if path is None:
        return
    try:
        to(path)
    except OSError as error:
        raise unusable(error, path) from None
    typer.echo(f"wrote {path}", err=True)  # stdout may be read by a program
