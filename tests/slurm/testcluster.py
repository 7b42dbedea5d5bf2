"""A real Slurm cluster on one Linux machine, for tests and measurements. Needs root and Debian's Slurm packages.

    python tests/slurm/testcluster.py install | up [options] | status | down

slurmctld, slurmdbd on MariaDB, munge, and one slurmd per node. Every node has its own network namespace, address and
host name. Its link is shaped in both directions, so collectives take the time that they would take on a network of that
rate. Its CPU is capped by a quota, so a node is equally fast whether one or all of them work (as long as nodes ×
percentage fit the machine). A step over its memory limit is killed.

Nothing of the machine's own is changed: configuration, munge key and database live in `STATE`, with sockets and ports
of their own, and the nodes see a hosts file of their own. `down` removes all of it, also what a killed run left behind.
Tools find the cluster through the variable SLURM_CONF, see `MiniCluster.environment`.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP, SIGTERM, Signals
from string import Template

# run by its path: the folder of `tests` is not yet on Python's path
if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.slurm import machine
from tests.slurm.machine import HEAD, NAME, NUMBER, SUBNET, ClusterError, check

__all__ = ["STATE", "ClusterError", "MiniCluster", "main", "running_cluster"]

STATE = Path(f"/var/tmp/tula-testcluster{NUMBER or ''}")
TEMPLATES = Path(__file__).resolve().parent / "conf"
# device number of /dev/null, used for made-up GPUs: Slurm accepts only device files
NULL_DEVICE = os.makedev(1, 3)
SERVICES = ("database_port", "accounting_port", "controller_port", "node_port")
PORTS = {name: 16806 + 10 * NUMBER + place for place, name in enumerate(SERVICES)}

# Both scripts end in exec, so the pid that they write is the daemon's. Arguments: state folder, pid name, place,
# command. The mount namespaces give the daemons a hosts file of their own.
HEAD_ENTRY = """
set -e; state=$1; echo $$ >"$state/run/$2.pid"; echo $$ >"${HIERARCHIES%% *}/$NAME/head/cgroup.procs"; shift 3
exec unshare --uts --mount sh -c 'hostname $NAME-head; mount --bind "$0/hosts" /etc/hosts; exec "$@"' "$state" "$@"
"""
# nsenter, because `ip netns exec` mounts a fresh /sys and so hides the cgroups from slurmd. A slurmd sees its own
# branch of every cgroup hierarchy as the whole, so no process of a job can leave the branch with the node's CPU quota.
# Every start makes a new branch: once Slurm has put jobs into a branch, cgroup v2 allows no process in its root.
NODE_ENTRY = """
set -e; state=$1 place=$3; echo $$ >"$state/run/$2.pid"; shift 3
for h in $HIERARCHIES; do mkdir -p "$h/$NAME/$place/$$/daemon"; echo $$ >"$h/$NAME/$place/$$/cgroup.procs"; done
exec nsenter --net="/run/netns/$place" unshare --uts --mount --cgroup sh -c '
  set -e; state=$0 place=$1; shift; hostname "$place"; mount --bind "$state/hosts" /etc/hosts
  for h in $HIERARCHIES; do mount --bind "$h/$NAME/$place/$$" "$h"; echo $$ >"$h/daemon/cgroup.procs"; done
  if [ -n "$CONTROLLERS" ]; then
    mkdir "$h/system.slice"; for d in . system.slice; do echo $CONTROLLERS >"$h/$d/cgroup.subtree_control"; done
  fi
  exec "$@"' "$state" "$place" "$@"
