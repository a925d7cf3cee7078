"""Commands that documents name: whether a reader could type them. Nothing is run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import typer

from ds_ckpt.cli import app

ROOT = Path(__file__).resolve().parents[1]
UsageError = typer.BadParameter.__mro__[1]


def options_of(script: Path) -> set[str]:
    """Options that a script's parser knows, and those of argparse."""
    found = re.findall(r"add_argument\(\s*\"(-[\w-]+)\"", script.read_text(encoding="utf-8"))
    return {"--help", *found}


def check_command(command: str) -> None:
    """AssertionError or a usage error where a reader could not type it."""
    words = shlex.split(command)
    if words[0] == "sudo":
        words = words[1:]
    program, *arguments = words
    if program == "ds-ckpt":
        parser: Any = typer.main.get_command(app)
        while hasattr(parser, "commands"):
            name, *arguments = arguments
            parser = parser.commands[name]
        if arguments:  # else the command is named, not typed
            parser.make_context(name, list(arguments))
        for word in arguments:
            if word.endswith(".json") and "/" in word and not word.startswith("runs/"):
                assert (ROOT / word).exists(), word
    elif program == "pytest":
        file, *chosen = arguments
        tests = re.findall(r"def (test_\w+)", (ROOT / file).read_text(encoding="utf-8"))
        assert any(all(word in test for word in chosen if word != "-k") for test in tests), chosen
    else:
        script = next(ROOT / word for word in words if word.endswith((".py", ".sh")))
        assert script.exists(), script
        options = {
            word for word in words[words.index(str(script.relative_to(ROOT))) :] if word[:1] == "-"
        }
        assert options <= options_of(script), options - options_of(script)
