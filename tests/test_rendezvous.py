"""How the workers of a job meet, whoever else listens on their ports. Workers are threads of this process."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import TCPStore  # type: ignore[attr-defined] # documented, though not in __all__

from tests.forked import QUICK_NAMES
from tula_hpc import rendezvous
from tula_hpc.env import RUN_MARK, WorkerEnvironment, join_job
from tula_hpc.errors import InputError, MeetingError
from tula_hpc.rendezvous import CANDIDATES, LOOPBACK, candidate_ports, meet

ENOUGH = timedelta(seconds=60)
SHORT = timedelta(seconds=0.2)


@pytest.fixture(autouse=True)
def soon_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of addresses, and by torch strangers that hung up: a thread goes on with that while other tests run."""
    monkeypatch.setenv("RES_OPTIONS", QUICK_NAMES)
    monkeypatch.setattr(rendezvous, "LOOK_UP", timedelta(seconds=3))


@pytest.fixture(scope="module", autouse=True)
def all_visits_are_over() -> Iterator[None]:
    """At the end: a thread that comes back from torch while Python shuts down would end the process with an error."""
    yield
    for thread in threading.enumerate():
        if isinstance(thread, rendezvous._Visit):
            thread.join(timeout=30)


@pytest.fixture
def job(tmp_path: Path) -> WorkerEnvironment:
    """Rank 0 of three workers."""
    return WorkerEnvironment(0, 3, 0, 0, "7", 0, ("here",), on_slurm=False, submission=str(tmp_path))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """For what is closed at the end."""
    with ExitStack() as stack:
        yield stack


def begin(job: WorkerEnvironment, late: float = 0.0) -> list[Future[TCPStore]]:
    """Every worker in a thread; rank 0 comes late."""

    def come(rank: int) -> TCPStore:
        time.sleep(late if rank == 0 else 0.0)
        return meet(job._replace(rank=rank), ENOUGH)

    pool = ThreadPoolExecutor(job.world_size)
    workers = [pool.submit(come, rank) for rank in range(job.world_size)]
    pool.shutdown(wait=False)
    return workers


def met(job: WorkerEnvironment, late: float = 0.0) -> list[TCPStore]:
    """The stores of all workers, once they have met: it is one."""
    stores = [worker.result(timeout=60) for worker in begin(job, late)]
    assert len({store.port for store in stores}) == 1
    stores[-1].set("word", job.job_id)
    assert all(store.get("word") == job.job_id.encode() for store in stores)
    return stores


def listen(stack: ExitStack, port: int, answer: Callable[[socket.socket], None] | None = None) -> None:
    """A stranger on a port; without an answer it never even takes the connections that the kernel keeps for it."""
    server = stack.enter_context(socket.create_server((LOOPBACK, port)))

    def serve() -> None:
        with suppress(OSError):  # closed
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


def test_workers_meet_on_the_first_port(job: WorkerEnvironment) -> None:
    assert met(job)[0].port == candidate_ports(job)[0]


def test_a_late_rank_0_is_waited_for(job: WorkerEnvironment) -> None:
    assert met(job, late=0.3)


@pytest.mark.parametrize("answer", [None, answer_as_a_web_server, hang_up])
def test_strangers_on_the_ports_are_passed_by(
    job: WorkerEnvironment, stack: ExitStack, answer: Callable[[socket.socket], None] | None
) -> None:
    """One may say nothing, for ever."""
    ports = candidate_ports(job)
    for port in ports[:3]:
        listen(stack, port, answer)
    assert met(job)[0].port == ports[3]


def test_another_jobs_store_is_passed_by(job: WorkerEnvironment) -> None:
    """It speaks as ours does, and has room for our rank; a plain store of torch's bears no mark at all."""
    ports = candidate_ports(job)
    other = job._replace(job_id="8", world_size=2, master_port=str(ports[0]))
    stores = met(other)
    plain = TCPStore(LOOPBACK, ports[1], is_master=True, wait_for_workers=False)
    assert met(job)[0].port == ports[2]
    assert [store.get("word") for store in stores] == [b"8", b"8"]
    assert plain.num_keys() == 0  # nothing was left there


