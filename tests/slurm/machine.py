"""Manage what the test cluster uses of the machine: packages, processes, cgroups, network namespaces and links."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from signal import SIGKILL

# disk quotas
PACKAGES = ("slurm-wlm", "slurmdbd", "munge", "mariadb-server", "iproute2", "procps", "btrfs-progs")
PROGRAMS = (
    "slurmctld",
    "slurmd",
    "slurmdbd",
    "munged",
    "mariadbd",
    "mariadb-install-db",
    "ip",
    "tc",
    "nsenter",
    "unshare",
)
# where Debian puts daemons; not on every PATH
SBIN = "/usr/local/sbin:/usr/sbin:/sbin"
# number of the pytest-xdist worker, since every worker can have a cluster of its own
NUMBER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
NAME = f"ttc{NUMBER or ''}"
SUBNET = f"10.92.{NUMBER}"
HEAD = f"{SUBNET}.254"
CGROUPS = Path("/sys/fs/cgroup")
# controllers that Slurm or the CPU quota needs
V1_CONTROLLERS = ("cpu", "cpuacct", "memory", "freezer")
# pids is listed only because Slurm 22.05 does not recognize the last name of the kernel's list of controllers
V2_CONTROLLERS = ("cpu", "cpuset", "memory", "pids")
# CPU weight of the whole cluster; with the default of 1, all its jobs together would count as one process
WEIGHT = 4
# short, since within the usual 100 ms a training step could run at full speed
QUOTA_PERIOD_US = 10_000


class ClusterError(RuntimeError):
    """The test cluster cannot do what was asked; the message is one line, sometimes followed by the end of a log."""


def check(holds: bool, message: str) -> None:
    """Raise a `ClusterError` with this message unless it holds."""
    if not holds:
        raise ClusterError(message)


def require_root() -> None:
    """Raise a `ClusterError` unless we are root."""
    check(os.geteuid() == 0, "the Slurm test cluster needs root")


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def run(*command: str, environment: dict[str, str] | None = None, timeout_s: float = 60) -> str:
    """Run a command and return what it printed.

    Raises:
        ClusterError: It exits non-zero or takes too long; the message holds its error output.
    """
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise ClusterError(f"`{' '.join(command)}` took more than {timeout_s:g} s") from None
    why = done.stderr.strip() or done.stdout.strip()[-500:]
    check(done.returncode == 0, f"`{' '.join(command)}` exited with {done.returncode}: {why}")
    return done.stdout


def wait_for(
    predicate: Callable[[], object], timeout_s: float, what: str = "the condition", pause_s: float = 0.1
) -> None:
    """Wait until the predicate holds, polling it with a pause.

    Raises:
        ClusterError: It did not hold in time; the message says what was waited for.
    """
    deadline = time.monotonic() + timeout_s
    while not predicate():
        check(time.monotonic() < deadline, f"waited {timeout_s:g} s in vain for {what}")
        time.sleep(pause_s)


def missing_requirement() -> str | None:
    """Return why no cluster can be brought up here, in one line, or None if one can."""
    if os.geteuid() != 0:
        return "the Slurm test cluster needs root"
    missing = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ.get('PATH', '')}:{SBIN}") is None]
    if missing:
        return f"the Slurm test cluster needs {', '.join(missing)}; install them with `make slurm`"
    if has_cgroup_v2():
        there = (CGROUPS / "cgroup.controllers").read_text().split()
        lacking = [name for name in V2_CONTROLLERS if name not in there]
    else:
        lacking = [name for name in V1_CONTROLLERS if not (CGROUPS / name / "cgroup.procs").exists()]
    return f"the Slurm test cluster needs the cgroup controllers {', '.join(lacking)}" if lacking else None


def install() -> None:
    """Install Slurm, MariaDB and munge from Debian's packages; does nothing when they are there.

    Raises:
        ClusterError: Not root, no apt-get, or apt-get failed.
    """
    if shutil.which("apt-get") is None or shutil.which("dpkg-query") is None:
        raise ClusterError("install needs Debian or one of its kin (apt-get)")
    missing = [name for name in PACKAGES if not _is_installed(name)]
    if not missing:
        say("Slurm, MariaDB and munge are installed")
        return
    require_root()
    say(f"installing {' '.join(missing)} from the distribution's packages (about a minute)")
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    wait = ["-o", "DPkg::Lock::Timeout=120"]
    run("apt-get", *wait, "-qq", "update", environment=quiet, timeout_s=600)
    run("apt-get", *wait, "-qq", "--no-install-recommends", "install", *missing, environment=quiet, timeout_s=1800)


def _is_installed(package: str) -> bool:
    query = ["dpkg-query", "-W", "-f", "${db:Status-Status}", package]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout == "installed"


def start_time(pid: int) -> str | None:
    """Return a process's start in kernel ticks, unique together with its pid; None for ended ones and zombies."""
    try:
        fields_after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields_after_name[0] in "ZX" else fields_after_name[19]


