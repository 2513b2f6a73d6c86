"""``allreduced certs``: a small certificate authority, and certificates of nodes, for people who have none."""

from __future__ import annotations

import argparse
import os
import secrets
from datetime import UTC, datetime
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import TYPE_CHECKING

from allreduced.cli.arguments import Subparsers
from allreduced.cli.console import say
from allreduced.cli.extras import require
from allreduced.core.errors import ConfigError

if TYPE_CHECKING:
    from allreduced.daemon.authority import Issued

_EPILOG = """\
examples:
  allreduced certs ca                                once, on a machine that is safe
  allreduced certs node node-a node-b node-c         a certificate and a key for the agent of each node
  allreduced certs node gpu1 --dns gpu1.cluster --ip 10.0.0.1
  allreduced certs node --force node-a               a new one, before the old one ends

The certificate of a node is for its name (agent.node); that is the one that agents check. docs/security.md tells how to
set up mutual TLS, and how to replace certificates without a restart.
"""

_INSTALLED = "/etc/allreduced"


def add_parser(subparsers: Subparsers) -> None:
    """Add ``certs`` to the command line."""
    parser = subparsers.add_parser(
        "certs",
        help="make certificates for mutual TLS between agents",
        description="Make a small certificate authority, and certificates of nodes that it signs.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_subparsers(title="what to make", required=True, metavar="WHAT")
    ca = what.add_parser("ca", help="the authority: ca.pem and ca.key")
    ca.add_argument("--name", default="allreduced", help="its name, for people (default: %(default)s)")
    _common(ca, 3650)
    ca.set_defaults(execute=make_authority)
    node = what.add_parser("node", help="certificate and key of nodes: NAME.pem and NAME.key")
    node.add_argument("nodes", nargs="+", metavar="NAME", help="name of the node, as in agent.node")
    node.add_argument("--dns", action="append", default=[], metavar="NAME", help="a further DNS name; repeatable")
    node.add_argument(
        "--ip", action="append", default=[], type=_address, metavar="ADDRESS", help="an IP address; repeatable"
    )
    _common(node, 365)
    node.set_defaults(execute=make_nodes)


def _common(parser: argparse.ArgumentParser, days: int) -> None:
    add = parser.add_argument
    add("--directory", type=Path, default=Path("certs"), metavar="DIR", help="where files are (default: %(default)s)")
    add("--days", type=_days, default=float(days), metavar="N", help="how long it is valid (default: %(default)g)")
    add("--force", action="store_true", help="replace what is there")


def make_authority(arguments: argparse.Namespace) -> int:
    """Run ``certs ca``."""
    require("cryptography")
    from allreduced.daemon.authority import new_authority

    folder: Path = arguments.directory
    issued = new_authority(arguments.name, datetime.now(UTC), days=arguments.days)
    _write(folder, {"ca": issued}, force=arguments.force)
    say(f"made {folder / 'ca.pem'} and {folder / 'ca.key'}, valid until {_end(issued)}")
    say(f"keep {folder / 'ca.key'} to yourself: who has it can make a node; no agent needs it")
    say("next: allreduced certs node NAME…")
    return 0


def make_nodes(arguments: argparse.Namespace) -> int:
    """Run ``certs node``."""
    require("cryptography")
    from allreduced.daemon.authority import Issued, check_node_name, new_certificate

    folder: Path = arguments.directory
    if len(arguments.nodes) > 1 and (arguments.dns or arguments.ip):
        hint = "one node at a time"
        raise ConfigError("--dns and --ip are of one node, and several are named", path="node", hint=hint)
    for name in (*arguments.nodes, *arguments.dns):
        check_node_name(name)
    if "ca" in arguments.nodes:
        raise ConfigError("a node cannot be called 'ca' here: these are the authority's files", path="node")
    authority = Issued(_read(folder / "ca.pem"), _read(folder / "ca.key"))
    now = datetime.now(UTC)
    made = {
        node: new_certificate(
            authority,
            node,
            now,
            dns=arguments.dns,
            addresses=arguments.ip,
            days=arguments.days,
            called=f"the authority in {folder / 'ca.pem'}",
        )
        for node in dict.fromkeys(arguments.nodes)
    }
    _write(folder, made, force=arguments.force)
    for node, issued in made.items():
        say(f"made {folder / f'{node}.pem'} and {folder / f'{node}.key'}, valid until {_end(issued)}")
    first = next(iter(made))
    files = " ".join(str(folder / name) for name in ("ca.pem", f"{first}.pem", f"{first}.key"))
    for line in (
        "",
        f"copy to each node its own files and ca.pem, such as for {first}:",
        f"  scp {files} root@{first}:{_INSTALLED}/",
        f"  ssh root@{first} 'chown allreduced: {_INSTALLED}/{first}.key && chmod 600 {_INSTALLED}/{first}.key'",
        f"and into its {_INSTALLED}/agent.toml:",
        "  [agent]",
        f'  node = "{first}"',
        "  [security]",
        '  mode = "mtls"',
        f'  ca = "{_INSTALLED}/ca.pem"',
        f'  certificate = "{_INSTALLED}/{first}.pem"',
        f'  key = "{_INSTALLED}/{first}.key"',
    ):
        say(line)
    return 0


def _write(folder: Path, made: dict[str, Issued], *, force: bool) -> None:
    """Write all files or, where one is there and may not be replaced, none. Whoever reads one sees all of it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        files = [
            (folder / f"{name}.{kind}", data, mode)
            for name, issued in made.items()
            for kind, data, mode in (("key", issued.key, 0o600), ("pem", issued.certificate, 0o644))
        ]
        for path, _, _ in files:
            if path.exists() and not force:
                hint = "--force replaces it; what the old one is for ends with it"
                raise ConfigError(f"{path} is there already", path=str(path), hint=hint)
        for path, data, mode in files:
            _replace(path, data, mode)
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be written: {error.strerror}", path=str(folder)) from error


def _replace(path: Path, data: bytes, mode: int) -> None:
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            os.fchmod(file.fileno(), mode)  # whatever the umask says
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}",
            path=str(path),
            hint="make an authority first: allreduced certs ca; or name its folder by --directory",
        ) from error


def _end(issued: Issued) -> str:
    from allreduced.daemon.authority import expiry

    return expiry(issued.certificate).strftime("%Y-%m-%d")


def _address(text: str) -> IPv4Address | IPv6Address:
    try:
        return ip_address(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no IP address") from None


def _days(text: str) -> float:
    try:
        days = float(text)
    except ValueError:
        days = 0.0
    if not 0 < days <= 36500:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of days, above 0 and up to 36500")
    return days