"""
CGROUP_V1 = "CgroupPlugin=cgroup/v1"
CGROUP_V2 = "CgroupPlugin=cgroup/v2\nIgnoreSystemd=yes"


@dataclass(frozen=True)
class MiniCluster:
    """A Slurm cluster on this machine; `with MiniCluster(grace_s=5) as cluster:` brings it up and takes it down.

    A machine has at most one cluster, or one for each worker of pytest-xdist. The objects hold settings only: an object
    made in another process controls the same running cluster.
    """

    nodes: int = 4
    # rate of every node's link in each direction, in Mbit/s
    rate_mbit: int = 1000
    # CPU quota of a node, in per cent of one core
    cpu_percent: int = 50
    node_memory_mb: int = 5000
    # whether slurmdbd runs; without it sacct fails
    accounting: bool = True
    # preemption sends the signal of the job's --signal option instead of TERM
    user_signal: bool = False
    # 0: no arrays
    max_array_size: int = 1001
    # seconds between a preempted job's TERM and its KILL
    grace_s: int = 10
    # whether jobs without a requeue option may be requeued
    requeue: bool = True
    # jobs that a user may have in the queue; 0: no limit
    submit_limit: int = 0
    # CPUs that Slurm counts on a node; it binds no process to them
    cpus: int = 2
    # GPUs that Slurm counts on a node; made-up device files
    gpus: int = 4

    def __post_init__(self) -> None:
        check(1 <= self.nodes <= 100, f"nodes: expected 1 to 100, got {self.nodes}")
        check(self.rate_mbit >= 1, f"rate_mbit: expected at least 1, got {self.rate_mbit}")
        check(1 <= self.cpu_percent <= 200, f"cpu_percent: expected 1 to 200 (2 CPUs), got {self.cpu_percent}")
        check(self.node_memory_mb >= 100, f"node_memory_mb: expected at least 100, got {self.node_memory_mb}")
        check(self.max_array_size >= 0, f"max_array_size: expected at least 0, got {self.max_array_size}")
        check(self.grace_s >= 0, f"grace_s: expected at least 0, got {self.grace_s}")
        check(1 <= self.cpus <= 1000, f"cpus: expected 1 to 1000, got {self.cpus}")
        check(1 <= self.gpus <= 64, f"gpus: expected 1 to 64, got {self.gpus}")

    def __enter__(self) -> MiniCluster:
        self.up(owner_pid=os.getpid())
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    @property
    def environment(self) -> dict[str, str]:
        """This process's environment variables and those that Slurm's tools need to find the cluster."""
        return {
            **os.environ,
            "SLURM_CONF": str(STATE / "etc/slurm.conf"),
            "PATH": f"{os.environ.get('PATH', '')}:{machine.SBIN}",
        }

    @property
    def hosts(self) -> tuple[str, ...]:
        """The nodes' host names, in order."""
        return tuple(f"{NAME}-node{i}" for i in range(1, self.nodes + 1))

    def up(self, owner_pid: int | None = None) -> None:
        """Bring the cluster up and wait until all nodes are idle.

        Args:
            owner_pid: Process that will take the cluster down; once it is gone, the cluster is stale, and the next
                `up` replaces it. None: the cluster stays until someone calls `down`.

        Raises:
            ClusterError: The machine lacks something, another cluster is up, or this one did not start (with logs).
        """
        problem = machine.missing_requirement()
        check(problem is None, str(problem))
        with _lock():
            check(not _is_live(), f"a test cluster is already up ({STATE}); take it down first")
            _remove_everything()
            try:
                self._write_state(owner_pid)
                self._start()
            except BaseException as error:
                logs = self.logs()
                _remove_everything()
                if isinstance(error, ClusterError):
                    raise ClusterError(f"the test cluster did not start: {error}\n{logs}".rstrip()) from None
                raise

    def down(self) -> None:
        """Remove every trace of a cluster, if any: processes, jobs, namespaces, links, cgroups and files."""
        machine.require_root()
        with _lock():
            _remove_everything()

    def is_up(self) -> bool:
        """Return whether the controller runs and all nodes answer to it."""
        if self.pid("slurmctld") is None:
            return False
        try:
            nodes = self.run("sinfo", "-h", "-r", "-p", "batch", "-o", "%D", timeout_s=10).split()
        except ClusterError:
            return False
        return nodes == [str(self.nodes)]

    def run(self, *command: str, timeout_s: float = 60) -> str:
        """Run a command, usually one of Slurm's, outside the nodes and return what it printed.

        Raises:
            ClusterError: It exits non-zero or takes too long; the message holds its error output.
        """
        return machine.run(*command, environment=self.environment, timeout_s=timeout_s)

    def wait_for(
        self,
        predicate: Callable[[], object],
        timeout_s: float,
        what: str = "the condition",
        pause_s: float = 0.1,
    ) -> None:
        """Wait until the predicate holds.

        Raises:
            ClusterError: It did not hold in time; the message says what was waited for.
        """
        machine.wait_for(predicate, timeout_s, what, pause_s)

    def job_state(self, job_id: str | int) -> str:
        """Return the job's state in Slurm's long form, such as RUNNING; from the controller, else from accounting.

        Raises:
            ClusterError: Neither of them knows the job.
        """
        try:
            words = self.run("scontrol", "show", "job", "--oneliner", str(job_id)).split()
        except ClusterError:
            words = [f"JobState={word}" for word in self.run("sacct", "-XnPo", "State", "-j", str(job_id)).split()[:1]]
        states = [word.removeprefix("JobState=") for word in words if word.startswith("JobState=")]
        check(bool(states), f"no job {job_id}")
        return states[0]

    def preempt(self, job_id: str | int, hold_s: float = 1.0) -> str:
        """Preempt a running job by a small one in the partition `urgent` on the same nodes.

        The running job's partition decides what Slurm does then. In `batch` it sends TERM at once (with `user_signal`,
        the signal of the job's --signal option if there is one). Every KillWait + MessageTimeout = 15 s, Slurm checks
        whether the grace time is over, and then kills and requeues the job. A job in `suspend` must have all CPUs of
        its nodes without being exclusive: Slurm does not suspend exclusive jobs.

        Args:
            job_id: Id of the running job.
            hold_s: Seconds for which the new job keeps the nodes.

        Returns:
            The id of the new job.
        """
        running = self.run("squeue", "-h", "-j", str(job_id), "-t", "running", "-o", "%P %D %N").split()
        check(bool(running), f"job {job_id} does not run")
        partition, count, names = running
        place = ["--nodes", count, "--nodelist", names, "--mem", "100"]
        place += ["--ntasks-per-node=1", f"--cpus-per-task={self.cpus}"] if partition == "suspend" else ["--exclusive"]
        task = ["--job-name", "preemptor", "--chdir", "/", "--output", "/dev/null", "--wrap", f"sleep {hold_s}"]
        return self.run("sbatch", "--parsable", "--partition", "urgent", *place, *task).strip()

    def signal(self, job_id: str | int, name: str) -> None:
        """Send a signal, such as USR2, to the job's steps, as `sbatch --signal` does; not to the batch script."""
        self.run("scancel", f"--signal={name}", str(job_id))

    def pid(self, daemon: str) -> int | None:
        """Return the pid of `munged`, `mariadbd`, `slurmdbd`, `slurmctld` or `slurmd-<host>`; None if not running."""
        try:
            pid = int((STATE / f"run/{daemon}.pid").read_text())
        except (OSError, ValueError):
            return None
        return pid if pid in machine.cluster_pids() and machine.start_time(pid) else None

    def kill_slurmd(self, host: str) -> None:
        """Kill a node's slurmd; its jobs live on for a while, and Slurm notices after SlurmdTimeout, 20 s."""
        self._stop(f"slurmd-{host}", SIGKILL)

    def kill_node(self, host: str) -> None:
        """Kill every process on a node, as a power failure does."""
        check(host in self.hosts, f"no node {host}; there are {', '.join(self.hosts)}")
        machine.kill_processes(host)

    def start_slurmd(self, host: str) -> None:
        """Start a node's slurmd, at bring-up or after a kill."""
        check(host in self.hosts, f"no node {host}; there are {', '.join(self.hosts)}")
        self._launch(f"slurmd-{host}", "slurmd", "-D", "-N", host, place=host)

    def hosts_of(self, job_id: str | int) -> tuple[str, ...]:
        """Return the hosts on which a job runs, in Slurm's order; empty if it does not run."""
        nodes = self.run("squeue", "-h", "-j", str(job_id), "-t", "running", "-o", "%N").strip()
        return tuple(self.run("scontrol", "show", "hostnames", nodes).split()) if nodes else ()

    def task_pids(self, job_id: str | int) -> dict[int, int]:
        """Return by rank the pids of the processes that srun started for a job, without their children."""
        return machine.task_pids(str(job_id))

    def is_alive(self, pid: int) -> bool:
        """Return whether a process of the cluster still runs."""
        return machine.start_time(pid) is not None

    def kill_task(self, job_id: str | int, rank: int, number: Signals = SIGKILL) -> None:
        """Send a signal to one process of a job; by default SIGKILL, as the kernel does if memory runs out."""
        os.kill(self.task_pids(job_id)[rank], number)

    def kill_job(self, job_id: str | int) -> None:
        """Kill all processes of a job at once (`scancel --signal=KILL` would cancel the job instead)."""
        # stop all of them first, so that none reacts to the end of another, such as the batch script to that of srun
        for number in (SIGSTOP, SIGKILL):
            for pid in machine.job_pids(str(job_id)):
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def restart_controller(self) -> None:
        """Stop slurmctld in an orderly way and start it again."""
        self._restart_controller(SIGTERM)

    def kill_controller(self) -> None:
        """Kill slurmctld and start it again."""
        self._restart_controller(SIGKILL)

    def pause_controller(self, seconds: float) -> None:
        """Stop slurmctld from answering for a while, as if it were busy."""
        pid = self.pid("slurmctld")
        check(pid is not None, "slurmctld does not run")
        assert pid is not None
        os.kill(pid, SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, SIGCONT)

    @contextmanager
    def cpu_share(self, percent: int) -> Iterator[None]:
        """Give nodes another CPU quota, in per cent of a core, within the block; for tests that do not check times."""
        machine.set_cpu_quota(self.hosts, percent)
        try:
            yield
        finally:
            machine.set_cpu_quota(self.hosts, self.cpu_percent)

    @contextmanager
    def slow_link(self, host: str, rate_mbit: int) -> Iterator[None]:
        """Give a node's link another rate in both directions within the block."""
        check(host in self.hosts, f"no node {host}; there are {', '.join(self.hosts)}")
        number = self.hosts.index(host) + 1
        machine.shape_link(number, host, rate_mbit)
        try:
            yield
        finally:
            machine.shape_link(number, host, self.rate_mbit)

    @contextmanager
    def changed(self, **settings: bool | int) -> Iterator[MiniCluster]:
        """Change settings of the running cluster's controller within the block; jobs and accounting survive.

        Args:
            settings: Any of accounting (False only), user_signal, max_array_size, grace_s, requeue, submit_limit, cpus
                (while no job runs).
        """
        restart = {"accounting", "max_array_size", "submit_limit", "cpus"}
        possible = {*restart, "user_signal", "grace_s", "requeue"}
        check(settings.keys() <= possible, f"only these can change while it is up: {', '.join(sorted(possible))}")
        check(self.accounting or not settings.get("accounting"), "the cluster was brought up without accounting")
        other = replace(self, **settings)  # type: ignore[arg-type] # field types differ, the keys are checked above
        refresh = self.restart_controller if settings.keys() & restart else self._reread_config
        other._write_config()
        refresh()
        other._limit_submissions(self.submit_limit)
        other._tell_nodes(self.cpus)
        try:
            yield other
        finally:
            self._limit_submissions(other.submit_limit)
            self._write_config()
            refresh()
            self._tell_nodes(other.cpus)

    def _limit_submissions(self, before: int) -> None:
        """Set the number of jobs that a user may have in accounting, which passes it to the controller."""
        if self.submit_limit != before:
            limit = f"MaxSubmitJobsPerUser={self.submit_limit or -1}"
            self.run("sacctmgr", "--immediate", "modify", "qos", "normal", "set", limit)

    def _tell_nodes(self, cpus_before: int) -> None:
        """Restart the nodes' daemons if the number of CPUs has changed, because they read it only at their start."""
        if self.cpus == cpus_before:
            return
        for host in self.hosts:
            self._stop(f"slurmd-{host}", SIGTERM)
            self.start_slurmd(host)
        machine.wait_for(self._all_idle, 30, f"{self.nodes} idle nodes")

    def logs(self, lines: int = 5) -> str:
        """Return the last lines of every daemon's log, for error messages."""
        files = sorted((STATE / "log").glob("*.log")) if STATE.is_dir() else []
        files += [path for path in sorted((STATE / "log").glob("*.out")) if path.with_suffix(".log") not in files]
        return "\n".join(f"--- {path}\n{tail}" for path in files if (tail := _tail(path, lines)))

    def _write_state(self, owner_pid: int | None) -> None:
        STATE.mkdir(mode=0o755)
        for folder in ("devices", "etc", "log", "run", "spool", "state"):
            (STATE / folder).mkdir()
        for number in range(self.gpus):
            os.mknod(STATE / f"devices/gpu{number}", stat.S_IFCHR | 0o666, NULL_DEVICE)
        self._write_config()
        _write(STATE / "munge.key", secrets.token_bytes(128), 0o600)
        names = [f"{HEAD} {NAME}-head", *(f"{SUBNET}.{i} {host}" for i, host in enumerate(self.hosts, start=1))]
        (STATE / "hosts").write_text("\n".join([Path("/etc/hosts").read_text().rstrip(), *names, ""]))
        owner = None if owner_pid is None else [owner_pid, machine.start_time(owner_pid)]
        (STATE / "cluster.json").write_text(json.dumps({"settings": asdict(self), "owner": owner}))

    def _write_config(self) -> None:
        optional = ["AccountingStorageType=accounting_storage/none"]
        if self.accounting:
            optional = ["AccountingStorageType=accounting_storage/slurmdbd", f"AccountingStorageHost={HEAD}"]
            optional += [f"AccountingStoragePort={PORTS['accounting_port']}"]
            # with munge, the "password" is its socket
            optional += [f"AccountingStoragePass={STATE}/run/munge.socket"]
        if self.submit_limit:
            optional += ["AccountingStorageEnforce=associations,limits,qos"]
        if self.user_signal:
            optional += ["SlurmctldParameters=preempt_send_user_signal"]
        values = {
            **asdict(self),
            "optional": "\n".join(optional),
            "cgroup_plugin": CGROUP_V2 if machine.has_cgroup_v2() else CGROUP_V1,
            "requeue": int(self.requeue),
            "default_memory_mb": self.node_memory_mb * 6 // 10 // self.cpus,
            "last_gpu": self.gpus - 1,
            "first_job_id": int(time.time()) // 10 % 60_000_000 + 1,
        }
        for name in ("slurm.conf", "cgroup.conf", "gres.conf"):
            _fill_in(name, values)

    def _start(self) -> None:
        machine.make_network(self.hosts, self.rate_mbit)
        machine.make_cgroups(self.hosts, self.cpu_percent)
        socket_file = STATE / "run/munge.socket"
        files = {"socket": socket_file, "key-file": STATE / "munge.key", "pid-file": STATE / "run/munged.own.pid"}
        files |= {"log-file": STATE / "log/munged.log", "seed-file": STATE / "munge.seed"}
        options = [f"--{option}={path}" for option, path in files.items()]
        # without --origin, munge would use the machine's host name, for which slurmctld would then ask DNS
        self._launch("munged", "munged", "-F", f"--origin={HEAD}", *options)
        machine.wait_for(socket_file.exists, 10, "munged")
        if self.accounting:
            self._start_accounting()
        self._launch("slurmctld", "slurmctld", "-D")
        for host in self.hosts:
            self.start_slurmd(host)
        machine.wait_for(self._all_idle, 30, f"{self.nodes} idle nodes")

    def _start_accounting(self) -> None:
        data, password = STATE / "database", secrets.token_hex(16)
        # own --tmpdir, because a starting mariadbd removes all temporary tables there, even those of another cluster
        own = ["--no-defaults", "--user=root", f"--datadir={data}", f"--tmpdir={STATE}/run"]
        machine.run("mariadb-install-db", *own, "--skip-test-db", environment=self.environment)
        grant = f"grant all on slurm_acct_db.* to 'slurm'@'%' identified by '{password}';"
        _write(STATE / "database.sql", f"create database slurm_acct_db;\n{grant}\n".encode(), 0o600)
        _fill_in("slurmdbd.conf", {"password": password}, 0o600)
        place = [f"--bind-address={HEAD}", f"--port={PORTS['database_port']}", f"--socket={STATE}/run/mariadbd.socket"]
        # no durability: the data are needed only as long as the daemon runs
        speed = ["--skip-name-resolve", "--innodb-flush-log-at-trx-commit=0", "--innodb-lock-wait-timeout=900"]
        files = [f"--pid-file={STATE}/run/mariadbd.own.pid", f"--init-file={STATE}/database.sql"]
        self._launch("mariadbd", "mariadbd", *own, *place, *speed, *files)
        machine.wait_for(lambda: _listens(PORTS["database_port"]), 30, "mariadbd")
        self._launch("slurmdbd", "slurmdbd", "-D")
        machine.wait_for(lambda: _listens(PORTS["accounting_port"]), 30, "slurmdbd")

    def _launch(self, name: str, *command: str, place: str = "head") -> None:
        entry = HEAD_ENTRY if place == "head" else NODE_ENTRY
        # in a session of its own: Ctrl-C in a test run must not reach the daemons before `down` does
        detached = ["setsid", "--fork", "sh", "-c", entry, "sh", str(STATE), name, place, *command]
        environment = {**self.environment, "NAME": NAME, "HIERARCHIES": " ".join(map(str, machine.hierarchies()))}
        environment["CONTROLLERS"] = machine.subtree_control() if machine.has_cgroup_v2() else ""
        # with cgroup v2, this variable tells slurmd that its cgroup is already prepared, as NODE_ENTRY has done
        environment["INVOCATION_ID"] = "testcluster"
        with (STATE / f"log/{name}.out").open("ab") as out:
            subprocess.run(detached, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment, check=True)

    def _stop(self, daemon: str, number: Signals) -> None:
        pid = self.pid(daemon)
        if pid is None:
            raise ClusterError(f"{daemon} does not run")
        os.kill(pid, number)
        machine.wait_for(lambda: self.pid(daemon) is None, 20, f"the end of {daemon}")

    def _reread_config(self) -> None:
        self.run("scontrol", "reconfigure")
        machine.wait_for(self._answers, 30, "the controller with its new settings")

    def _restart_controller(self, number: Signals) -> None:
        self._stop("slurmctld", number)
        self._launch("slurmctld", "slurmctld", "-D")
        machine.wait_for(self.is_up, 30, "the restarted controller")

    def _answers(self) -> bool:
        try:
            return bool(self.run("sinfo", "-h", timeout_s=10))
        except ClusterError:
            return False

    def _all_idle(self) -> bool:
        try:
            return self.run("sinfo", "-h", "-t", "idle", "-p", "batch", "-o", "%D").split() == [str(self.nodes)]
        except ClusterError:
            return False


