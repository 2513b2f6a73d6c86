"""A network of network namespaces: each node has one of its own, with a cable to a bridge.

The namespaces have no names. Each lives as long as the process that holds it, which ends with its standard input: so
nothing stays behind, also when the tests are killed. An unprivileged user needs user namespaces.
"""

from __future__ import annotations

import shutil
import subprocess

PORT = 4123
MARK = "the command has ended: "
COMMAND_SECONDS = 20.0


class NotPermitted(Exception):
    """Namespaces cannot be made here; the text says why."""


class Namespace:
    """A network namespace and the shell that holds it and runs commands in it. ``outer``: the one to make it from."""

    def __init__(self, *unshare: str, outer: Namespace | None = None) -> None:
        command = [*(outer.prefix if outer is not None else ()), "unshare", *unshare, "--net", "sh"]
        self._shell = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    @property
    def pid(self) -> int:
        """The process that holds it."""
        return self._shell.pid

    @property
    def prefix(self) -> tuple[str, ...]:
        """Return what makes a command run in this namespace; the process stays the same one."""
        return ("nsenter", "--target", str(self.pid), "--user", "--net", "--preserve-credentials")

    def run(self, command: str) -> None:
        """Run a command of the shell.

        :raises NotPermitted: it failed.
        """
        stdin, stdout = self._shell.stdin, self._shell.stdout
        assert stdin is not None
        assert stdout is not None
        said = []
        try:
            stdin.write(f"{command}\necho '{MARK}'$?\n")
            stdin.flush()
        except BrokenPipeError:
            said.append(stdout.read())
        for line in stdout:
            if line.startswith(MARK):
                if line == f"{MARK}0\n":
                    return
                break
            said.append(line)
        raise NotPermitted(f"{command}: {''.join(said).strip() or 'no shell'}")

    def close(self) -> None:
        """Let go of it; it is gone when its last process is."""
        self._shell.communicate(timeout=COMMAND_SECONDS)


class Namespaces:
    """A network of ``nodes`` agents, each in a namespace of its own, whose cables can be pulled.

    ``rate``: what a node can send, such as ``50mbit``.

    :raises NotPermitted: the machine does not allow it.
    """

    def __init__(self, nodes: int, rate: str) -> None:
        for tool in ("unshare", "nsenter", "ip", "tc"):
            if shutil.which(tool) is None:
                raise NotPermitted(f"there is no command {tool}")
        self._spaces: list[Namespace] = []
        try:
            self._build(nodes, rate)
        except NotPermitted:
            self.close()
            raise

    def _build(self, nodes: int, rate: str) -> None:
        self._middle = Namespace("--user", "--map-root-user")
        self._spaces.append(self._middle)
        self._middle.run("ip link add bridge type bridge && ip link set bridge up")
        self._nodes = []
        for node in range(nodes):
            space = Namespace(outer=self._middle)
            self._spaces.append(space)
            self._nodes.append(space)
            space.run("ip link set lo up")
            self._middle.run(
                f"ip link add port{node} type veth peer name cable netns {space.pid} && "
                f"ip link set port{node} master bridge up"
            )
            space.run(
                f"ip addr add {address(node)}/24 dev cable && ip link set cable up && "
                f"tc qdisc add dev cable root tbf rate {rate} burst 128kb latency 50ms"
            )

    # Network

    def prefix(self, node: int) -> tuple[str, ...]:
        """See Network."""
        return self._nodes[node].prefix

    def arguments(self, node: int) -> tuple[str, ...]:
        """See Network."""
        peers = [f"--peer=node{other}={at(other)}" for other in range(len(self._nodes)) if other != node]
        return ("--listen", at(node), *peers)

    def environment(self) -> dict[str, str]:
        """See Network."""
        return {"ALLREDUCED_SECRET": "of the chaos tests"}

    def started(self, node: int, listen: str) -> None:
        """See Network."""

    def gone(self, node: int) -> None:
        """See Network."""

    def close(self) -> None:
        """See Network."""
        for space in reversed(self._spaces):
            space.close()
        self._spaces.clear()

    # Faults

    def pull_cable(self, node: int) -> None:
        """Cut the cable on the far side, where the node only sees that nothing comes."""
        self._middle.run(f"ip link set port{node} down")

    def down(self, node: int) -> None:
        """Take the node's own interface down: the routes are gone, and whoever sends on it is told so."""
        self._nodes[node].run("ip link set cable down")

    def heal(self) -> None:
        """Put all cables back."""
        for node, space in enumerate(self._nodes):
            self._middle.run(f"ip link set port{node} up")
            space.run("ip link set cable up")


def address(node: int) -> str:
    """Return the IP address of a node."""
    return f"10.77.0.{node + 1}"


def at(node: int) -> str:
    """Return where the agent of a node listens."""
    return f"tcp://{address(node)}:{PORT}"
