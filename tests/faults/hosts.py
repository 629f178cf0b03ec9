"""Machines on one kernel: hosts with their own network, files, processes and Python environment.

A host is a process in new namespaces, and ends with the test's process, however that ends; with it
end its processes, its mounts and its network.  Nothing of it has a name in the system, so nothing
is left to remove.

The network between hosts is a program: each host has a TUN device, and `Network` passes the packets
on, after a delay, except those that are lost or between hosts that are cut off from each other.
It needs no netem, which many kernels lack.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import os
import random
import select
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

_TUNSETIFF, _TUN_WITHOUT_HEADER = 0x400454CA, 0x1001
_CLONE_NEWNET = 0x40000000
_PREFIX = "10.77.0."
#: Fewer packets, so that less is left to do here; still many for a micro-batch.
_MTU = 4000
_UNSHARE = (
    "setpriv --pdeathsig KILL"
    " unshare --net --mount --pid --uts --ipc --fork --kill-child --propagation private"
)
_ENTER = "nsenter --net --mount --pid --uts --ipc --root --wd"
_TOOLS = ("ip", "mount", "nsenter", "setpriv", "unshare")

# Mounts what a host sees of the system, and makes it the root.
_INIT = """
set -e
cd "$ROOT"
hostname "$NAME"
for each in bin sbin lib lib32 lib64; do
    if [ -L /$each ]; then cp -P /$each .
    elif [ -d /$each ]; then mkdir $each; mount --bind /$each $each; fi
done
mkdir -p usr etc proc dev tmp
mount --bind /usr usr
mount --bind /etc etc
mount --bind hosts etc/hosts
mount --rbind /dev dev
mount -t proc proc proc
while read -r from to; do
    mkdir -p "$to"
    mount --bind "$from" "$to"
    mount -o remount,bind,ro "$to"
