"""Keys and settings of the emulated hosts' own sshd and of the ssh that reaches them.

In `folder`: `ssh_config` for the client, `NAME.sshd` for each host, one host key and one user key,
`hosts` and `shadow` to be laid over those in /etc inside the hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ds_ckpt.hosts.tools import call, need

PORT = 2222


def write_files(folder: Path, names: Sequence[str], addresses: Sequence[str]) -> None:
    """Write keys and settings for hosts of these names and IPv4 addresses into `folder`."""
    for key in ("host_key", "user_key"):
        keygen = [need("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-C", "ds_ckpt"]
        call([*keygen, "-f", str(folder / key)])
    host_key = (folder / "host_key.pub").read_text()
    reached = [f"[{name}]:{PORT}" for name in (*names, *addresses)]
    (folder / "known_hosts").write_text("".join(f"{r} {host_key}" for r in reached))
    (folder / "hosts").write_text(
        "127.0.0.1 localhost\n"
        + "".join(f"{a} {n}\n" for a, n in zip(addresses, names, strict=True))
    )
    (folder / "shadow").write_text("root:*:19000:0:99999:7:::\n")
    (folder / "shadow").chmod(0o600)
    (folder / "ssh_config").write_text(
        f"Port {PORT}\nUser root\nIdentityFile {folder}/user_key\nIdentitiesOnly yes\n"
        f"UserKnownHostsFile {folder}/known_hosts\nStrictHostKeyChecking yes\nBatchMode yes\n"
        "ConnectTimeout 10\nServerAliveInterval 5\nServerAliveCountMax 3\n"
    )
    for name, address in zip(names, addresses, strict=True):
        (folder / f"{name}.sshd").write_text(
            f"Port {PORT}\nListenAddress {address}\nHostKey {folder}/host_key\n"
            f"AuthorizedKeysFile {folder}/user_key.pub\nPidFile none\nUsePAM no\n"
            "StrictModes no\nPermitRootLogin prohibit-password\nPasswordAuthentication no\n"
            "UseDNS no\nMaxStartups 100\nPrintMotd no\n"
        )
