"""Assemble the command `ds-ckpt` from one file a command. Heavy imports stay inside these."""

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from ds_ckpt.cli import hosts
from ds_ckpt.cli.common import exit_on_error
from ds_ckpt.cli.doctor import doctor
from ds_ckpt.cli.execute import execute
from ds_ckpt.cli.measure import measure, report
from ds_ckpt.cli.plan import plan
from ds_ckpt.cli.profile import profile
from ds_ckpt.cli.validate import schema, validate
from ds_ckpt.cli.validate_accuracy import validate_accuracy

EXAMPLES = {
    "exec": "ds-ckpt exec -- deepspeed --hostfile hosts train.py --deepspeed_config zero3.json",
    "validate": "ds-ckpt validate ds_configs/zero3_3bit.json",
    "schema": "ds-ckpt schema -o ds_ckpt.schema.json",
    "doctor": "ds-ckpt doctor",
    "profile": "ds-ckpt profile llama-7b --tokens 4096 --dtype bf16 --world 8 --limit-gib 80",
    "plan": 'ds-ckpt plan llama-7b --cluster "4 nodes x 8 A100 80 GB, 100 Gbit/s" -o plan.json',
    "measure": "ds-ckpt measure -o runs/first --rates 50mbit,1gbit",
    "report": "ds-ckpt report runs/first",
    "validate-accuracy": "ds-ckpt validate-accuracy ds_configs/zero3_3bit.json --seeds 8",
    "probe": "ds-ckpt probe --rate 200mbit -o links.json",
    "hosts check": "ds-ckpt hosts check --hostfile hostfiles/two_hosts",
    "hosts run": "ds-ckpt hosts run --hosts 2 -- deepspeed train.py --deepspeed_config C.json",
}
"""Last line of each command's `--help`."""


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"ds-ckpt {version('ds_ckpt')}")
        raise typer.Exit


_VERSION = typer.Option(
    "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
)


def main(version: Annotated[bool, _VERSION] = False) -> None:
    """Activation checkpointing and gradient compression for DeepSpeed ZeRO-3."""


app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, callback=main)


def _add(to: typer.Typer, name: str, function: Callable[..., None], **settings: Any) -> None:
    """Register a command; its docstring, without the line breaks of the source, is the help."""
    paragraphs = (inspect.getdoc(function) or "").split("\n\n")
    text = "\n\n".join(" ".join(part.split()) for part in paragraphs)
    settings |= {"help": text, "epilog": f"Example: `{EXAMPLES[name]}`"}
    to.command(name.split()[-1], **settings)(exit_on_error()(function))


_add(hosts.hosts, "hosts check", hosts.check)
_add(hosts.hosts, "hosts run", hosts.run, context_settings={"ignore_unknown_options": True})
_add(app, "exec", execute, context_settings={"allow_interspersed_args": False})
_add(app, "validate", validate)
_add(app, "profile", profile)
_add(app, "plan", plan)
_add(app, "measure", measure)
_add(app, "report", report)
_add(app, "validate-accuracy", validate_accuracy)
app.add_typer(hosts.hosts, name="hosts")
_add(app, "probe", hosts.probe)
_add(app, "doctor", doctor)
_add(app, "schema", schema)
