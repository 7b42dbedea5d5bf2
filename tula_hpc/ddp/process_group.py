"""Make process groups of a job's workers, and pick the device of each worker.

A profile measures on different numbers of its job's nodes, see `Allocation`. The workers of the
nodes in use form torch's default process group, so no other code has to know that there are more
workers. These wait for rank 0's next decision in a system call, which uses no CPU.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from tula_hpc.config import ClusterSpec, WorkloadSpec
from tula_hpc.ddp.rendezvous import meet
from tula_hpc.env import WorkerEnvironment, granted_gpus, socket_interface
from tula_hpc.errors import DeviceError, InputError
from tula_hpc.formatting import first_line, plural

# for failures other than a peer's death, which gloo and srun -K1 notice at once
COLLECTIVE_TIMEOUT = timedelta(minutes=10)
# shorter, since a profile job has only minutes, and all of its nodes would wait
PROFILE_COLLECTIVE_TIMEOUT = timedelta(minutes=3)
# compute capability of the first GPUs with bf16 units, A100's 8.0
BF16_FROM_MAJOR = 8


@contextlib.contextmanager
def process_group(
    cluster: ClusterSpec,
    env: WorkerEnvironment,
    store: Store | None = None,
    timeout: timedelta = COLLECTIVE_TIMEOUT,
) -> Iterator[None]:
    """Run the block in a process group: nccl on GPUs, gloo on CPUs; none for a single worker.

    The workers of the group share `store`; if it is None, they make one.

    Raises:
        InputError: This worker has no GPU of its own, torch has no kernels for it, or its node
            lacks a network interface that gloo is set to use.
    """
    torch.set_num_threads(cluster.cpus_per_worker)
    device = pick_device(cluster, env.local_rank)
    if device.type == "cuda":
        # before any collective, which would fail with a message of nccl's
        check_kernels(device)
        torch.cuda.set_device(device)
    if env.world_size == 1:
        yield
        return
    if device.type == "cpu":
        check_interfaces()
    if store is None:
        store = PrefixStore("group", meet(env, COLLECTIVE_TIMEOUT))
    dist.init_process_group(
        backend_of(cluster), timeout=timeout, store=store, rank=env.rank, world_size=env.world_size
    )
    yield
    # not after an error: peers may wait in a collective, and nccl would wait for them
    leave_group()


def check_interfaces() -> None:
    """Check that this node has the network interfaces that gloo is set to use.

    Raises:
        InputError: The node lacks one of them.
    """
    present = [name for _, name in socket.if_nameindex()]
    for wanted in filter(None, socket_interface("gloo").split(",")):
        if wanted not in present:
            raise InputError(
                f"{socket.gethostname()} has no network interface {wanted}; expected one of: "
                f"{', '.join(present)}",
                key="environment.GLOO_SOCKET_IFNAME",
            )


def leave_group() -> None:
    """End the process group, whose models must not be in use any more.

    Models are freed first: a model that is freed after its group waits for the group's threads
    while it holds Python's global lock, for which such a thread may be waiting itself.
    """
    gc.collect()
    dist.destroy_process_group()


def backend_of(cluster: ClusterSpec) -> str:
    """Return the collective library for the cluster's device."""
    return "nccl" if cluster.device == "cuda" else "gloo"


def pick_device(cluster: ClusterSpec, local_rank: int) -> torch.device:
    """Return the CPU, or the worker's own GPU, whether it sees all GPUs of the node or just one.

    Raises:
        DeviceError: The scheduler gave this job GPUs that are not there.
        InputError: There is no GPU, or another worker uses the same one, which nccl refuses.
    """
    if cluster.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        # torch without CUDA, or too new for the driver, would see no GPU on other nodes either
        if granted_gpus() and torch.version.cuda is not None and "is too old" not in _why_no_gpu():
            raise DeviceError(
                f"Slurm granted {plural(granted_gpus(), 'GPU')}, but torch sees none: "
                f"{_why_no_gpu()}"
            )
        raise InputError(
            f'"cuda", but torch sees no GPU on {os.uname().nodename}: {_why_no_gpu()}; '
            'if there are only CPUs, set device = "cpu"',
            key="device",
        )
    count = torch.cuda.device_count()
    if count < granted_gpus():
        granted = plural(granted_gpus(), "GPU")
        raise DeviceError(f"Slurm granted {granted}, but torch sees only {count}")
    # if Slurm binds each task to one GPU, every task sees just that GPU
    if local_rank >= count and (cluster.executor == "local" or count > 1):
        message = f"each worker needs a GPU of its own, but {os.uname().nodename} has more workers than GPUs ({count})"
        raise InputError(
            f"{message}; see workers_per_node, search.cluster_sizes and gres", key="device"
        )
    return torch.device("cuda", local_rank % count)


def _why_no_gpu() -> str:
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call] # torch's
    except (RuntimeError, AssertionError) as error:
        return first_line(str(error)).rstrip(".")
    return "it does not say why"


def check_kernels(device: torch.device) -> None:
    """Refuse a GPU for which this build of torch has no kernels: newer ones leave out older GPUs.

    Raises:
        InputError: torch has no kernels for the GPU.
    """
    major, minor = torch.cuda.get_device_capability(device)
    known = torch.cuda.get_arch_list()
    if torch.version.cuda is None or any(_runs_on(name, major, minor) for name in known):
        return
    message = f"torch {torch.__version__} has no kernels for {torch.cuda.get_device_name(device)} (sm_{major}{minor})"
    remedy = "install torch 2.10.0 (constraints.txt), which has them from sm_70 (V100) to sm_120"
    raise InputError(f"{message}, only for {' '.join(known)}; {remedy}", key="device")


