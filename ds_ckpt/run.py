"""Run a training script with the plugin installed: `deepspeed --module ds_ckpt.run train.py ...`.

`ds-ckpt exec` does the same for any command. The script needs no change. DeepSpeed's launcher
passes `--local_rank=N` before or after the script's name; the script receives it.
"""

import os
import runpy
import sys

USAGE = "usage: deepspeed [launcher options] --module ds_ckpt.run SCRIPT.py|-m MODULE [options]"


def main(argv: list[str] | None = None) -> None:
    """Install the plugin, then run the script as `__main__`; SystemExit if that is impossible."""
    args = list(sys.argv[1:] if argv is None else argv)
    at = next((i for i, word in enumerate(args) if not word.startswith("-")), len(args))
    script = "".join(args[at : at + 1])
    is_module = args[:at][-1:] == ["-m"]
    # as in `python`: the script's own folder comes first, or with -m the current one
    sys.path.insert(0, os.getcwd() if is_module else os.path.dirname(os.path.abspath(script)))
    if not (is_module or os.path.isfile(script)):
        raise SystemExit(f"ds_ckpt.run: no script {script!r} in {os.getcwd()}\n{USAGE}")
    from ds_ckpt.engine.entry import install
    from ds_ckpt.errors import ConfigError

    install()
    sys.argv = [script, *args[: at - is_module], *args[at + 1 :]]
    try:
        if is_module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
    except ConfigError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
