"""Where experiments run: hosts emulated on this machine, those of a hostfile, or this one alone.

`launcher` starts a module on them and ends it, `heartbeat` is how both ends know of each other.
"""

from typing import Literal

Launcher = Literal["pdsh", "openmpi"]
"""DeepSpeed's launchers that are served."""
