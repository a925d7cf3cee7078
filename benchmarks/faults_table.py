"""The fault table: what was done, how often, how it ended, in how long; how the next run goes on.

    sudo python -m benchmarks.faults_table [--times 3] [--only FAULT ...]

Two processes train a small Llama with Top-K, exchanged beside backward, save after every second of
6 steps, and meet the fault in the 4th; gloo over the loopback of a network of their own. Each ends
when it raises, as a user's script does. The time is from the fault to the end of the other process;
`lost` are steps that were done again. Then saved states of 2 to 4 processes with each damage, read
by as many or others: refused, or loaded to the bit. Without root the faults that need it are left
out.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import tempfile
from collections import Counter
from pathlib import Path

from tests.distributed.killing import ENDS_S, ROOM, WAIT_S, Ending, meet, smooth
from tests.distributed.pool import Pool
from tests.unit.test_state import DAMAGES, DTYPES, LAYOUTS, corrupted


def words(endings: list[Ending]) -> str:
    """One row's figures."""
    ends = [ending.ended_s for ending in endings if ending.ended_s is not None]
    how = "all go on"
    if ends:
        lost = sorted({ending.lost for ending in endings})
        how = f"ended in {max(ends):.1f} s at most, {lost[-1]} steps lost at most"
    equal = sum(ending.equal for ending in endings)
    return f"{how}; in the end to the bit {equal} of {len(endings)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=list(ENDS_S))
    parser.add_argument("--states", type=int, default=20, help="of each damage; 0: none")
    options = parser.parse_args()
    faults = list(ENDS_S) if options.only is None else options.only
    if os.geteuid():
        faults = [fault for fault in faults if fault not in ROOM and "link" not in fault]
    pool = Pool(2)
    with tempfile.TemporaryDirectory() as folder:
        without = smooth(pool, Path(folder) / "smooth") if faults else ([], 0)
        print(f"init_distributed was told to wait {WAIT_S:g} s\n")
        for fault in faults:
            where = [Path(folder) / f"{fault} {i}" for i in range(options.times)]
            endings = [meet(fault, pool, one, without) for one in where]
            print(f"{fault:32} {options.times} times: {words(endings)}", flush=True)
            ports = re.compile(r"(?<=\]):\d+")
            for said in sorted({ports.sub("", line) for e in endings for line in e.said}):
                first, *more = said.splitlines()
                print(f"    {first[:150]}{' ...' * bool(more)}")
        print()
        pool.stop()
        choose = random.Random(0)
        for damage in DAMAGES if options.states else ():
            ends = Counter(
                corrupted(
                    Path(folder) / "tag",
                    damage,
                    choose,
                    choose.choice(DTYPES),
                    choose.choice(LAYOUTS),
                    choose.choice(LAYOUTS),
                )
                for _ in range(options.states)
            )
            found = ", ".join(f"{how} {count}" for how, count in sorted(ends.items()))
            print(f"{damage:32} {options.states} times: {found}", flush=True)


if __name__ == "__main__":
    main()
