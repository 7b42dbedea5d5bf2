"""Let the workers of one job meet; each of them proves that it belongs to the job.

torch's TCPStore does not authenticate anybody. On a shared node or network a stranger could take
the place of a rank, or sit on a rank's port and collect the others. So rank 0 first opens a *door*,
a socket of our own: both sides show by HMAC-SHA256 over fresh random numbers that they know the
job's secret, a file in the submission's private folder. Neither side sends the secret. Once all
ranks are in, rank 0 starts the store. The store listens on the one address at which the ranks came
(127.0.0.1 for a job on this machine). It accepts connections from the ranks' addresses alone. Its
keys begin with a random prefix that is sent through the door. README.md says what attacks remain
possible: by processes on those hosts, and through the open sockets of gloo and NCCL.

Also, torch's env:// knows only one port. Here a job has several, in an order of its own: rank 0
listens on the first that is free, and the others try them in turn until a listener knows the
secret.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hmac
import ipaddress
import json
import random
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Collection, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

# TCPStore is documented, though not in __all__
from torch.distributed import (  # type: ignore[attr-defined]
    DistNetworkError,
    PrefixStore,
    Store,
    TCPStore,
)

from tula_hpc.env import SECRET_FILE, WorkerEnvironment
from tula_hpc.errors import InputError, MeetingError
from tula_hpc.files import read_bounded
from tula_hpc.formatting import first_line

# Linux gives ports from 32768 on to outgoing connections
PORTS = range(10_000, 32_768)
CANDIDATES = 8
# Shorter limit on one machine: all workers start at once, and no srun -K1 ends those that wait for
# a dead worker.
LOCAL_PATIENCE = timedelta(minutes=2)
# time limit of an answer: a worker answers at once, a stranger perhaps never
HANDSHAKE_S = 5.0
# time limit of opening the store: torch looks up host names, which is slow if DNS is broken
LOOK_UP = timedelta(minutes=1)
# pauses between two rounds over the ports, while rank 0 may not have started
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 1.0
LOOPBACK = "127.0.0.1"
NONCE_BYTES = 32
PROOF_BYTES = 32
# connections that are served at the same time, in addition to those of the expected workers
MOST_STRANGERS = 256
# <linux/filter.h>, <asm-generic/socket.h>
SO_ATTACH_FILTER = 26


def meet(env: WorkerEnvironment, patience: timedelta) -> Store:
    """Return a store that all workers of the job share. Collective.

    `patience` is the longest wait for the others, at most `LOCAL_PATIENCE` on one machine, and the
    time limit of requests to the store.

    Raises:
        MeetingError: Workers did not come, rank 0 can listen on no port, or the job has no secret.
        InputError: MASTER_PORT is not a port.
    """
    limit = patience
    if not env.on_slurm:
        limit = min(limit, LOCAL_PATIENCE)
    secret = _read_secret(env)
    ends = time.monotonic() + limit.total_seconds()
    store = _Door(env, secret).gather(limit) if env.rank == 0 else _find(env, secret, ends, limit)
    store.set_timeout(patience)
    return store


def candidate_ports(env: WorkerEnvironment) -> Sequence[int]:
    """Return the ports to try for rank 0's door, in order: the same for all workers of a run.

    Raises:
        InputError: MASTER_PORT is not a port.
    """
    if not env.master_port:
        # not secret: all workers must draw the same ports
        return random.Random(_job_name(env)).sample(PORTS, CANDIDATES)  # noqa: S311
    if not env.master_port.isdecimal() or not 0 < int(env.master_port) < 2**16:
        raise InputError(
            f"expected a port from 1 to 65535, found {env.master_port!r}", source="MASTER_PORT"
        )
    return [int(env.master_port)]


def _job_name(env: WorkerEnvironment) -> str:
    """Return a name that no other run has, not even an earlier run of the same job."""
    return f"{env.job_id}.{env.restart_count} {env.submission}"


def _read_secret(env: WorkerEnvironment) -> bytes:
    path = Path(env.submission) / SECRET_FILE
    try:
        return bytes.fromhex(read_bounded(path, 4096).decode())
    except (OSError, ValueError) as error:
        message = f"{path}: cannot be read ({error}); workers need it to prove who they are"
        raise MeetingError(f"{message}: submit the job again with this version") from None


class _Proof(NamedTuple):
    """Proofs, valid in one handshake, that both sides know the secret."""

    secret: bytes
    job: str
    client_nonce: bytes
    server_nonce: bytes

    def of(self, speaker: str, message: bytes = b"") -> bytes:
        """Return the proof of `speaker`, for this handshake and this message only."""
        parts = [speaker.encode(), self.job.encode(), self.client_nonce, self.server_nonce, message]
        # with lengths: without them two different handshakes could be the same bytes
        content = b"".join(struct.pack("!I", len(part)) + part for part in parts)
        return hmac.digest(self.secret, content, "sha256")

    def holds(self, proof: bytes, speaker: str, message: bytes = b"") -> bool:
        """Tell whether `proof` is the right one."""
        return hmac.compare_digest(proof, self.of(speaker, message))


class _Guest(NamedTuple):
    """Worker that has proved itself and waits for the others."""

    connection: socket.socket
    proof: _Proof
    # numeric addresses of both ends of the connection
    peer: str
    ours: str

    def invite(self, place: dict[str, str | int]) -> None:
        """Send the store's address to the worker."""
        content = json.dumps(place).encode()
        sealed = self.proof.of("invitation", content) + content
        # if the worker is gone by now, the first collective fails
        with contextlib.suppress(OSError):
            self.connection.sendall(struct.pack("!I", len(sealed)) + sealed)


