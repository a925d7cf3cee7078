"""Run an `ip` or `tc` command of `EmulatedHosts` with pyroute2, on machines without iproute2."""

import sys

from pyroute2 import IPRoute

with IPRoute() as links:

    def index(name: str) -> int:
        """Return an interface's number."""
        return int(links.link_lookup(ifname=name)[0])

    match sys.argv[1:]:
        case ["ip", "link", "add", name, "type", "bridge"]:
            links.link("add", ifname=name, kind="bridge")
        case ["ip", "link", "add", name, "type", "veth", "peer", "name", peer, "netns", pid]:
            other = {"ifname": peer, "net_ns_pid": int(pid)}
            links.link("add", ifname=name, kind="veth", peer=other)
        case ["ip", "link", "set", name, "master", switch, "up"]:
            links.link("set", index=index(name), master=index(switch), state="up")
        case ["ip", "link", "set", name, "up"]:
            links.link("set", index=index(name), state="up")
        case ["ip", "address", "add", address, "dev", name]:
            own, length = address.split("/")
            links.addr("add", index=index(name), address=own, prefixlen=int(length))
        case ["tc", "qdisc", "replace", "dev", name, "root", kind, *values]:
            numbers = (int(value) if value.isdigit() else value for value in values[1::2])
            options = dict(zip(values[::2], numbers, strict=True))
            links.tc("replace", kind, index(name), parent=0xFFFFFFFF, **options)
        case unknown:
            raise SystemExit(f"unknown command: {unknown}")
