"""How the workers of one job meet: in a store that rank 0 keeps, on a port that all of them work out for themselves.

torch's own way, env://, knows one port. Where any program has it, rank 0 ends and the others wait for minutes; where
another job has it, they join that. Here a job has several ports, in an order of its own: rank 0 listens on the first
that is free, and the others go round them until they find the store that bears the mark of their job.
"""

from __future__ import annotations

import contextlib
import random
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import (  # type: ignore[attr-defined] # TCPStore is documented, though not in __all__
    DistNetworkError,
    DistStoreError,
    TCPStore,
)

from tula_hpc.env import WorkerEnvironment
from tula_hpc.errors import InputError, MeetingError

PORTS = range(10_000, 32_768)  # from 32768 on, Linux gives them to whoever connects to somewhere
CANDIDATES = 8
# on one machine all workers start at once; and there is no srun -K1 that would end those who wait for one that died
LOCAL_PATIENCE = timedelta(minutes=2)
CONNECT_S = 5.0  # within which who listens on a port takes a connection
LOOK_UP = timedelta(minutes=1)  # torch looks up the name of each address; where DNS is broken, that takes long
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 1.0  # for each round; rank 0 may be late
LOOPBACK = "localhost"


def meet(env: WorkerEnvironment, patience: timedelta) -> TCPStore:
    """A store that all workers of the job share; every worker calls this, as often as the others do.

    Args:
        env: This worker's place in the job.
        patience: How long to wait for the others, at most `LOCAL_PATIENCE` on one machine; it also becomes the time
            limit of what is asked of the store.

    Raises:
        MeetingError: Workers did not come, or there is no port that rank 0 can listen on.
        InputError: MASTER_PORT is no port.
    """
    limit = patience if env.on_slurm else min(patience, LOCAL_PATIENCE)
    store = _receive(env, limit) if env.rank == 0 else _find(env, limit)
    store.set_timeout(patience)
    return store


def candidate_ports(env: WorkerEnvironment) -> Sequence[int]:
    """Where rank 0 may listen, in order: the same for all workers of a job, others for its next restart.

    Raises:
        InputError: MASTER_PORT is no port.
    """
    if not env.master_port:
        # no secret: all workers are to draw the same
        return random.Random(_mark(env)).sample(PORTS, CANDIDATES)  # noqa: S311
    if not env.master_port.isdecimal() or not 0 < int(env.master_port) < 2**16:
        raise InputError(f"expected a port from 1 to 65535, found {env.master_port!r}", source="MASTER_PORT")
    return [int(env.master_port)]


def _mark(env: WorkerEnvironment) -> str:
    """The key that tells this job's store from all others."""
    return f"{env.job_id}.{env.restart_count} {env.submission}"


def _seat(env: WorkerEnvironment, rank: int) -> str:
    """The key of a worker that has come."""
    return f"{_mark(env)}/{rank}"


def _receive(env: WorkerEnvironment, patience: timedelta) -> TCPStore:
    """Rank 0's part: a store, once all others have come to it."""
    store = _listen(env)
    store.set(_mark(env), "")
    others = range(1, env.world_size)
    try:
        store.wait([_seat(env, rank) for rank in others], patience)
    except DistStoreError:
        absent = [rank for rank in others if not store.check([_seat(env, rank)])]
        if absent:  # one may have come just now
            raise MeetingError(
                f"{len(absent)} of {env.world_size} workers did not come to rank 0 at {_host(env)}:{store.port} within "
                f"{patience.total_seconds():.0f} s, rank {absent[0]} for one; its own log may say why"
            ) from None
    return store


def _listen(env: WorkerEnvironment) -> TCPStore:
    ports, why = candidate_ports(env), ""
    for port in ports:
        try:
            # listens on all interfaces; its own client needs no name of this host
            return TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, timeout=LOOK_UP)
        except DistNetworkError as error:
            why = str(error).splitlines()[0]
    asked = "; MASTER_PORT asks for that one: without it another is taken" if env.master_port else ""
    raise MeetingError(f"rank 0 cannot listen at {_host(env)} on {_named(ports)}{asked}: {why}")


def _find(env: WorkerEnvironment, patience: timedelta) -> TCPStore:
    """Any other worker's part: rank 0's store, which may be there in a while only, as nodes start at their own pace."""
    ports, visits, token = candidate_ports(env), dict[int, _Visit](), secrets.token_hex()
    ends, pause_s = time.monotonic() + patience.total_seconds(), FIRST_PAUSE_S
    while time.monotonic() < ends:
        visits |= {port: _Visit(env, port, token) for port in ports if port not in visits}
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        for port in [port for port, visit in visits.items() if not visit.is_alive()]:
            if (store := visits.pop(port).store) is not None:
                return store
    raise MeetingError(
        f"rank {env.rank} did not find rank 0 of job {env.job_id} at {_host(env)} on {_named(ports)} within "
        f"{patience.total_seconds():.0f} s: rank 0 has ended, which its own log may explain, or a firewall is between"
    )


class _Visit(threading.Thread):
    """A look at who listens on a port. torch waits for the first word of a stranger without limit: a thread may."""

    def __init__(self, env: WorkerEnvironment, port: int, token: str) -> None:
        super().__init__(daemon=True)
        self.env, self.port, self.token = env, port, token
        self.store: TCPStore | None = None
        self.start()

    def run(self) -> None:
        """Leave the store in `self.store` if it is the one."""
        place = _host(self.env), self.port
        with contextlib.suppress(OSError, RuntimeError):  # nobody there; nobody who speaks as a store does
            # torch would log and try again; and of several addresses it might take one from which no answer comes
            with socket.create_connection(place, CONNECT_S) as there:
                address = there.getpeername()[0]
            store = TCPStore(address, self.port, wait_for_workers=False, timeout=LOOK_UP)
            if self._is_welcome(store):
                self.store = store

    def _is_welcome(self, store: TCPStore) -> bool:
        """Whether it is the store of this job, and of this meeting: in that of the last one the seat is taken."""
        if not store.check([_mark(self.env)]):
            return False
        sits = store.compare_set(_seat(self.env, self.env.rank), "", self.token)
        return sits == self.token.encode()


def _host(env: WorkerEnvironment) -> str:
    """Where rank 0 runs."""
    return env.hosts[0] if env.on_slurm else LOOPBACK


def _named(ports: Sequence[int]) -> str:
    return ("port " if len(ports) == 1 else "ports ") + ", ".join(map(str, ports))
