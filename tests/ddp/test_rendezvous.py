"""How the workers of a job meet, whoever else listens on their ports. Workers are threads of this process."""

from __future__ import annotations

import errno
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import Store  # type: ignore[attr-defined] # documented, though not in __all__

from tula_hpc.ddp import rendezvous
from tula_hpc.ddp.process_group import check_interfaces
from tula_hpc.ddp.rendezvous import CANDIDATES, LOOPBACK, candidate_ports, free_port, meet
from tula_hpc.env import RUN_MARK, SECRET_FILE, WorkerEnvironment, join_job
from tula_hpc.errors import InputError, MeetingError

ENOUGH = timedelta(seconds=60)
SHORT = timedelta(seconds=0.2)


@pytest.fixture
def job(tmp_path: Path) -> WorkerEnvironment:
    """Rank 0 of three workers, whose submission has a secret."""
    (tmp_path / SECRET_FILE).write_text(secrets.token_hex(32))
    return WorkerEnvironment(0, 3, 0, 0, "7", 0, ("here",), on_slurm=False, submission=str(tmp_path))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """A stack of resources that are closed at the test's end."""
    with ExitStack() as stack:
        yield stack


def begin(job: WorkerEnvironment, ranks: Iterable[int] | None = None, late: float = 0.0) -> list[Future[Store]]:
    """Start each worker in a thread; rank 0 begins `late` seconds later."""

    def come(rank: int) -> Store:
        time.sleep(late if rank == 0 else 0.0)
        return meet(job._replace(rank=rank), ENOUGH)

    pool = ThreadPoolExecutor(job.world_size)
    workers = [pool.submit(come, rank) for rank in ranks or range(job.world_size)]
    pool.shutdown(wait=False)
    return workers


def met(job: WorkerEnvironment, late: float = 0.0) -> list[Store]:
    """Let all workers meet; return their stores, checked to share their content."""
    stores = [worker.result(timeout=60) for worker in begin(job, late=late)]
    stores[-1].set("word", job.job_id)
    assert all(store.get("word") == job.job_id.encode() for store in stores)
    return stores


def port_of(store: Store) -> int:
    """Return the port on which the TCPStore within this store listens."""
    return int(store.underlying_store.port)  # type: ignore[attr-defined] # of PrefixStore


def addresses_of(port: int) -> list[str]:
    """Return the addresses on which a process listens at a port, as the kernel writes them."""
    tables = [Path(f"/proc/net/{name}") for name in ("tcp", "tcp6")]
    text = "".join(table.read_text() for table in tables if table.exists())
    lines = [line.split() for line in text.splitlines()]
    places = [words[1] for words in lines if words[3] == "0A"]
    return [place.partition(":")[0] for place in places if place.endswith(f":{port:04X}")]


def listen(stack: ExitStack, port: int, answer: Callable[[socket.socket], None] | None = None) -> None:
    """Listen on a port as a foreign process; without `answer`, never accept the connections that the kernel queues."""
    server = stack.enter_context(socket.create_server((LOOPBACK, port)))

    def serve() -> None:
        # the server was closed
        with suppress(OSError):
            while answer is not None:
                connection, _ = server.accept()
                with connection:
                    answer(connection)

    if answer is not None:
        stack.callback(server.shutdown, socket.SHUT_RDWR)
        threading.Thread(target=serve, daemon=True).start()


def answer_as_a_web_server(connection: socket.socket) -> None:
    if connection.recv(4096):
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def hang_up(connection: socket.socket) -> None:
    connection.recv(1)


@given(st.text(), st.integers(0, 100))
def test_all_workers_know_the_same_ports_below_those_of_connections(job_id: str, restart_count: int) -> None:
    first = WorkerEnvironment(0, 9, 0, 0, job_id, restart_count, ("a", "b"), on_slurm=True)
    ports = candidate_ports(first)
    assert ports == candidate_ports(first._replace(rank=8, local_rank=3, node_rank=1))
    assert len(set(ports)) == CANDIDATES
    assert all(1024 <= port < 32768 for port in ports)
    for other in ({"restart_count": restart_count + 1}, {"job_id": job_id + "0"}, {"submission": "/run"}):
        assert ports != candidate_ports(first._replace(**other))


def test_workers_meet(job: WorkerEnvironment) -> None:
    assert met(job)


