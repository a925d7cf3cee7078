"""docs/keys.md and docs/commands.md: every key, every option of `ds-ckpt`, and the Python API.

python scripts/reference.py    # writes both
"""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import typer

from ds_ckpt.cli import EXAMPLES, app
from ds_ckpt.config import json_schema

DOCS = Path(__file__).resolve().parents[1] / "docs"
_HEAD = "Written by `python scripts/reference.py` from {source}: do not edit this page.\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _paths(schema: dict[str, Any]) -> dict[str, str]:
    """Return the shortest JSON path of every section, by its name in the schema."""
    found: dict[str, str] = {}
    left = [(path, key) for path, key in schema["properties"].items()]
    for path, key in left:
        one = key.get("anyOf", [key])[0]
        name = one.get("items", one).get("$ref", "").rpartition("/")[2]
        if name and name not in found:
            found[name] = path + "[]" * ("items" in one)
            inner = schema["$defs"][name]["properties"].items()
            left += [(f"{found[name]}.{k}", about) for k, about in inner]
    return found


def _kind(key: dict[str, Any], paths: dict[str, str]) -> str:
    """Describe the values of a key."""
    if "$ref" in key:
        anchor = re.sub(r"[^\w]", "", paths[key["$ref"].rpartition("/")[2]])
        return f"[section](#{anchor})"
    if values := key.get("enum", [key["const"]] if "const" in key else []):
        return ", ".join(f"`{json.dumps(value)}`" for value in values)
    if "anyOf" in key:
        return " or ".join(_kind(k, paths) for k in key["anyOf"] if k.get("type") != "null")
    kinds = key.get("type", "any")
    kinds = [kinds] if isinstance(kinds, str) else [k for k in kinds if k != "null"]
    signs = {"minimum": "at least", "exclusiveMinimum": "above"}
    signs |= {"maximum": "at most", "exclusiveMaximum": "below"}
    limits = [f"{word} {key[sign]}" for sign, word in signs.items() if sign in key]
    inner = f" of {_kind(key['items'], paths)}" if isinstance(key.get("items"), dict) else ""
    return ", ".join([" or ".join(kinds) + inner, *limits])


def keys() -> str:
    """All sections by path, `ds_ckpt` first."""
    schema = json_schema()
    lines = ["# Every key of the configuration", ""]
    lines += ["A heading is the path of a section in the file; `[]` means each element of a list."]
    lines += ["`ds-ckpt schema` prints the schema for an editor, `ds-ckpt validate FILE` checks a"]
    lines += ["file against it and against DeepSpeed's own settings.", ""]
    lines += [_HEAD.format(source="the JSON Schema")]
    paths = _paths(schema)
    for name, path in sorted(
        paths.items(), key=lambda item: (not item[1].startswith("ds_ckpt"), item[1])
    ):
        section = schema["$defs"][name]
        lines += [f"## `{path}`", "", " ".join(section.get("description", "").split()), ""]
        lines += ["| key | value | default | what it does, and costs |", "|---|---|---|---|"]
        for key, about in section["properties"].items():
            default = f"`{json.dumps(about['default'])}`" if "default" in about else "-"
            words = _cell(about.get("description", ""))
            lines.append(f"| `{key}` | {_cell(_kind(about, paths))} | {default} | {words} |")
        lines.append("")
    return "\n".join(lines)


def _type(hint: Any) -> str:
    """Describe the type of an option: text, a number, a file, or its possible words."""
    inner = [h for h in get_args(hint) if h is not type(None)]
    if get_origin(hint) is Literal:
        return ", ".join(map(str, inner))
    if inner:
        several = get_origin(hint) is list
        return ", ".join(map(_type, inner)) + (", several" if several else "")
    names = {str: "text", int: "whole number", float: "number", Path: "file", bool: "yes or no"}
    return names.get(hint, str(hint))


def _commands(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{before}{name} ")
        else:
            yield before + name, command


def commands() -> str:
    """All commands with their options and an example."""
    lines = ["# Every command", ""]
    lines += ["`ds-ckpt --install-completion` makes the shell complete them.", ""]
    lines += [_HEAD.format(source="the commands' own help")]
    for name, command in _commands(typer.main.get_command(app)):
        paragraphs = [textwrap.fill(part, 100) for part in (command.help or "").split("\n\n")]
        lines += [f"## ds-ckpt {name}", "", "\n\n".join(paragraphs), ""]
        lines += ["```bash", EXAMPLES[name], "```", ""]
        hints = get_type_hints(inspect.unwrap(command.callback))
        lines += ["| option | value | default | |", "|---|---|---|---|"]
        for option in command.params:
            if option.name == "help":
                continue
            argument = option.param_type_name == "argument"
            named = option.metavar or option.name.upper()
            shown = named if argument else ", ".join([*option.opts, *option.secondary_opts])
            value = _type(hints[option.name])
            default = option.default
            plain = isinstance(default, (str, int, float, Path)) and not argument
            said = f"`{default}`" if plain and default not in ("", False) else "-"
            help_ = _cell(getattr(option, "help", "") or "")
            lines.append(f"| `{shown}` | {_cell(value)} | {said} | {help_} |")
        lines.append("")
    names = "Method Codec register aligned section add_rows Expects Removed Compressor"
    compressor = [f"\n::: ds_ckpt.compression.{name}" for name in names.split()]
    return "\n".join([*lines, PYTHON, *compressor, ""])


PYTHON = """## Python
Public names of `import ds_ckpt`. Everything else is in the configuration, except [what a compressor
needs](#python-for-a-compressor). Lines with `:::` are docstrings on the site; in a shell:
`python -c 'import ds_ckpt.compression as c; help(c.Codec)'`.

::: ds_ckpt.engine.entry
    options:
      members: [initialize, attach, install, uninstall, session_of]
      show_root_heading: false
      show_root_toc_entry: false

::: ds_ckpt.engine.session.Session
    options:
      members: [detach, report, residuals, activation_plan, offload, partition, observe]

::: ds_ckpt.errors
    options:
      show_root_heading: false
      show_root_toc_entry: false

## Python for a compressor
Names to import from `ds_ckpt.compression`. [Add a compressor](add_a_compressor.md) has a complete
example.
"""


def main() -> None:
    (DOCS / "keys.md").write_text(keys(), encoding="utf-8")
    (DOCS / "commands.md").write_text(commands(), encoding="utf-8")


if __name__ == "__main__":
    main()
