"""Check that a reader could type the commands that documents name. Nothing is run.

`ds-ckpt` and `deepspeed` are checked by their own parsers, scripts by the options that their source
declares; files, modules, tests and extras that are named have to exist.
"""

import itertools
import os
import re
import shlex
from pathlib import Path
from typing import Any

import typer

from ds_ckpt.cli import app

ROOT = Path(__file__).resolve().parents[1]
UsageError = typer.BadParameter.__mro__[1]
OTHERS = ("cd", ".", "git", "apt", "ruff", "mypy", "lint-imports", "accelerate", "torchrun")
OTHERS += ("axolotl", "bash", "llamafactory-cli", "swift")


def check_command(command: str, *, named: bool = False) -> None:
    """Raise AssertionError, KeyError or a usage error if a reader could not type it.

    Files are looked for from the working directory.

    Args:
        named: it is in a sentence, where required options may be left out.
    """
    words = shlex.split(command, comments=True)
    while re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    program, *arguments = words[3:] if words[0] == "nice" else words
    if program == "ds-ckpt":
        _ds_ckpt(arguments, named)
    elif program == "deepspeed":
        _deepspeed(arguments, named)
    elif program == "pytest":
        _pytest(arguments)
    elif program in ("python", "python3"):
        if arguments[0] == "-c":
            compile(arguments[1], command, "exec")
        elif arguments[:2] != ["-m", "venv"]:
            _script(arguments)
    elif program == "pip":
        _pip(arguments)
    elif "/" in program:
        assert os.access(program, os.X_OK), program
        passed = {"test.sh": "-k --slow", "run": "--slow"}.get(Path(program).name, "")
        known = Path(program).read_text(encoding="utf-8") + passed
        assert all(word in known for word in arguments if word.startswith("-")), command
    else:
        assert program in OTHERS, program


def _ds_ckpt(arguments: list[str], named: bool) -> None:
    parser: Any = typer.main.get_command(app)
    name = "ds-ckpt"
    while hasattr(parser, "commands") and arguments:
        if arguments[0].startswith("-"):
            assert arguments[0] in {o for p in parser.params for o in p.opts}, arguments[0]
            return
        name, *arguments = arguments
        parser = parser.commands[name]
    inner = arguments[arguments.index("--") + 1 :] if "--" in arguments else []
    if name in ("run", "exec") and inner and inner != ["COMMAND"]:
        check_command(shlex.join(inner))
    if arguments:  # else the command is named, not typed
        try:
            parser.make_context(name, list(arguments))
        except UsageError as error:
            if not (named and type(error).__name__ in ("MissingParameter", "BadOptionUsage")):
                raise
    for word in arguments:
        if word.endswith(".json") and "/" in word and not word.startswith("runs/"):
            assert Path(word).exists(), word


def _deepspeed(arguments: list[str], named: bool) -> None:
    from deepspeed.launcher.runner import parse_args

    if named and not any(word.endswith(".py") for word in arguments):
        arguments = [*arguments, "hostfiles/two_hosts", "train.py"]
    try:
        given = parse_args(arguments)
    except SystemExit:
        raise AssertionError(f"deepspeed does not take {arguments}") from None
    script, rest = given.user_script, list(given.user_args)
    if given.module:
        assert script == "ds_ckpt.run", script
        script, *rest = rest
    if given.hostfile != "/job/hostfile":
        assert Path(given.hostfile).exists(), given.hostfile
    _script([script, *rest])


def _script(arguments: list[str]) -> None:
    """`SCRIPT OPTIONS` or `-m MODULE OPTIONS`."""
    script = Path(arguments[0])
    if arguments[0] == "-m":
        script = Path(*arguments[1].split("."))
        script = script / "__main__.py" if script.is_dir() else script.with_suffix(".py")
        arguments = arguments[1:]
    assert script.exists(), script
    if script.stem == "validate_accuracy":
        _ds_ckpt(["validate-accuracy", *arguments[1:]], named=True)
    elif "sys.argv" not in (source := script.read_text(encoding="utf-8")):  # else it has no parser
        declared = {*re.findall(r'"(--?[a-z][\w-]*)"', source)}
        if "add_config_arguments" in source:  # DeepSpeed's
            declared |= {"--deepspeed", "--deepspeed_config"}
        given = {word.partition("=")[0] for word in arguments[1:] if re.match("--?[a-z]", word)}
        assert given <= declared, (script, given - declared)
    for word in arguments:
        if word.endswith(".json") and script.parent.name == "examples":
            assert Path(word).exists(), word


def _pytest(arguments: list[str]) -> None:
    """Files by their path or, in a sentence, by their name alone; tests by -k."""
    file, *chosen = arguments
    found = [Path(file)] if "/" in file else sorted((ROOT / "tests").rglob(file))
    assert found, f"there is no {file}"
    assert found[0].exists(), file
    tests = re.findall(r"def (test_\w+)", found[0].read_text(encoding="utf-8"))
    words = [w for w in chosen if w not in ("-k", "--slow")]
    for either in " ".join(words).split(" or ") if words else ():
        assert any(either.strip() in test for test in tests), (file, either)


def _pip(arguments: list[str]) -> None:
    assert arguments[0] == "install"
    for word, value in itertools.pairwise(arguments):
        if word in ("-c", "-r"):
            assert Path(value).exists(), value
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for extras in re.findall(r"\[([\w,]+)\]", " ".join(arguments)):
        for extra in extras.split(","):
            assert re.search(rf"^{extra} = \[", project, re.M), extra