def running_cluster() -> MiniCluster | None:
    """Return the cluster that is up on this machine, with its original settings, or None."""
    if not _is_live():
        return None
    return MiniCluster(**json.loads((STATE / "cluster.json").read_text())["settings"])


@contextmanager
def _lock() -> Iterator[None]:
    """Allow one bring-up or clean-up at a time, by an abstract socket: it needs no file, and ends with the process."""
    with socket.socket(socket.AF_UNIX) as holder:
        try:
            holder.bind(f"\0{STATE.name}")
        except OSError:
            raise ClusterError("another process is bringing a test cluster up or down at this moment") from None
        yield


def _is_live() -> bool:
    """Return whether a controller runs and, if the cluster has an owner, the owner's process is still there."""
    if MiniCluster().pid("slurmctld") is None:
        return False
    try:
        owner = json.loads((STATE / "cluster.json").read_text())["owner"]
    except (OSError, ValueError, KeyError):
        return False
    return owner is None or machine.start_time(owner[0]) == owner[1]


def _remove_everything() -> None:
    """Take down whatever parts of a cluster exist, in whatever state."""
    machine.kill_processes()
    machine.remove_cgroups()
    machine.remove_network()
    if STATE.is_dir():
        shutil.rmtree(STATE)


def _fill_in(name: str, values: Mapping[str, object], mode: int = 0o644) -> None:
    places = {**PORTS, "state": STATE, "name": NAME, "head": HEAD, "subnet": SUBNET}
    text = Template((TEMPLATES / name).read_text()).substitute(values, **places)
    _write(STATE / "etc" / name, text.encode(), mode)