def test_a_late_rank_0_is_waited_for(job: WorkerEnvironment) -> None:
    assert met(job, late=0.3)


@pytest.mark.parametrize("answer", [None, answer_as_a_web_server, hang_up])
def test_strangers_on_the_ports_are_passed_by(
    job: WorkerEnvironment,
    stack: ExitStack,
    answer: Callable[[socket.socket], None] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of them never answers."""
    monkeypatch.setattr(rendezvous, "HANDSHAKE_S", 0.2)
    for port in candidate_ports(job)[:3]:
        listen(stack, port, answer)
    assert met(job)


def test_an_impostor_of_rank_0_without_the_secret_gets_no_worker(job: WorkerEnvironment) -> None:
    """The impostor knows the protocol and all of the job except its secret, and listens on the job's first port."""
    door = rendezvous._Door(job, secrets.token_bytes(32))
    assert door.socket.getsockname()[1] == candidate_ports(job)[0]
    with ThreadPoolExecutor() as pool:
        played = pool.submit(door.gather, timedelta(seconds=1))
        assert met(job)
        with pytest.raises(MeetingError, match=r"^2 of 3 workers did not come"):
            played.result()


def test_an_impostor_of_a_rank_without_the_secret_gets_no_seat(
    job: WorkerEnvironment, capfd: pytest.CaptureFixture[str]
) -> None:
    """The job's workers meet, and rank 0 reports who was refused."""
    port = candidate_ports(job)[0]
    rank_0 = begin(job, ranks=[0])[0]
    time.sleep(0.2)
    # it finds out that this rank 0 has another secret
    with pytest.raises(rendezvous._StrangerError):
        rendezvous._visit(job._replace(rank=1), secrets.token_bytes(32), port, time.monotonic() + 5)
    # an impostor that goes on regardless
    with socket.create_connection((LOOPBACK, port), 5) as door:
        door.sendall(bytes(32))
        assert len(rendezvous._receive(door, 64)) == 64
        door.sendall(bytes([0, 0, 0, 1]) + secrets.token_bytes(32))
        assert door.recv(1) == b""
    others = begin(job, ranks=[1, 2])
    assert all(worker.result(timeout=60) for worker in [rank_0, *others])
    assert "rank 0 refused a connection from 127.0.0.1: it did not prove that it" in capfd.readouterr().err


def test_a_left_over_of_an_earlier_run_of_the_job_gets_no_seat(job: WorkerEnvironment) -> None:
    """The old process knows the secret, and holds the port on which the next run meets."""
    port = str(candidate_ports(job)[0])
    old = job._replace(rank=1, master_port=port)
    new = job._replace(restart_count=1, master_port=port)
    rank_0 = begin(new, ranks=[0])[0]
    with pytest.raises(MeetingError):
        meet(old, SHORT)
    assert all(worker.result(timeout=60) for worker in [rank_0, *begin(new, ranks=[1, 2])])


def test_a_seat_is_given_once(job: WorkerEnvironment) -> None:
    """A second process is refused a rank's place even with the secret."""
    rank_0, first = begin(job, ranks=[0, 1])
    time.sleep(0.3)
    with pytest.raises(MeetingError):
        meet(job._replace(rank=1), SHORT)
    assert all(worker.result(timeout=60) for worker in [rank_0, first, *begin(job, ranks=[2])])


def test_a_recorded_handshake_is_not_accepted_again(job: WorkerEnvironment) -> None:
    proof = rendezvous._Proof(b"secret", "job", b"1" * 32, b"2" * 32)
    assert proof.holds(proof.of("client", b"rank"), "client", b"rank")
    for other in (proof._replace(server_nonce=b"3" * 32), proof._replace(job="other"), proof._replace(secret=b"x")):
        assert not other.holds(proof.of("client", b"rank"), "client", b"rank")
    assert not proof.holds(proof.of("server", b"rank"), "client", b"rank")
    assert not proof.holds(proof.of("client", b"rank"), "client", b"other rank")


def test_many_silent_connections_keep_no_worker_out(job: WorkerEnvironment, stack: ExitStack) -> None:
    rank_0 = begin(job, ranks=[0])[0]
    time.sleep(0.2)
    for _ in range(20):
        stack.enter_context(socket.create_connection((LOOPBACK, candidate_ports(job)[0])))
    assert all(worker.result(timeout=60) for worker in [rank_0, *begin(job, ranks=[1, 2])])


def test_strangers_who_hold_all_places_and_come_again_keep_no_worker_out(
    job: WorkerEnvironment, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "MOST_STRANGERS", 8)
    rank_0 = begin(job, ranks=[0])[0]
    port, over = candidate_ports(job)[0], threading.Event()
    stack.callback(over.set)

    def come_again() -> None:
        while not over.is_set():
            with suppress(OSError), socket.create_connection((LOOPBACK, port), 1) as door:
                door.recv(1)
            over.wait(0.01)

    for _ in range(30):
        threading.Thread(target=come_again, daemon=True).start()
    time.sleep(0.5)
    assert all(worker.result(timeout=30) for worker in [rank_0, *begin(job, ranks=[1, 2])])


def test_a_door_stays_open_where_one_connection_fails(job: WorkerEnvironment, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection fails if the process has no file descriptors left, or if the peer has gone."""
    faults = [OSError(errno.EMFILE, "too many"), OSError(errno.ECONNABORTED, "gone")]
    real = socket.socket.accept

    def accept(self: socket.socket) -> object:
        if faults:
            raise faults.pop()
        return real(self)

    monkeypatch.setattr(socket.socket, "accept", accept)
    assert met(job)
    assert not faults


def test_the_store_of_a_local_job_takes_no_connection_from_elsewhere(job: WorkerEnvironment) -> None:
    """It listens only on the loopback interface, and there only on the workers' address."""
    stores = met(job)
    port = port_of(stores[0])
    assert addresses_of(port) == ["0100007F"]
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.2", 0))
        stranger.settimeout(0.5)
        with pytest.raises(TimeoutError):
            stranger.connect((LOOPBACK, port))


def test_no_connection_is_accepted_by_the_store_before_it_knows_which_to_take(
    job: WorkerEnvironment, monkeypatch: pytest.MonkeyPatch, stack: ExitStack
) -> None:
    admit_only = rendezvous._admit_only
    came: list[int] = []

    def late(listener: socket.socket, addresses: Collection[str]) -> None:
        stranger = stack.enter_context(socket.socket())
        came.append(stranger.connect_ex(listener.getsockname()))
        admit_only(listener, addresses)

    monkeypatch.setattr(rendezvous, "_admit_only", late)
    assert met(job)
    assert came == [errno.ECONNREFUSED]


def test_the_store_of_a_job_on_slurm_listens_where_its_workers_come(job: WorkerEnvironment) -> None:
    stores = met(job._replace(on_slurm=True, hosts=("127.0.0.3", "elsewhere", "there")))
    assert addresses_of(port_of(stores[0])) == ["0300007F"]


def test_a_job_without_a_secret_says_so(job: WorkerEnvironment) -> None:
    (Path(job.submission) / SECRET_FILE).unlink()
    with pytest.raises(MeetingError, match=rf"{SECRET_FILE}: cannot be read .* submit the job again"):
        meet(job, ENOUGH)


def test_a_job_that_meets_again_has_another_store(job: WorkerEnvironment) -> None:
    """A quick worker may connect while rank 0 still has the store of the run before."""
    first = met(job)
    second = met(job)
    second[0].set("word", "second")
    assert first[0].get("word") == b"7"


def test_a_port_that_is_given_is_the_one(job: WorkerEnvironment, stack: ExitStack) -> None:
    port = candidate_ports(job)[-1]
    given = job._replace(master_port=str(port))
    assert met(given)
    listen(stack, port)
    with pytest.raises(MeetingError, match=rf"^rank 0 cannot listen .* on port {port}; MASTER_PORT asks .*in use"):
        meet(given, ENOUGH)


@pytest.mark.parametrize("wrong", ["0", "65536", "-1", "http", "²", " "])
def test_an_invalid_master_port_is_refused(job: WorkerEnvironment, wrong: str) -> None:
    with pytest.raises(InputError, match=r"^MASTER_PORT: expected a port from 1 to 65535, found "):
        meet(job._replace(master_port=wrong), ENOUGH)


def test_a_free_port_is_one_at_which_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: set[int] = set()
    bind = socket.socket.bind

    class Socket(socket.socket):
        def bind(self, address: Any) -> None:
            if address[1] in taken:
                raise OSError(errno.EADDRINUSE, "taken")
            bind(self, (address[0], 0))

    few = range(20_000, 20_000 + CANDIDATES)
    monkeypatch.setattr(rendezvous, "PORTS", few)
    monkeypatch.setattr(socket, "socket", Socket)
    taken.update(few[1:])
    assert free_port() == few[0]
    taken.add(few[0])
    with pytest.raises(MeetingError, match="none was free"):
        free_port()


def test_rank_0_says_which_ports_are_all_taken(job: WorkerEnvironment, stack: ExitStack) -> None:
    ports = candidate_ports(job)
    for port in ports:
        listen(stack, port)
    with pytest.raises(MeetingError, match=f"on ports {', '.join(map(str, ports))}: .*in use"):
        meet(job, ENOUGH)


def test_rank_0_says_who_did_not_come(job: WorkerEnvironment) -> None:
    came = begin(job, ranks=[1])[0]
    with pytest.raises(MeetingError, match=r"^1 of 3 workers did not come to rank 0 at .* 1 s, for example rank 2"):
        meet(job, timedelta(seconds=1))
    assert all(worker.result(timeout=60) for worker in [*begin(job, ranks=[0, 2]), came])


@pytest.mark.parametrize(("on_slurm", "host"), [(False, LOOPBACK), (True, "localhost")])
def test_the_others_say_where_they_looked_for_rank_0(job: WorkerEnvironment, on_slurm: bool, host: str) -> None:
    ports = ", ".join(map(str, candidate_ports(job)))
    looking = job._replace(rank=2, hosts=("localhost", "elsewhere"), on_slurm=on_slurm)
    with pytest.raises(MeetingError, match=f"^rank 2 did not find rank 0 of job 7 at {host} on ports {ports} within"):
        meet(looking, SHORT)


@pytest.mark.parametrize("rank", [0, 1])
def test_on_one_machine_no_worker_waits_long_for_one_that_died(
    job: WorkerEnvironment, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    monkeypatch.setattr(rendezvous, "LOCAL_PATIENCE", SHORT)
    with pytest.raises(MeetingError):
        meet(job._replace(rank=rank), timedelta(minutes=10))


def test_a_job_knows_its_place_and_tells_users_models_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The port is not in the environment, because processes that the job submits would inherit it."""
    place = {"JOB_ID": "12", "NTASKS": "4", "JOB_NUM_NODES": "1", "NODEID": "0", "GLOBALID": "3", "LOCALID": "3"}
    for key, value in place.items():
        monkeypatch.setenv(f"SUBMITIT_LOCAL_{key}", value)
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "local")
    monkeypatch.setenv("SUBMITIT_FOLDER", "/run/train")
    monkeypatch.setenv("MASTER_PORT", "29500")
    fields = {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "4"}
    for key in fields:
        monkeypatch.setenv(key, "of the job that submitted this one")
    for key in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(key, raising=False)
    before = dict(os.environ)
    assert join_job() == WorkerEnvironment(
        3, 4, 3, 0, "12", 0, (socket.gethostname(),), on_slurm=False, submission="/run/train", master_port="29500"
    )
    assert dict(os.environ) == before | fields | {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


@pytest.mark.parametrize(("rank", "expected"), [("0", ""), ("3", f"{RUN_MARK}2\n")])
def test_every_run_of_a_requeued_job_begins_anew_in_the_log_of_each_worker(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: str, expected: str
) -> None:
    """In that of rank 0 the batch script says so."""
    place = {"JOB_ID": "12", "NTASKS": "4", "JOB_NUM_NODES": "1", "NODEID": "0", "PROCID": rank, "LOCALID": rank}
    for key, value in {**place, "JOB_NODELIST": "here", "RESTART_COUNT": "2"}.items():
        monkeypatch.setenv(f"SLURM_{key}", value)
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    monkeypatch.setenv("SUBMITIT_FOLDER", "/run/train")
    for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(key, "")
    join_job()
    assert capsys.readouterr().err == expected


def test_an_interface_that_a_node_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    check_interfaces()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,ib9")
    with pytest.raises(InputError, match=r"^environment\.GLOO_SOCKET_IFNAME: .* no .*ib9; expected one of: .*\blo\b"):
        check_interfaces()
