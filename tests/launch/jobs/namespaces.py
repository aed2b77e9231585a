"""Make nodes on one machine: network namespaces on a bridge, with an sshd each on request, and one to call them from.

Tests that use them are skipped, with the reason, without root, `ip`, network namespaces or, if requested, OpenSSH's
server. A node's own folder is bound over `Nodes.shared` in its mount namespace, so nodes do not share the folder of a
job; they share all other files.
"""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

SSHD = "/usr/sbin/sshd"
SSHD_CONFIG = """HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin yes
PrintMotd no
Banner {folder}/banner
"""
SSH_CONFIG = """Host *
IdentityFile {folder}/key
IdentitiesOnly yes
UserKnownHostsFile {folder}/known_hosts
StrictHostKeyChecking yes
LogLevel ERROR
BatchMode yes
ConnectTimeout 15
"""


def ip(*words):
    """Run `ip`; raise RuntimeError with its message if it fails."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")


class Nodes:
    """Hold `count` nodes with the addresses `hosts`; with `real_ssh` the test is skipped if no sshd can be reached."""

    def __init__(self, count, folder: Path, net="10.97.41", real_ssh=False):
        self._real = real_ssh
        self.folder, self.shared = folder, folder / "job"
        self.hosts = [f"{net}.{number + 1}" for number in range(count)]
        self._prefix, self._desk, self._net = f"vp{os.getpid()}", f"vp{os.getpid()}-desk", net
        self._sshd = []

    def __enter__(self):
        for program in ("ip", *(("ssh", "ssh-keygen", SSHD) if self._real else ())):
            if shutil.which(program) is None:
                pytest.skip(f"{program} is not installed here")
        try:
            self._make_network()
        except RuntimeError as error:
            self.__exit__()
            pytest.skip(f"network namespaces cannot be made here: {error}")
        try:
            for name in ("job", *range(len(self.hosts))):
                (self.folder / str(name)).mkdir()
            if self._real:
                self._start_sshd()
        except BaseException:  # pytest's skip too
            self.__exit__()
            raise
        return self

    def _make_network(self):
        """Make a bridge and the caller's end in the namespace of the desk, and one namespace for each node."""
        ip("netns", "add", self._desk)
        ip("-n", self._desk, "link", "add", "br0", "type", "bridge")
        ip("-n", self._desk, "address", "add", f"{self._net}.254/24", "dev", "br0")
        for link in ("br0", "lo"):
            ip("-n", self._desk, "link", "set", link, "up")
        for number, host in enumerate(self.hosts):
            name = self.name(number)
            ip("netns", "add", name)
            peer = ["type", "veth", "peer", "name", f"v{number}", "netns", self._desk]
            ip("-n", name, "link", "add", "eth0", *peer)
            ip("-n", name, "address", "add", f"{host}/24", "dev", "eth0")
            for link in ("eth0", "lo"):
                ip("-n", name, "link", "set", link, "up")
            ip("-n", self._desk, "link", "set", f"v{number}", "master", "br0", "up")

    def _start_sshd(self):
        """Start the servers; skip the test if no connection can be made, such as to a locked account."""
        folder = self.folder
        for name in ("key", "host_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
        (folder / "banner").write_text("Authorised use only.\n")
        (folder / "sshd_config").write_text(SSHD_CONFIG.format(folder=folder))
        (folder / "ssh_config").write_text(SSH_CONFIG.format(folder=folder))
        public = (folder / "host_key.pub").read_text()
        (folder / "known_hosts").write_text("".join(f"{host} {public}" for host in self.hosts))
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd changes its root to it; Debian's service makes it
        for number in range(len(self.hosts)):
            command = [SSHD, "-D", "-f", f"{folder}/sshd_config", "-E", f"{folder}/sshd-{number}.log"]
            self._sshd.append(self.start(number, *command))
        for host, sshd in zip(self.hosts, self._sshd, strict=True):
            while (done := subprocess.run([*self.ssh, host, "true"], capture_output=True, text=True)).returncode:
                # connections are refused until sshd listens
                if sshd.poll() is not None or "refused" not in done.stderr:
                    pytest.skip(f"sshd lets nobody in here: {done.stderr} {(folder / 'sshd-0.log').read_text()}")
                time.sleep(0.1)

    def __exit__(self, *_):
        """End all processes in the namespaces, then remove these."""
        for name in self._names():
            for pid in self._pids(name):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        for sshd in self._sshd:
            sshd.wait()
        for name in self._names():
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)

    def _names(self):
        return [*(self.name(number) for number in range(len(self.hosts))), self._desk]

    @staticmethod
    def _pids(name):
        done = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
        return [int(pid) for pid in done.stdout.split()]

    def name(self, number):
        """Return the namespace of a node."""
        return f"{self._prefix}-{number}"

    @property
    def ssh(self):
        """Return the words of an ssh command from the desk, before the host."""
        return ["ip", "netns", "exec", self._desk, "ssh", "-F", str(self.folder / "ssh_config")]

    def start(self, number, *command, **options):
        """Start a process of a node, in which the node's own folder is `shared`; options are Popen's."""
        return subprocess.Popen([*self.words(number), *command], start_new_session=True, **options)

    def words(self, number):
        """Return the words that run a command in a node."""
        inside = 'mount --bind "$0" "$1" && shift && exec "$@"'
        enter = ["ip", "netns", "exec", self.name(number), "bash", "-c", inside]
        return [*enter, str(self.folder / str(number)), str(self.shared)]

    def drop_connections(self, number):
        """End the open connections of a node."""
        for process in psutil.Process(self._sshd[number].pid).children():
            process.kill()

    def cut(self, number):
        """Cut a node off from the network."""
        ip("-n", self.name(number), "link", "set", "eth0", "down")

    def join(self, number):
        """Connect a node to the network again."""
        ip("-n", self.name(number), "link", "set", "eth0", "up")

    def processes(self, number):
        """Return the processes in a node's namespace, without sshd's."""
        found = []
        for pid in self._pids(self.name(number)):
            try:
                process = psutil.Process(pid)
                if not process.name().startswith("sshd"):
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found