def has_cgroup_v2() -> bool:
    """Return whether the machine has only cgroup v2, as Debian 12 with systemd; otherwise it has v1."""
    return (CGROUPS / "cgroup.controllers").exists()


def hierarchies() -> tuple[Path, ...]:
    """Return the one cgroup hierarchy of v2, or those of v1; the first has the CPU quota."""
    if has_cgroup_v2():
        return (CGROUPS,)
    # systemd mounts cpu and cpuacct as one, under both names
    return tuple(dict.fromkeys((CGROUPS / name).resolve() for name in V1_CONTROLLERS))


def subtree_control() -> str:
    """Return the text for `cgroup.subtree_control` that enables all controllers."""
    return " ".join(f"+{name}" for name in V2_CONTROLLERS)


def make_cgroups(hosts: tuple[str, ...], cpu_percent: int) -> None:
    """Make a cgroup for the head and for each host; hosts get a CPU quota in per cent of a core, and no swap."""
    for hierarchy in hierarchies():
        for place in ("head", *hosts):
            (hierarchy / NAME / place).mkdir(parents=True)
    # with swap, a job step that exceeds its memory limit would not be killed
    for host in hosts:
        if has_cgroup_v2():
            for parent in (CGROUPS, CGROUPS / NAME, CGROUPS / NAME / host):
                (parent / "cgroup.subtree_control").write_text(subtree_control())
            (CGROUPS / NAME / host / "memory.swap.max").write_text("0")
        else:
            (CGROUPS / "memory" / NAME / host / "memory.swappiness").write_text("0")
    if has_cgroup_v2():
        (CGROUPS / NAME / "cpu.weight").write_text(str(100 * WEIGHT))
    else:
        (CGROUPS / "cpu" / NAME / "cpu.shares").write_text(str(1024 * WEIGHT))
    set_cpu_quota(hosts, cpu_percent)


def set_cpu_quota(hosts: tuple[str, ...], cpu_percent: int) -> None:
    """Set each host's CPU quota, in per cent of a core."""
    quota_us = QUOTA_PERIOD_US * cpu_percent // 100
    for host in hosts:
        if has_cgroup_v2():
            (CGROUPS / NAME / host / "cpu.max").write_text(f"{quota_us} {QUOTA_PERIOD_US}")
        else:
            (CGROUPS / "cpu" / NAME / host / "cpu.cfs_period_us").write_text(str(QUOTA_PERIOD_US))
            (CGROUPS / "cpu" / NAME / host / "cpu.cfs_quota_us").write_text(str(quota_us))


def cluster_pids(place: str = "") -> set[int]:
    """Return all processes, jobs included, in the cgroups of the cluster or of one place (head or a host)."""
    pids: set[int] = set()
    for hierarchy in hierarchies():
        for folder in _folders(hierarchy / NAME / place):
            # a job step's cgroup may disappear at any time
            with suppress(OSError):
                pids.update(int(line) for line in (folder / "cgroup.procs").read_text().split())
    return pids


def task_pids(job_id: str) -> dict[int, int]:
    """Return by rank the processes of a job that a slurmstepd started for srun, without those that they forked."""
    found: dict[int, int] = {}
    for pid in sorted(cluster_pids()):
        with suppress(OSError):
            words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            variables = dict(word.split(b"=", 1) for word in words if b"=" in word)
            parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
            is_task = Path(f"/proc/{parent}/comm").read_text().startswith("slurmstepd")
            if is_task and variables.get(b"SLURM_JOB_ID") == job_id.encode() and b"SLURM_SRUN_COMM_HOST" in variables:
                found[int(variables[b"SLURM_PROCID"])] = pid
    return found


