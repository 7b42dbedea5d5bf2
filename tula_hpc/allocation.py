"""One allocation of nodes, measured on again and again: all workers hear what comes next, and some take part in it.

Those who take part join a torch.distributed job of their own, whose process group is the default one: nothing else has
to know that there are others. Those who do not, wait for the next word in a system call, which uses no CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import timedelta

from torch.distributed.distributed_c10d import PrefixStore, Store

from tula_hpc.config import ClusterSpec
from tula_hpc.env import WorkerEnvironment
from tula_hpc.rendezvous import meet
from tula_hpc.worker import COLLECTIVE_TIMEOUT, PROFILE_COLLECTIVE_TIMEOUT, process_group


class Allocation:
    """The workers of a job, of which rank 0 decides and all hear what they do next.

    Args:
        cluster: The device, and the workers on each node.
        env: This worker's place among all of the job.
        patience: How long to wait for rank 0's next word. A rank 0 that died is noticed at once: it keeps the store.
    """

    def __init__(self, cluster: ClusterSpec, env: WorkerEnvironment, patience: timedelta) -> None:
        self.cluster, self.env, self.patience = cluster, env, patience
        self.store = meet(env, COLLECTIVE_TIMEOUT) if env.world_size > 1 else None
        self._words = 0
        self._nodes = 0  # of the group that was joined last
        self._group = contextlib.ExitStack()

    def hear(self, decide: Callable[[], str]) -> str:
        """What rank 0 decides; every worker calls this. Returns when all are done with what came before."""
        self._words += 1
        if self.store is None:
            return decide()
        self._await_all(self.store)
        key = f"word/{self._words}"
        if self.env.rank == 0:
            self.store.set(key, decide())
        self.store.wait([key], self.patience)
        return self.store.get(key).decode()

    def join(self, nodes: int) -> WorkerEnvironment | None:
        """Be a worker of the first `nodes` nodes, or None for those on other nodes; every worker calls this.

        The group stays as long as the number of nodes does. It is left with `leave`, not after an error: see
        `process_group`.
        """
        place = place_among(self.env, nodes, self.cluster.workers_per_node)
        if nodes != self._nodes:
            self.leave()
            self._nodes = nodes
            if place is not None:
                store = None if self.store is None else PrefixStore(f"group/{self._words}", self.store)
                group = process_group(self.cluster, place, store, PROFILE_COLLECTIVE_TIMEOUT)
                self._group.enter_context(group)
        return place

    def leave(self) -> None:
        """Leave the group of the first nodes, if there is one."""
        self._group.close()
        self._nodes = 0

    def close(self) -> None:
        """The end; every worker calls this. Rank 0 is the last to go, because the others ask its store."""
        self.leave()
        if self.store is not None:
            self._words += 1
            self._await_all(self.store)

    def _await_all(self, store: Store) -> None:
        """Every worker says that it came so far; rank 0 waits for all of them."""
        keys = [f"done/{self._words}/{rank}" for rank in range(self.env.world_size)]
        store.set(keys[self.env.rank], "")
        if self.env.rank == 0:
            store.wait(keys, self.patience)


def place_among(env: WorkerEnvironment, nodes: int, workers_per_node: int) -> WorkerEnvironment | None:
    """This worker's place among those of the job's first nodes; None if it runs on another one.

    Slurm may number tasks round the nodes, so that ranks are counted anew, node by node; rank 0 remains rank 0. The
    local executor emulates nodes: it has one, with all workers.
    """
    node, local_rank = (env.node_rank, env.local_rank) if env.on_slurm else divmod(env.rank, workers_per_node)
    if node >= nodes:
        return None
    rank = node * workers_per_node + local_rank
    return env._replace(rank=rank, world_size=nodes * workers_per_node, hosts=env.hosts[:nodes])