def check_precision(device: torch.device, precision: str) -> None:
    """Refuse bf16 on a GPU without units for it.

    Such a GPU has no bf16 convolutions in cuDNN and emulates other operators, which take several
    times as long as in fp32; `torch.cuda.is_bf16_supported` counts the emulation as support.

    Raises:
        InputError: The GPU has no bf16 units; the message says which precision to use.
    """
    if precision != "bf16" or torch.version.cuda is None:
        return
    major, minor = torch.cuda.get_device_capability(device)
    if major >= BF16_FROM_MAJOR:
        return
    name = torch.cuda.get_device_name(device)
    message = f"{name} (sm_{major}{minor}) has no bf16 units, which GPUs have from sm_80 (A100) on"
    raise InputError(f'{message}; use precision = "fp16"', key="workload.precision")


def choose_kernels(workload: WorkloadSpec) -> None:
    """Set the kernels that cuDNN and cuBLAS may choose, by the workload's keys."""
    torch.backends.cudnn.benchmark = workload.cudnn_benchmark
    torch.backends.cudnn.allow_tf32 = workload.tf32
    torch.backends.cuda.matmul.allow_tf32 = workload.tf32


def _runs_on(name: str, major: int, minor: int) -> bool:
    """Tell whether kernels run: sm_75 on its own generation, compute_75 on any later one too."""
    found = re.fullmatch(r"(sm|compute)_(\d+)(\d)[a-z]?", name)
    if found is None:
        return False
    built = int(found[2]), int(found[3])
    return built <= (major, minor) and (found[1] == "compute" or built[0] == major)


def describe_versions() -> dict[str, str]:
    """Return the versions that a measurement depends on."""
    import platform

    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kernel": os.uname().release,
    }
    if torch.cuda.is_available():
        versions["cuda"] = str(torch.version.cuda)
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return versions


class Allocation:
    """Workers of a job, of which those on its first nodes form one process group after another.

    Rank 0 decides, and the others follow; they wait up to `patience` for its next decision. They
    notice at once if rank 0 dies, since it holds the store.

    Raises:
        InputError: This worker's node lacks a network interface that gloo is set to use.
    """

    def __init__(self, cluster: ClusterSpec, env: WorkerEnvironment, patience: timedelta) -> None:
        self.cluster, self.env, self.patience = cluster, env, patience
        if env.world_size > 1 and cluster.device == "cpu":
            # here, since a script makes its own group, and gloo's error there would be blamed on it
            check_interfaces()
        self.store = meet(env, COLLECTIVE_TIMEOUT) if env.world_size > 1 else None
        self._decisions = 0
        # number of nodes of the group that was joined last
        self._nodes = 0
        self._group = contextlib.ExitStack()

    def broadcast(self, decide: Callable[[], str]) -> str:
        """Return rank 0's decision, once all workers have called this. Collective."""
        self._decisions += 1
        if self.store is None:
            return decide()
        self._await_all(self.store)
        key = f"decision/{self._decisions}"
        if self.env.rank == 0:
            self.store.set(key, decide())
        self.store.wait([key], self.patience)
        return self.store.get(key).decode()

    def join(self, nodes: int) -> WorkerEnvironment | None:
        """Join the group of the first `nodes` nodes; None on other nodes. Collective.

        The group stays until the number of nodes changes, or until `leave`. After an error it is
        not left, see `process_group`.
        """
        place = place_among(self.env, nodes, self.cluster.workers_per_node)
        if nodes != self._nodes:
            self.leave()
            self._nodes = nodes
            if place is not None:
                store = self.store
                if store is not None:
                    store = PrefixStore(f"group/{self._decisions}", store)
                group = process_group(self.cluster, place, store, PROFILE_COLLECTIVE_TIMEOUT)
                self._group.enter_context(group)
        return place

    def leave(self) -> None:
        """Leave the group of the first nodes, if there is one."""
        self._group.close()
        self._nodes = 0

    def close(self) -> None:
        """Leave the job; rank 0, which holds the store, returns last. Collective."""
        self.leave()
        if self.store is not None:
            self._decisions += 1
            self._await_all(self.store)

    def _await_all(self, store: Store) -> None:
        keys = [f"done/{self._decisions}/{rank}" for rank in range(self.env.world_size)]
        store.set(keys[self.env.rank], "")
        if self.env.rank == 0:
            store.wait(keys, self.patience)


def place_among(
    env: WorkerEnvironment, nodes: int, workers_per_node: int
) -> WorkerEnvironment | None:
    """Return the environment with the rank among workers of the first nodes; None on other nodes.

    Slurm may number tasks round-robin over the nodes, so ranks are counted anew, node by node; rank
    0 stays rank 0. The local executor emulates nodes on one machine, which has all workers.
    """
    node, local_rank = divmod(env.rank, workers_per_node)
    if env.on_slurm:
        node, local_rank = env.node_rank, env.local_rank
    if node >= nodes:
        return None
    rank = node * workers_per_node + local_rank
    return env._replace(rank=rank, world_size=nodes * workers_per_node, hosts=env.hosts[:nodes])