class _Door:
    """Rank 0's side: admits the workers of the job, refuses and reports all others."""

    def __init__(self, env: WorkerEnvironment, secret: bytes) -> None:
        self.env, self.secret = env, secret
        self.guests: dict[int, _Guest] = {}
        self.changed = threading.Condition()
        self.refused: set[str] = set()
        self.unproven: list[socket.socket] = []
        self.socket = _listen(env)

    def gather(self, patience: timedelta) -> Store:
        """Wait for all other workers, then start the store and send them its address."""
        expected = self.env.world_size - 1
        threading.Thread(target=self._serve, daemon=True, name="door").start()
        try:
            with self.changed:
                complete = self.changed.wait_for(
                    lambda: len(self.guests) == expected, patience.total_seconds()
                )
            if not complete:
                raise MeetingError(self._absence(patience))
            return self._start_store()
        finally:
            # wakes the thread that accepts; closing alone would not
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)
            self.socket.close()
            for guest in self.guests.values():
                guest.connection.close()

    def _absence(self, patience: timedelta) -> str:
        absent = [rank for rank in range(1, self.env.world_size) if rank not in self.guests]
        where = f"rank 0 at {_host(self.env)}:{self.socket.getsockname()[1]}"
        waited = f"within {patience.total_seconds():.0f} s"
        count = f"{len(absent)} of {self.env.world_size} workers did not come to {where} {waited}"
        return f"{count}, for example rank {absent[0]}; its own log may say why"

    def _serve(self) -> None:
        while True:
            try:
                connection, address = self.socket.accept()
            except OSError as error:
                # `gather` has closed the socket
                if error.errno in (errno.EBADF, errno.EINVAL):
                    return
                # the peer has gone already, or there are too many connections for now
                time.sleep(FIRST_PAUSE_S)
                continue
            self._make_room(connection)
            threading.Thread(target=self._admit, args=(connection, address[0]), daemon=True).start()

    def _make_room(self, connection: socket.socket) -> None:
        """Give a new connection a place; if none is free, close a connection drawn by lot.

        Strangers can hold all places and return at once. They would keep the workers out if new
        connections had to wait. If the oldest connection were closed, they could connect so fast
        that no worker has the time to prove itself.
        """
        with self.changed:
            if len(self.unproven) >= MOST_STRANGERS + self.env.world_size:
                drawn = self.unproven.pop(secrets.randbelow(len(self.unproven)))
                # this ends the connection's thread, which closes the connection
                with contextlib.suppress(OSError):
                    drawn.shutdown(socket.SHUT_RDWR)
            self.unproven.append(connection)

    def _admit(self, connection: socket.socket, peer: str) -> None:
        try:
            connection.settimeout(HANDSHAKE_S)
            client_nonce = _receive(connection, NONCE_BYTES)
            proof = _Proof(
                self.secret, _job_name(self.env), client_nonce, secrets.token_bytes(NONCE_BYTES)
            )
            connection.sendall(proof.server_nonce + proof.of("server"))
            answer = _receive(connection, 4 + PROOF_BYTES)
            rank_bytes, given = answer[:4], answer[4:]
            if not proof.holds(given, "client", rank_bytes):
                raise _StrangerError
            self._seat(
                struct.unpack("!I", rank_bytes)[0],
                _Guest(connection, proof, peer, connection.getsockname()[0]),
            )
        except (OSError, _StrangerError):
            connection.close()
            self._report(peer)
        finally:
            with self.changed, contextlib.suppress(ValueError):
                self.unproven.remove(connection)

    def _seat(self, rank: int, guest: _Guest) -> None:
        with self.changed:
            # the connection may just have been closed to make room
            sent_away = guest.connection not in self.unproven
            if sent_away or rank in self.guests or not 0 < rank < self.env.world_size:
                raise _StrangerError
            self.unproven.remove(guest.connection)
            self.guests[rank] = guest
            self.changed.notify()

    def _report(self, peer: str) -> None:
        if peer not in self.refused:
            self.refused.add(peer)
            message = f"refused a connection from {peer}: it did not prove that it belongs to job {self.env.job_id}"
            sys.stderr.write(f"rank 0 {message}\n")

    def _start_store(self) -> Store:
        guests = self.guests.values()
        outside = {
            guest.ours for guest in guests if not ipaddress.ip_address(guest.ours).is_loopback
        }
        # workers of this node may have come over loopback, which other nodes cannot reach
        reachable = outside or {guest.ours for guest in guests}
        address = min(reachable)
        only_one = len(reachable) == 1
        listener = socket.socket()
        listener.bind((address if only_one else "", 0))
        port = listener.getsockname()[1]
        _admit_only(listener, reachable | {guest.peer for guest in guests})
        # after the filter is set: an earlier connection would be served, whoever made it
        listener.listen(self.env.world_size + 16)
        # TCPStore owns the descriptor from here on
        store = TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=LOOK_UP,
            master_listen_fd=listener.detach(),
        )
        prefix = secrets.token_hex(16)
        for guest in guests:
            store_address = guest.ours if guest.ours in reachable else address
            guest.invite({"address": store_address, "port": port, "prefix": prefix})
        return PrefixStore(prefix, store)


