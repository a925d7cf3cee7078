"""Measure the links between nodes with the collectives' own backend: gloo, or NCCL on GPUs.

One process per node takes part. Each pair of nodes is measured while the others wait:

    latency     half of the round trip of 8 bytes, median
    rate        of each direction while both nodes send

The number of bytes doubles until sending takes long enough. The effect of a shaper's burst and of
TCP's slow start is then small. Payload is timed; headers take 4 to 5% of an Ethernet link with
frames of 1500 bytes. Payload at 95.6% of the nominal rate is a full link.
"""

import itertools
import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from ds_ckpt.errors import Problem, UnsupportedError
from ds_ckpt.exchange.transport import gather_objects
from ds_ckpt.lab.hosts.backends import Backend
from ds_ckpt.lab.hosts.heartbeat import Heartbeat, begin
from ds_ckpt.lab.hosts.launcher import check_hosts, launch

LINKS_FORMAT = "ds_ckpt links 3"
_PINGS = 60
_START_S, _PAIR_S = 120.0, 30.0
_FIRST_BYTES, _MESSAGE_BYTES = 1 << 20, 1 << 24


@dataclass(frozen=True)
class Pair:
    """Link between two nodes; payload each way while both nodes send."""

    first: str
    second: str
    latency_s: float
    bytes_per_s: float


def save(pairs: Sequence[Pair], path: Path) -> None:
    """Write JSON."""
    content = {"format": LINKS_FORMAT, "pairs": [asdict(pair) for pair in pairs]}
    path.write_text(json.dumps(content, indent=2) + "\n")


def load(path: Path) -> list[Pair]:
    """Read JSON; ValueError if `path` is not such a file."""
    content = json.loads(path.read_text())
    if not isinstance(content, dict) or content.get("format") != LINKS_FORMAT:
        raise ValueError(f"{path} does not have the format '{LINKS_FORMAT}'")
    if not (pairs := TypeAdapter(list[Pair]).validate_python(content.get("pairs"))):
        raise ValueError(f"{path} has no pairs of nodes")
    return pairs


def measure_pairs(heartbeat: Heartbeat, seconds: float, device: str) -> list[Pair]:
    """Measure every pair of nodes, `seconds` or more each; collective."""
    everyone = gather_objects((socket.gethostname(), os.environ.get("LOCAL_RANK", "0")))
    leaders = [rank for rank, (_, local) in enumerate(everyone) if local == "0"]
    pairs: list[Pair] = []
    for first, second in itertools.combinations(leaders, 2):
        names = everyone[first][0], everyone[second][0]
        heartbeat.beat(words=f"measuring {names[0]} - {names[1]}")
        found: list[Any] = [None]
        if dist.get_rank() in (first, second):
            leads = dist.get_rank() == first
            end = _End(second if leads else first, device)
            found = [Pair(*names, end.latency(leads), end.rate(seconds))]
        dist.broadcast_object_list(found, src=first)
        pairs.append(found[0])
    return pairs


class _End:
    """One end of a pair under measurement."""

    def __init__(self, peer: int, device: str) -> None:
        self.peer = peer
        self._out, self._in = torch.zeros(2, _MESSAGE_BYTES, dtype=torch.uint8, device=device)

    def latency(self, leads: bool) -> float:
        """Return half of the median round trip, in s."""
        times_s = []
        for _ in range(_PINGS):
            start_s = time.perf_counter()
            for sends in (leads, not leads):
                self._pass(8, sends=sends, receives=not sends)
            times_s.append((time.perf_counter() - start_s) / 2)
        return statistics.median(times_s[_PINGS // 4 :])

    def rate(self, seconds: float) -> float:
        """Return bytes/s each way of a transfer of `seconds` or more, equal at both ends."""
        total = _FIRST_BYTES
        while True:
            size = min(total, _MESSAGE_BYTES)
            self._pass(8)
            start_s = time.perf_counter()
            for _ in range(total // size):
                self._pass(size)
            took_s = self._longer(time.perf_counter() - start_s)
            if took_s >= seconds:
                return total / took_s
            total *= 2

    def _longer(self, took_s: float) -> float:
        self._out[:8].view(torch.float64).fill_(took_s)
        self._pass(8)
        return max(took_s, float(self._in[:8].view(torch.float64)))

    def _pass(self, size: int, *, sends: bool = True, receives: bool = True) -> None:
        out, into = self._out[:size], self._in[:size]
        # the receive first: gloo would else send in one direction at a time
        work = [dist.P2POp(dist.irecv, into, self.peer)] if receives else []
        work += [dist.P2POp(dist.isend, out, self.peer)] if sends else []
        for one in dist.batch_isend_irecv(work):
            one.wait()
        if out.is_cuda:
            torch.cuda.synchronize()


def probe(
    hosts: Backend,
    *,
    seconds: float = 1.0,
    on_event: Callable[[dict[str, Any]], object] = lambda event: None,
) -> list[Pair]:
    """Measure the links between two nodes or more, `seconds` or longer each.

    `on_event` receives `words` before each pair. Raises UnsupportedError, and as `launch`.
    """
    count = len(hosts.names)
    if count < 2:
        problem = Problem("hosts", str(count), "a link has two ends", "name two nodes or more")
        raise UnsupportedError(problem, headline="there is no link to probe")
    check_hosts(hosts)
    limit_s = _START_S + count * (count - 1) // 2 * (_PAIR_S + 4 * seconds)
    with tempfile.TemporaryDirectory(prefix="ds_ckpt_probe_") as temporary:
        folder = Path(temporary)
        job = {"seconds": seconds}
        launch(hosts, __name__, job, folder, limit_s=limit_s, on_event=on_event)
        return load(folder / "links.json")


def main() -> None:
    """Run one process of the probe."""
    from deepspeed.accelerator import get_accelerator

    heartbeat, job = begin("Measure links; started by deepspeed.")
    pairs = measure_pairs(heartbeat, job["seconds"], get_accelerator().current_device_name())
    if dist.get_rank() == 0:
        save(pairs, heartbeat.folder / "links.json")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
