"""Measure the links between hosts with mpi4py; torch is not imported.

    mpirun -n HOSTS --hostfile H --map-by node python -m ds_ckpt.lab.hosts.probe --out F

One process per host. Each pair of hosts is measured while the others wait:

    latency     half of the round trip of 8 bytes, median
    one way     a stream of messages, timed at the receiver, in each direction
    both ways   two streams at once

A stream begins with a warm-up that is not timed: a shaper's burst and TCP's slow start. Payload is
timed; headers take 4 to 5% of an Ethernet link with frames of 1500 bytes, so payload at 95.6% of
the nominal rate is a full link. mpi4py's own `bench pingpong` measures neither directions nor two
streams at once.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from ds_ckpt.errors import Problem, UnsupportedError
from ds_ckpt.lab.hosts.backends import Hostfile
from ds_ckpt.lab.hosts.emulated import EmulatedHosts
from ds_ckpt.lab.hosts.launcher import LOG, LaunchError, run

FORMAT = "ds_ckpt links 1"
_PINGS = 60
_START_S, _PAIR_S = 60.0, 30.0
_WARM_UP_S = 0.4
_IN_FLIGHT_S = 0.5
"""Messages in flight, as link time: more than queues on the way may hold."""
_IN_FLIGHT_BYTES = 1 << 26
_SMALL_BYTES, _LARGE_BYTES = 1 << 15, 1 << 20
"""Message sizes for slow and fast links; small messages complete in order."""
_FAST_BYTES_PER_S = 5e8
_TAG, _SYNC_TAG = 7, 8
_BEGUN = "measuring "


@dataclass(frozen=True)
class Pair:
    """Link between two hosts. Rates are of payload; forward is from the first to the second.

    `both_*` rates are measured while both hosts send.
    """

    first: str
    second: str
    latency_s: float
    forward_bytes_per_s: float
    backward_bytes_per_s: float
    both_forward_bytes_per_s: float
    both_backward_bytes_per_s: float


@dataclass(frozen=True)
class Links:
    """Links between all pairs of hosts."""

    hosts: tuple[str, ...]
    pairs: tuple[Pair, ...]

    def save(self, path: Path) -> None:
        """Write JSON."""
        path.write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> Links:
        """Read JSON; ValueError if `path` is not such a file."""
        content = json.loads(path.read_text())
        if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
            raise ValueError(f"{path} does not have the format '{FORMAT}'")
        links = TypeAdapter(cls).validate_python(content)
        if not links.pairs:
            raise ValueError(f"{path} has no pairs of hosts")
        return links


def measure(comm: Any, seconds: float) -> Links | None:
    """Measure every pair of processes of an mpi4py communicator, `seconds` per stream.

    Returns None on all processes but the first.
    """
    from mpi4py import MPI

    hosts = comm.allgather(MPI.Get_processor_name())
    pairs = []
    for first in range(comm.size):
        for second in range(first + 1, comm.size):
            comm.Barrier()
            if comm.rank == 0:
                print(f"{_BEGUN}{hosts[first]} - {hosts[second]}", flush=True)
            seen = None
            if comm.rank in (first, second):
                end = _End(comm, second if comm.rank == first else first)
                seen = end.measure(comm.rank == first, seconds)
            reports = comm.gather(seen, root=0)
            if comm.rank == 0:
                # each end has timed what it received
                latency_s, backward, both_backward = reports[first]
                _, forward, both_forward = reports[second]
                rates = (forward, backward, both_forward, both_backward)
                pairs.append(Pair(hosts[first], hosts[second], latency_s, *rates))
    return Links(tuple(hosts), tuple(pairs)) if comm.rank == 0 else None


class _End:
    """One end of a pair under measurement."""

    def __init__(self, comm: Any, peer: int) -> None:
        self.comm, self.peer = comm, peer

    def measure(self, leads: bool, seconds: float) -> tuple[float, float, float]:
        """Return latency in s, and bytes/s received here, alone and with both sending."""
        latency_s = self.latency(leads)
        about = self.estimate(leads)
        size = _SMALL_BYTES if about < _FAST_BYTES_PER_S else _LARGE_BYTES
        window = max(4, round(min(about * _IN_FLIGHT_S, _IN_FLIGHT_BYTES) / size))
        stream = functools.partial(self.stream, size, window, seconds)
        forward = stream(sends=leads, receives=not leads)
        backward = stream(sends=not leads, receives=leads)
        return latency_s, backward if leads else forward, stream(sends=True, receives=True)

    def latency(self, leads: bool) -> float:
        """Return half of the median round trip, in s."""
        message = bytearray(8)
        times_s = []
        for _ in range(_PINGS):
            start_s = time.perf_counter()
            if leads:
                self.comm.Send(message, self.peer, _TAG)
                self.comm.Recv(message, self.peer, _TAG)
            else:
                self.comm.Recv(message, self.peer, _TAG)
                self.comm.Send(message, self.peer, _TAG)
            times_s.append((time.perf_counter() - start_s) / 2)
        return statistics.median(times_s[_PINGS // 4 :])

    def estimate(self, leads: bool) -> float:
        """Return a rough rate in bytes/s, equal at both ends, to choose sizes by."""
        size = 1 << 16
        while True:
            buffer = bytearray(size)
            self.meet()
            start_s = time.perf_counter()
            if leads:
                self.comm.Send(buffer, self.peer, _TAG)
            else:
                self.comm.Recv(buffer, self.peer, _TAG)
            self.meet()
            took_s = time.perf_counter() - start_s
            other_s: float = self.comm.sendrecv(
                took_s, self.peer, _SYNC_TAG, None, self.peer, _SYNC_TAG
            )
            took_s = max(took_s, other_s)
            if took_s > 0.1 or size >= _IN_FLIGHT_BYTES:
                return size / took_s
            size *= 2

    def stream(
        self, size: int, window: int, seconds: float, *, sends: bool, receives: bool
    ) -> float:
        """Stream messages of `size` bytes for `seconds` after the warm-up; return bytes/s received.

        `window` messages are in flight. The sender sets the first byte of its last message. It
        sends synchronously, because MPI would buffer small messages without limit.
        """
        comm, peer = self.comm, self.peer
        common, last = bytearray(size), bytearray(size)
        last[0] = 1
        buffers = deque(bytearray(size) for _ in range(window if receives else 0))
        self.meet()
        start_s = time.perf_counter()
        incoming = deque(comm.Irecv(buffer, peer, _TAG) for buffer in buffers)
        outgoing = deque(comm.Issend(common, peer, _TAG) for _ in range(window if sends else 0))
        arrivals_s: list[float] = []
        sending = sends
        while outgoing or incoming:
            now_s = time.perf_counter() - start_s
            while outgoing and outgoing[0].Test():
                outgoing.popleft()
                if sending:
                    sending = now_s < _WARM_UP_S + seconds
                    outgoing.append(comm.Issend(common if sending else last, peer, _TAG))
            while incoming and incoming[0].Test():
                incoming.popleft()
                arrivals_s.append(now_s)
                buffer = buffers.popleft()
                if buffer[0]:
                    for request in incoming:
                        request.Cancel()
                        request.Wait()
                    incoming.clear()
                else:
                    buffers.append(buffer)
                    incoming.append(comm.Irecv(buffer, peer, _TAG))
        self.meet()  # the next stream's messages must not find receives of this one
        return _rate(arrivals_s, size)

    def meet(self) -> None:
        """Synchronize with the peer."""
        one, other = bytearray(1), bytearray(1)
        self.comm.Sendrecv(one, self.peer, _SYNC_TAG, other, self.peer, _SYNC_TAG)


def _rate(arrivals_s: list[float], size: int) -> float:
    """Return bytes/s between the end of the warm-up and the last arrival; 0 without a stream."""
    timed_s = [moment for moment in arrivals_s if moment >= _WARM_UP_S]
    if len(timed_s) < 2 or timed_s[-1] == timed_s[0]:
        return 0.0
    return (len(timed_s) - 1) * size / (timed_s[-1] - timed_s[0])


def probe(
    hosts: EmulatedHosts | Hostfile,
    *,
    seconds: float = 1.0,
    on_pair: Callable[[str], object] = lambda words: None,
) -> Links:
    """Measure the links between hosts, which need this Python environment at the same path.

    Args:
        hosts: at least two.
        seconds: duration of a stream.
        on_pair: called with a description before each pair.

    Raises:
        UnsupportedError: no mpi4py, no mpirun, or fewer than two hosts.
        LaunchError: mpirun failed or did not end; the message has its output.
    """
    count = len(hosts.names)
    if count < 2:
        remedy = "name at least two, one a line: `host1 slots=8`"
        raise UnsupportedError(
            Problem(str(hosts.hostfile), f"{count} hosts", "a link has two ends", remedy),
            headline="there is no link to probe",
        )
    problems = []
    if importlib.util.find_spec("mpi4py") is None:
        found, remedy = "mpi4py is not installed", "pip install 'ds_ckpt[mpi]'"
        problems.append(Problem("mpi4py", found, "the probe uses MPI", remedy))
    beside = Path(sys.executable).with_name("mpirun")
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None:
        why = "it starts the probe on every host"
        remedy = "install Open MPI (Debian package openmpi-bin) on every host"
        problems.append(Problem("mpirun", "not on the PATH", why, remedy))
    if mpirun is None or problems:
        raise UnsupportedError(problems, headline="links cannot be probed here")
    argv = [mpirun, "-n", str(count), "--hostfile", str(hosts.hostfile.resolve())]
    argv += ["--map-by", "ppr:1:node"]
    argv += ["-x", "PYTHONPATH", sys.executable, "-m", "ds_ckpt.lab.hosts.probe"]
    argv.append(f"--seconds={seconds}")
    limit_s = _START_S + count * (count - 1) // 2 * (_PAIR_S + 3 * seconds)
    with tempfile.TemporaryDirectory(prefix="ds_ckpt_probe_") as temporary:
        folder = Path(temporary)
        out = folder / "links.json"
        begun = list[str]()

        def report_pairs() -> None:
            lines = (folder / LOG).read_text(errors="replace").splitlines(keepends=True)
            whole = [line for line in lines if line.startswith(_BEGUN) and line.endswith("\n")]
            for line in whole[len(begun) :]:
                begun.append(line)
                on_pair(line.strip())

        try:
            prepared = hosts.prepare([*argv, f"--out={out}"], folder)
            run(prepared, folder, limit_s=limit_s, poll=report_pairs)
            report_pairs()
        except LaunchError as error:
            headline = "the link probe did not finish; `mpirun ... hostname` is the shortest test"
            raise LaunchError(error.problems, headline=headline) from None
        return Links.load(out)


def main() -> None:
    """Run one process of the probe."""
    parser = argparse.ArgumentParser(description="Measure links; started by mpirun.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=1.0, help="Duration of each stream, s.")
    arguments = parser.parse_args()
    with contextlib.suppress(OSError):  # only root may; a busy machine would look like a slow link
        os.setpriority(os.PRIO_PROCESS, 0, -15)
    from mpi4py import MPI

    links = measure(MPI.COMM_WORLD, arguments.seconds)
    if links is not None:
        links.save(arguments.out)


if __name__ == "__main__":
    main()
