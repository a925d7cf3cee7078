"""`ds-ckpt exec`: run a command with the plugin in every process that it starts."""

import itertools
import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer


def execute(
    command: Annotated[list[str], typer.Argument(help="Command to run, after --.")],
    section: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Section for configurations without one: a JSON file with the `ds_ckpt` section "
            "or its content, or the word auto.",
        ),
    ] = None,
) -> None:
    """Run a command with the plugin in all of its Python processes, on every node.

    No file of yours changes: the plugin is active in each `deepspeed.initialize` of `deepspeed`,
    `torchrun`, `accelerate launch` or `python`. Returns the command's exit code.
    """
    from ds_ckpt import environment

    content = _read_section(section)
    missing = _check_files(command, content)
    _warn_of_stale_environment_file()
    environment.clear_stale_locks(0.0)
    with tempfile.TemporaryDirectory(prefix="ds_ckpt_exec_") as folder:
        reached = Path(folder, "reached")
        variables = environment.with_plugin(os.environ, content, reached)
        with environment.reported_compiling():
            code = _run(command, variables)
            code = code if code >= 0 else 128 - code  # a shell's code for a signal
        if missing and code:
            typer.echo(missing, err=True)  # again, after the tracebacks
        if not reached.exists():
            why = f"The command failed before that call, with exit status {code}."
            if code == 0:
                why = (
                    "Either nothing here trains with DeepSpeed, or something replaces PYTHONPATH, "
                    "runs python -I, -E or -S, or has its own sitecustomize.py in front."
                )
            typer.echo(
                "ds-ckpt exec: no process on this node called deepspeed.initialize with the "
                f"plugin. {why}",
                err=True,
            )
    raise typer.Exit(code)


def _check_files(command: Sequence[str], section: Any) -> str:
    """Refuse a missing hostfile and a DeepSpeed file with errors, which each rank would print.

    Returns a line about a missing DeepSpeed file: the script may write it.
    """
    from ds_ckpt.errors import ConfigError, Problem

    script = next((n for n, word in enumerate(command) if word.endswith(".py")), len(command))
    configs = ("--deepspeed_config", "--deepspeed_config_file", "--deepspeed")
    options, missing = ["--hostfile", "--deepspeed_hostfile"], ""
    options += ["-H"] * (Path(command[0]).name in ("deepspeed", "ds"))
    for n, (word, following) in enumerate(itertools.pairwise([*command, ""])):
        option, is_joined, value = word.partition("=")
        path = value if is_joined else following
        exists = os.path.exists(path)
        if n < script and option in options and path not in ("", "none") and not exists:
            why, remedy = "the launcher would train on this node alone", "correct the path"
            raise ConfigError(Problem(option, f"no file {path}", why, remedy))
        if option in configs and path.endswith(".json") and not path.startswith("-"):
            if exists:
                _check_configuration(path, section)
            else:
                missing = f"ds-ckpt exec: {option}: no file {path}; the script must write it"
                typer.echo(missing, err=True)
    return missing


def _check_configuration(path: str, section: Any) -> None:
    from ds_ckpt.config import load_file, parse
    from ds_ckpt.errors import ConfigError

    try:
        content = load_file(path)
    except ConfigError:  # without a section of ours DeepSpeed reads comments, too
        from ds_ckpt.engine.entry import read_source

        if not (content := read_source(path) or {}):
            raise
    parse({"ds_ckpt": section, **content}, source=path)


def _warn_of_stale_environment_file() -> None:
    """Warn if DeepSpeed would send variables of an earlier run to other nodes."""
    from ds_ckpt.environment import REACHED_FILE_VARIABLE

    name = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
    for file in {Path.home() / name, Path(name)}:  # where DeepSpeed looks
        if file.is_file() and f"{REACHED_FILE_VARIABLE}=" in file.read_text(errors="replace"):
            typer.echo(
                f"ds-ckpt exec: {file} has variables of an earlier run, which `accelerate launch` "
                "wrote. DeepSpeed prefers them to this run's on other nodes: remove these lines.",
                err=True,
            )


def _read_section(section: str | None) -> Any:
    if section is None or section == "auto":
        return section
    from ds_ckpt.config import load_file, parse

    content = load_file(section)
    content = content.get("ds_ckpt", content)
    parse({"zero_optimization": {"stage": 3}, "ds_ckpt": content}, source=section)
    return content


def _run(command: Sequence[str], variables: dict[str, str]) -> int:
    """Run the command, pass signals on to it, and return its code."""
    children: list[subprocess.Popen[bytes]] = []
    early: list[int] = []  # signals that came before Popen returned

    def pass_on(number: int, _frame: object) -> None:
        if number == signal.SIGINT and os.isatty(0):
            return  # the terminal has sent it to the command, too
        if children:
            children[0].send_signal(number)
        else:
            early.append(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(number) != signal.SIG_IGN:  # else nohup
            signal.signal(number, pass_on)
    try:
        children.append(subprocess.Popen(command, env=variables))
    except OSError as error:
        typer.echo(f"ds-ckpt exec: {command[0]}: {error.strerror}", err=True)
        return 127 if isinstance(error, FileNotFoundError) else 126
    for missed in early:
        children[0].send_signal(missed)
    return children[0].wait()