class _StrangerError(Exception):
    """Peer that does not know the secret."""


def _find(env: WorkerEnvironment, secret: bytes, ends: float, patience: timedelta) -> Store:
    """Find rank 0 and return its store; keep trying, since nodes start at their own pace."""
    ports = candidate_ports(env)
    pause_s = FIRST_PAUSE_S
    while time.monotonic() < ends:
        for port in ports:
            # no listener, a stranger, or a worker that has died
            with contextlib.suppress(OSError, ValueError, _StrangerError):
                return _visit(env, secret, port, ends)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
    raise MeetingError(
        f"rank {env.rank} did not find rank 0 of job {env.job_id} at {_host(env)} on {_named(ports)} within "
        f"{patience.total_seconds():.0f} s: rank 0 has ended (its own log may say why), or a firewall is in between"
    )


def _visit(env: WorkerEnvironment, secret: bytes, port: int, ends: float) -> Store:
    """Prove ourselves at a door, wait until all are in, and connect to the store.

    Raises:
        _StrangerError: The listener does not know the secret.
        OSError: There is no listener, or it has gone.
    """
    with socket.create_connection((_host(env), port), HANDSHAKE_S) as door:
        nonce = secrets.token_bytes(NONCE_BYTES)
        door.sendall(nonce)
        answer = _receive(door, NONCE_BYTES + PROOF_BYTES)
        proof = _Proof(secret, _job_name(env), nonce, answer[:NONCE_BYTES])
        if not proof.holds(answer[NONCE_BYTES:], "server"):
            raise _StrangerError
        rank_bytes = struct.pack("!I", env.rank)
        door.sendall(rank_bytes + proof.of("client", rank_bytes))
        door.settimeout(max(HANDSHAKE_S, ends - time.monotonic()))
        (size,) = struct.unpack("!I", _receive(door, 4))
        sealed = _receive(door, min(size, 4096))
    invitation = sealed[PROOF_BYTES:]
    if not proof.holds(sealed[:PROOF_BYTES], "invitation", invitation):
        raise _StrangerError
    place = json.loads(invitation)
    try:
        store = TCPStore(place["address"], place["port"], wait_for_workers=False, timeout=LOOK_UP)
    except (DistNetworkError, RuntimeError) as error:
        raise MeetingError(
            f"rank {env.rank} does not reach rank 0's store: {first_line(str(error))}"
        ) from None
    return PrefixStore(place["prefix"], store)