def test_a_job_that_meets_again_does_not_take_the_last_store(job: WorkerEnvironment) -> None:
    """A quick worker comes while rank 0 still keeps it."""
    first = met(job)
    second = met(job)
    second[0].set("word", "second")
    assert second[0].port != first[0].port
    assert first[0].get("word") == b"7"


def test_a_port_that_is_given_is_the_one(job: WorkerEnvironment, stack: ExitStack) -> None:
    port = candidate_ports(job)[-1]
    given = job._replace(master_port=str(port))
    stores = met(given)
    assert {store.port for store in stores} == {port}
    with pytest.raises(MeetingError, match=rf"^rank 0 cannot listen .* on port {port}; MASTER_PORT asks .*EADDRINUSE"):
        meet(given, ENOUGH)


@pytest.mark.parametrize("wrong", ["0", "65536", "-1", "http", "²", " "])
def test_a_master_port_that_is_none_is_refused(job: WorkerEnvironment, wrong: str) -> None:
    with pytest.raises(InputError, match=r"^MASTER_PORT: expected a port from 1 to 65535, found "):
        meet(job._replace(master_port=wrong), ENOUGH)


def test_rank_0_says_which_ports_are_all_taken(job: WorkerEnvironment, stack: ExitStack) -> None:
    ports = candidate_ports(job)
    for port in ports:
        listen(stack, port)
    with pytest.raises(MeetingError, match=f"on ports {', '.join(map(str, ports))}: .*EADDRINUSE"):
        meet(job, ENOUGH)


def test_rank_0_says_who_did_not_come(job: WorkerEnvironment, monkeypatch: pytest.MonkeyPatch) -> None:
    store = rendezvous._listen(job)
    store.set(rendezvous._seat(job, 1), "has come")
    monkeypatch.setattr(rendezvous, "_listen", lambda _: store)
    with pytest.raises(MeetingError, match=r"^1 of 3 workers did not come to rank 0 at .* within 0 s, rank 2 for one"):
        meet(job, SHORT)


@pytest.mark.parametrize(("on_slurm", "host"), [(False, LOOPBACK), (True, "localhost")])
def test_the_others_say_where_they_looked_for_rank_0(job: WorkerEnvironment, on_slurm: bool, host: str) -> None:
    ports = ", ".join(map(str, candidate_ports(job)))
    looking = job._replace(rank=2, hosts=("localhost", "elsewhere"), on_slurm=on_slurm)
    with pytest.raises(MeetingError, match=f"^rank 2 did not find rank 0 of job 7 at {host} on ports {ports} within"):
        meet(looking, SHORT)


@pytest.mark.parametrize("rank", [0, 1])
def test_on_one_machine_nobody_waits_long_for_one_that_died(
    job: WorkerEnvironment, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    monkeypatch.setattr(rendezvous, "LOCAL_PATIENCE", SHORT)
    with pytest.raises(MeetingError):
        meet(job._replace(rank=rank), timedelta(minutes=10))


def test_a_job_knows_its_place_and_tells_users_models_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """But of the port: what the job submits would inherit that."""
    place = {"JOB_ID": "12", "NTASKS": "4", "JOB_NUM_NODES": "1", "NODEID": "0", "GLOBALID": "3", "LOCALID": "3"}
    for key, value in place.items():
        monkeypatch.setenv(f"SUBMITIT_LOCAL_{key}", value)
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "local")
    monkeypatch.setenv("SUBMITIT_FOLDER", "/run/train")
    monkeypatch.setenv("MASTER_PORT", "29500")
    told = {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "4"}
    for key in told:
        monkeypatch.setenv(key, "of the job that submitted this one")
    before = dict(os.environ)
    assert join_job() == WorkerEnvironment(
        3, 4, 3, 0, "12", 0, (socket.gethostname(),), on_slurm=False, submission="/run/train", master_port="29500"
    )
    assert dict(os.environ) == before | told


@pytest.mark.parametrize(("rank", "said"), [("0", ""), ("3", f"{RUN_MARK}2\n")])
def test_every_run_of_a_requeued_job_begins_anew_in_the_log_of_each_worker(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: str, said: str
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
    assert capsys.readouterr().err == said