def job_pids(job_id: str) -> set[int]:
    """Return all processes of a job (batch script, srun and tasks), without Slurm's own that supervise them."""
    found: set[int] = set()
    for pid in cluster_pids():
        with suppress(OSError):
            words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            is_daemon = Path(f"/proc/{pid}/comm").read_text().startswith("slurmstepd")
            if f"SLURM_JOB_ID={job_id}".encode() in words and not is_daemon:
                found.add(pid)
    return found


def _folders(top: Path) -> Iterator[Path]:
    """Return the folder and all below it, deepest first; folders that vanish or do not exist raise no error."""
    return (Path(folder) for folder, _, _ in os.walk(top, topdown=False))


def kill_processes(place: str = "") -> None:
    """Kill all processes of the cluster, or of one place, and wait for their end."""
    for folder in _folders(CGROUPS / "freezer" / NAME / place):
        with suppress(OSError):
            # cgroup v1: a suspended process must be thawed to die
            (folder / "freezer.state").write_text("THAWED")

    def all_dead() -> bool:
        pids = cluster_pids(place)
        # repeated by `wait_for`, because a process can fork while it is being killed
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, SIGKILL)
        return not pids

    wait_for(all_dead, 20, "the end of the cluster's processes")


@contextmanager
def busy_neighbours(host: str, count: int) -> Iterator[None]:
    """Run processes that compute on a host within the block, each with as large a CPU share as all jobs together."""
    folders = [hierarchies()[0] / NAME / host / f"busy{number}" for number in range(count)]
    loops = []
    try:
        for folder in folders:
            folder.mkdir()
            loops.append(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            (folder / "cgroup.procs").write_text(str(loops[-1].pid))
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
        for folder in filter(Path.exists, folders):
            wait_for(partial(_rmdir, folder), 10, f"{folder} to be empty")


def remove_cgroups() -> None:
    """Remove the cluster's branch of every hierarchy; its processes must be gone."""
    for hierarchy in hierarchies():
        for folder in _folders(hierarchy / NAME):
            wait_for(partial(_rmdir, folder), 10, f"{folder} to be empty")


def _rmdir(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        # the kernel still counts a process that has just ended
        return False
    return True


def make_network(hosts: tuple[str, ...], rate_mbit: int) -> None:
    """Make a bridge with the head's address, and per host a namespace and a link, shaped in both directions."""
    _ip(f"link add {NAME}-0 type bridge")
    _ip(f"addr add {HEAD}/24 dev {NAME}-0")
    _ip(f"link set {NAME}-0 up")
    for number, host in enumerate(hosts, start=1):
        _ip(f"netns add {host}")
        _ip(f"link add {NAME}-{number} type veth peer name eth0 netns {host}")
        _ip(f"link set {NAME}-{number} master {NAME}-0 up")
        # IPv4 only, so that collectives have one address to use
        _ip(f"-n {host} link set eth0 addrgenmode none")
        _ip(f"-n {host} addr add {SUBNET}.{number}/24 dev eth0")
        _ip(f"-n {host} link set eth0 up")
        _ip(f"-n {host} link set lo up")
        shape_link(number, host, rate_mbit)


def shape_link(number: int, host: str, rate_mbit: int) -> None:
    """Set the rate of a host's link in both directions."""
    for end in (f"-n {host} qdisc replace dev eth0", f"qdisc replace dev {NAME}-{number}"):
        run("tc", *end.split(), *_shaping(rate_mbit).split())


def _shaping(rate_mbit: int) -> str:
    """Return tc's options for a token bucket of about 2 ms, too short for bursts and long enough for clock ticks."""
    return f"root tbf rate {rate_mbit}mbit burst {max(64_000, rate_mbit * 250)} latency 100ms"


def _ip(arguments: str) -> None:
    run("ip", *arguments.split())


def remove_network() -> None:
    """Remove the cluster's namespaces and links."""
    for namespace in Path("/run/netns").glob(f"{NAME}-*"):
        _ip(f"netns del {namespace.name}")
    for link in [path.name for path in Path("/sys/class/net").glob(f"{NAME}-*")]:
        # a removed namespace also removes its link, a moment later
        with suppress(ClusterError):
            _ip(f"link del {link}")