def free_port() -> int:
    """Return a port of `PORTS` at which a process of this host can listen now.

    Ports for outgoing connections are left out: a process that tries to connect to one of them may
    be given that very port for its own end, and so connect to itself.

    Raises:
        MeetingError: None of the ports that were tried is free.
    """
    for port in random.SystemRandom().sample(PORTS, CANDIDATES):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise MeetingError(
        f"{CANDIDATES} ports from {PORTS.start} to {PORTS.stop - 1} were tried, and none was free"
    )


def _listen(env: WorkerEnvironment) -> socket.socket:
    """Open rank 0's door on the first port that is free.

    On Slurm rank 0 listens on all interfaces: its node's name may resolve to another address on
    other nodes, and every peer has to prove itself.
    """
    ports = candidate_ports(env)
    why = ""
    address = "" if env.on_slurm else LOOPBACK
    for port in ports:
        try:
            return socket.create_server((address, port), backlog=env.world_size + 16)
        except OSError as error:
            why = str(error)
    asked = ""
    if env.master_port:
        asked = "; MASTER_PORT asks for this port, and without it another one is taken"
    raise MeetingError(f"rank 0 cannot listen at {_host(env)} on {_named(ports)}{asked}: {why}")


def _admit_only(listener: socket.socket, addresses: Collection[str]) -> None:
    """Have the kernel drop connections from other addresses: TCPStore lists its keys to every peer.

    A classic BPF program on the socket that will listen (man 7 socket, SO_ATTACH_FILTER) compares
    the sender's IPv4 address; accepted sockets inherit the program.
    """
    # BPF_LD+BPF_W+BPF_ABS from SKF_NET_OFF + 12, the source address in the IP header
    program = [(0x20, 0, 0, 0xFFF0_0000 + 12)]
    for address in sorted(addresses):
        # BPF_JMP+BPF_JEQ+BPF_K: skip the next instruction unless equal; BPF_RET+BPF_K: accept
        program += [
            (0x15, 0, 1, int(ipaddress.IPv4Address(address))),
            (0x06, 0, 0, 0xFFFF_FFFF),
        ]
    # drop
    program.append((0x06, 0, 0, 0))
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code)
    option = struct.pack("HL", len(program), ctypes.addressof(buffer))
    try:
        listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, option)
    except OSError as error:
        sys.stderr.write(f"the kernel does not filter connections to the workers' store: {error}\n")


def _receive(connection: socket.socket, count: int) -> bytes:
    """Receive exactly `count` bytes.

    Raises:
        OSError: The bytes do not come within the connection's time limit.
    """
    ends = time.monotonic() + (connection.gettimeout() or HANDSHAKE_S)
    received = b""
    while len(received) < count:
        piece = connection.recv(count - len(received))
        if not piece or time.monotonic() > ends:
            raise ConnectionError("the other side closed the connection, or was too slow")
        received += piece
    return received


def _host(env: WorkerEnvironment) -> str:
    return env.hosts[0] if env.on_slurm else LOOPBACK


def _named(ports: Sequence[int]) -> str:
    return ("port " if len(ports) == 1 else "ports ") + ", ".join(map(str, ports))