def _write(path: Path, content: bytes, mode: int) -> None:
    path.touch(mode=mode)
    path.write_bytes(content)


def _listens(port: int) -> bool:
    try:
        socket.create_connection((HEAD, port), timeout=1).close()
    except OSError:
        return False
    return True


def _tail(path: Path, lines: int) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="A real Slurm cluster on this machine, for tests and measurements.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("install", help="install Slurm, MariaDB and munge from Debian's packages (root)")
    up = commands.add_parser("up", help="bring the cluster up (root)")
    for field in fields(MiniCluster):
        option = "--" + field.name.replace("_", "-")
        if isinstance(field.default, bool):
            up.add_argument(option, action=argparse.BooleanOptionalAction, default=field.default)
        else:
            up.add_argument(option, type=int, default=field.default, metavar="N", help=f"default {field.default}")
    commands.add_parser("status", help="say whether it is up; exit code 0 when it is, else 1")
    commands.add_parser("down", help="take it down and remove every trace (root)")
    return parser


def _up(cluster: MiniCluster) -> None:
    began_s = time.monotonic()
    cluster.up()
    machine.say(
        f"{cluster.nodes} nodes up in {time.monotonic() - began_s:.0f} s; logs in {STATE}/log. For Slurm's tools:"
    )
    machine.say(f"export SLURM_CONF={cluster.environment['SLURM_CONF']}")
    wanted, there = cluster.nodes * cluster.cpu_percent, 100 * (os.cpu_count() or 1)
    if wanted > there:
        machine.say(
            f"note: nodes may use {wanted} % CPU in sum, the machine has {there} %: busy ones slow each other down"
        )


def _status() -> int:
    cluster = running_cluster()
    if cluster is None:
        machine.say("the test cluster is down")
        return 1
    machine.say(f"the test cluster is up: {cluster}\nexport SLURM_CONF={cluster.environment['SLURM_CONF']}")
    machine.say(cluster.run("sinfo", "--long", "--Node"))
    return 0


def main(arguments: list[str]) -> int:
    """Run one command; return the exit code: 0 done, 1 not up or failed, 2 wrong arguments."""
    options = vars(_parser().parse_args(arguments))
    command = options.pop("command")
    try:
        if command == "install":
            machine.install()
        elif command == "up":
            _up(MiniCluster(**options))
        elif command == "down":
            MiniCluster().down()
        else:
            return _status()
    except (ClusterError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