done <mounts
ip link set lo up
echo ready
exec chroot . sleep infinity
"""


def why_not() -> str | None:
    """Return why there can be no hosts here, or None."""
    if os.geteuid() != 0:
        return "hosts with their own networks need root"
    absent = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if absent:
        return f"hosts need {', '.join(absent)} (Debian: iproute2, util-linux)"
    return None if Path("/dev/net/tun").exists() else "hosts need /dev/net/tun"


@contextlib.contextmanager
def _inside_network(pid: int) -> Iterator[None]:
    """Move this thread into the network of a process for a while."""
    setns = ctypes.CDLL(None, use_errno=True).setns
    with open("/proc/thread-self/ns/net") as own, open(f"/proc/{pid}/ns/net") as other:
        assert setns(other.fileno(), _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        try:
            yield
        finally:
            assert setns(own.fileno(), _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())


class Host:
    """A machine.

    Attributes
    ----------
    name, address : str
        Its name, and its address in the network.
    root : Path
        Its file system as the test sees it, without mounts.
    env : str
        Its Python environment, a path on this host that no other host has.
    log : Path
        The output of its processes.
    pid : int
        Its first process, with which all others end.
    """

    def __init__(self, name: str, number: int, network: Network, root: Path, code: dict[str, Path]):
        self.name, self.root = name, root
        self.address = f"{_PREFIX}{number}"
        self.env = f"/opt/{name}/env"
        self.log = root / "log.txt"
        self._lay_out(code)
        self._process = subprocess.Popen(
            [*_UNSHARE.split(), "sh", "-c", _INIT],
            env={**os.environ, "ROOT": str(root), "NAME": name},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        self._running: list[subprocess.Popen[bytes]] = []
        try:
            line = self._process.stdout.readline()
            assert line == b"ready\n", f"{name} did not start"
            children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
            self.pid = int(children.read_text())
            with self.inside():
                tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
                fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", b"net0", _TUN_WITHOUT_HEADER))
            for command in (f"link set net0 mtu {_MTU} up", f"addr add {self.address}/24 dev net0"):
                subprocess.run(
                    ["nsenter", f"--net=/proc/{self.pid}/ns/net", "ip", *command.split()],
                    check=True,
                )
            network.add(self, tun)
        except BaseException:
            self.close()
            raise

    def _lay_out(self, code: dict[str, Path]) -> None:
        """Write the files that the host has of its own, and the list of its mounts."""
        top = self.root / f"opt/{self.name}"
        mounts = {f"opt/{self.name}/code/{name}": path for name, path in code.items()}
        python = Path(sys.executable).resolve()
        mounts[f"opt/{self.name}/python"] = Path(sys.base_prefix)
        packages = Path(sys.prefix, "lib", f"python{sys.version_info[0]}.{sys.version_info[1]}")
        mounts[f"opt/{self.name}/packages"] = packages / "site-packages"
        java = Path(os.environ.get("JAVA_HOME") or shutil.which("java")).resolve()
        mounts[f"opt/{self.name}/java"] = java if java.is_dir() else java.parent.parent
        site = top / "env/lib" / packages.name / "site-packages"
        site.mkdir(parents=True)
        (top / "env/bin").mkdir()
        relative = python.relative_to(Path(sys.base_prefix).resolve())
        for name in ("python", "python3"):
            (top / "env/bin" / name).symlink_to(f"/opt/{self.name}/python/{relative}")
        home = f"/opt/{self.name}/python/{relative.parent}"
        (top / "env/pyvenv.cfg").write_text(f"home = {home}\n")
        (site / "host.pth").write_text(f"/opt/{self.name}/code\n/opt/{self.name}/packages\n")
        (self.root / "mounts").write_text("".join(f"{it} {to}\n" for to, it in mounts.items()))
        (self.root / "hosts").write_text(f"127.0.0.1 localhost\n{self.address} {self.name}\n")

    def inside(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which sockets of this thread are opened on this host."""
        return _inside_network(self.pid)

    def run(self, *command: str, **environment: str) -> subprocess.Popen[bytes]:
        """Start a command on this host; it ends with the host."""
        top = f"/opt/{self.name}"
        variables = {
            "PATH": f"{self.env}/bin:/usr/bin:/bin",
            "LD_LIBRARY_PATH": f"{top}/python/lib",  # of a shared libpython
            "JAVA_HOME": f"{top}/java",
            "JAVA_TOOL_OPTIONS": f"{os.environ.get('JAVA_TOOL_OPTIONS', '')} -XX:-UsePerfData",
            "SPARK_HOME": f"{top}/packages/pyspark",
            "SPARK_LOCAL_IP": self.address,
            "SPARK_LOCAL_HOSTNAME": self.address,
            "PYSPARK_PYTHON": "python3",  # of the PATH of each host
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        with open(self.log, "ab") as log:
            process = subprocess.Popen(
                [*_ENTER.split(), f"--target={self.pid}", *command],
                env=variables | environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._running.append(process)
        return process

    @property
    def said(self) -> str:
        """The output of its processes so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def close(self) -> None:
        """End all its processes."""
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        for process in self._running:
            process.wait()


class Network:
    """Passes packets between hosts.

    Attributes
    ----------
    delay_s, loss : float
        The delay of each packet, and the share of packets that are lost.
    lost, passed : int
        The number of packets.
    """

    def __init__(self, seed: int) -> None:
        self.delay_s = self.loss = 0.0
        self.lost = self.passed = 0
        self._draw = random.Random(seed).random
        self._hosts: dict[int, str] = {}
        self._tuns: dict[bytes, int] = {}
        self._cuts: set[frozenset[str]] = set()
        self._under_way: list[tuple[float, int, int, bytes]] = []
        self._poll = select.epoll()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._pass_on, name="network")
        self._thread.start()

    def add(self, host: Host, tun: int) -> None:
        """Connect a host by its device, which the network closes."""
        self._hosts[tun] = host.address
        self._tuns[bytes(map(int, host.address.split(".")))] = tun
        self._poll.register(tun, select.EPOLLIN)

    @contextlib.contextmanager
    def cut(self, host: Host, *others: Host) -> Iterator[None]:
        """Lose all packets between a host and some others, or all others."""
        addresses = [other.address for other in others] or [*self._hosts.values()]
        cuts = {frozenset((host.address, other)) for other in addresses}
        self._cuts = self._cuts | cuts
        try:
            yield
        finally:
            self._cuts = self._cuts - cuts

    def close(self) -> None:
        """Disconnect all hosts."""
        self._ends.set()
        self._thread.join()
        for tun in self._hosts:
            os.close(tun)
        self._poll.close()

    def _pass_on(self) -> None:
        while not self._ends.is_set():
            due = self._under_way[0][0] - time.monotonic() if self._under_way else 0.1
            for tun, _ in self._poll.poll(min(max(due, 0.0), 0.1)):
                for _ in range(64):  # then another's turn
                    try:
                        packet = os.read(tun, 65536)
                    except (BlockingIOError, OSError):
                        break
                    self._take(tun, packet)
            while self._under_way and self._under_way[0][0] <= time.monotonic():
                _, _, tun, packet = heapq.heappop(self._under_way)
                # A full queue, or a host that is just ending.
                with contextlib.suppress(OSError):
                    os.write(tun, packet)

    def _take(self, tun: int, packet: bytes) -> None:
        to = self._tuns.get(packet[16:20])
        if packet[0] >> 4 != 4 or to is None:
            return
        ends = frozenset((self._hosts[tun], self._hosts[to]))
        if ends in self._cuts or self._draw() < self.loss:
            self.lost += 1
            return
        self.passed += 1
        heapq.heappush(self._under_way, (time.monotonic() + self.delay_s, self.passed, to, packet))
