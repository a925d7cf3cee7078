"""Start the commands of all ranks, a JSON list in a file, and end all when one fails.

`EmulatedHosts` runs this file. It imports no package, so ranks start at once.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

ranks: list[subprocess.Popen[bytes]] = []
try:
    with open(sys.argv[1], encoding="utf-8") as commands:
        for argv in json.load(commands):
            ranks.append(subprocess.Popen(argv, start_new_session=True))
    codes: list[int | None] = [None]
    while None in codes and not any(codes):
        time.sleep(0.1)
        codes = [rank.poll() for rank in ranks]
    failed = next(filter(None, codes), 0)
    sys.exit(failed if failed >= 0 else 128 - failed)  # a shell's code for a signal
finally:
    for rank in ranks:  # nsenter and the process that it has started in the host
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank.pid, signal.SIGKILL)
        rank.wait()
