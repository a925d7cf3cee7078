"""Run a training script with the plugin installed: `deepspeed --module ds_ckpt.run train.py ...`.

The script needs no change. DeepSpeed's launcher passes `--local_rank=N` before or after the
script's name; the script receives it.
"""

from __future__ import annotations

import os
import runpy
import sys

USAGE = "usage: deepspeed [launcher options] --module ds_ckpt.run SCRIPT.py [script options]"


def main(argv: list[str] | None = None) -> None:
    """Install the plugin, then run the script as `__main__`; SystemExit if that is impossible."""
    args = list(sys.argv[1:] if argv is None else argv)
    script = next((argument for argument in args if not argument.startswith("-")), "")
    if not os.path.isfile(script):
        raise SystemExit(f"ds_ckpt.run: no script {script!r} in {os.getcwd()}\n{USAGE}")
    from ds_ckpt.engine.entry import install
    from ds_ckpt.errors import ConfigError

    install()
    args.remove(script)
    sys.argv = [script, *args]
    # as in `python SCRIPT`, the script's own folder comes first
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    try:
        runpy.run_path(script, run_name="__main__")
    except ConfigError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
