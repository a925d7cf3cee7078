"""Cost of `ds-ckpt exec` for a Python process that never imports DeepSpeed.

    python benchmarks/startup.py [--pairs 200]

Starts `python -c pass` with three environments in turn and prints, against the first one, the
median difference of wall time and of processor time per process, in ms:

    empty folder    PYTHONPATH has a folder without files
    exec            PYTHONPATH and variables as `ds-ckpt exec --section auto` sets them
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from ds_ckpt.environment import with_plugin


def start(variables: dict[str, str]) -> tuple[float, float]:
    """Seconds of wall and processor time of one process."""
    before, start_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, "-c", "pass"], env=variables, check=True)
    wall_s, after = time.perf_counter() - start_s, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=200)
    pairs = parser.parse_args().pairs
    plain = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    with tempfile.TemporaryDirectory() as folder:
        ways = {
            "plain": plain,
            "empty folder": {**plain, "PYTHONPATH": folder},
            "exec": with_plugin(plain, "auto", Path(folder, "reached")),
        }
        for variables in ways.values():
            start(variables)  # compiles what it imports
        times = [{name: start(variables) for name, variables in ways.items()} for _ in range(pairs)]
    wall, processor = ([1e3 * one["plain"][i] for one in times] for i in range(2))
    print(f"plain: wall {median(wall):.2f} ms, processor {median(processor):.2f} ms; {pairs} pairs")
    for name in list(ways)[1:]:
        more = [median(1e3 * (t[name][i] - t["plain"][i]) for t in times) for i in range(2)]
        print(f"{name}: wall {more[0]:+.2f} ms, processor {more[1]:+.2f} ms a process")


if __name__ == "__main__":
    main()
