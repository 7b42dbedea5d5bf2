"""Broken devices that a run knows of: hosts to avoid, and the jobs that met them.

After a device failed in a host, the run's submissions leave the host out for a day; then it is used
again, since it may have been repaired. A configuration or training whose job failed on such a host
is submitted again a few times, see `tula_hpc/retry_policy.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tula_hpc.failure_kinds import Failure
from tula_hpc.formatting import first_line, listed
from tula_hpc.records.base import Configuration, Record
from tula_hpc.records.events import EndData, Event, hosts_in

# part of the error that `ddp.process_group` raises
NO_GPU = "torch sees none"
AVOIDED_S = 24 * 3600.0


class BrokenHost(Record):
    """Host in which a device failed."""

    host: str
    # error from the worker on this host, or from its log
    said: str
    # Unix time until which submissions leave the host out
    until: float


def broken_hosts(events: Iterable[Event], now: float) -> list[BrokenHost]:
    """Return the hosts that a submission at time `now` leaves out, earliest failure first."""
    found: dict[str, BrokenHost] = {}
    for event in events:
        if event.failure is not Failure.DEVICE_FAILED:
            continue
        for host in hosts_in(event):
            before = found.get(host)
            # the worker's own error is preferred to what a command later read from the job's end
            said = before.said if before and before.until > event.time else event.detail
            found[host] = BrokenHost(host=host, said=said, until=min(event.time, now) + AVOIDED_S)
    return [each for each in found.values() if each.until > now]


def list_hosts(broken: Sequence[BrokenHost]) -> str:
    """List the hosts with their errors in one line."""
    if not broken:
        return "on unknown hosts"
    hosts: dict[str, list[str]] = {}
    for each in broken:
        hosts.setdefault(first_line(each.said), []).append(each.host)
    return "; ".join(f"{listed(names)} reported {said!r}" for said, names in hosts.items())


def why_given_up(events: Iterable[Event], job_id: str, now: float) -> str:
    """Explain in one line, after the last attempt, which hosts are broken and what to do."""
    broken = broken_hosts(events, now)
    todo = "have these nodes repaired"
    if broken and all(NO_GPU in each.said for each in broken):
        todo = f'if these nodes have no GPUs, set device = "cpu" in the cluster file; else {todo}'
    return f"a device failed once more, in job {job_id}: {list_hosts(broken)}; {todo}"


def profiled_in_vain(
    events: Iterable[Event], configuration: Configuration, partition: str, since: float
) -> int:
    """Count the jobs that ended by a broken device while they measured this configuration."""
    jobs = 0
    for each in events:
        if each.event == "ended" and each.failure is Failure.DEVICE_FAILED and each.time >= since:
            end = EndData.of(each)
            jobs += (end.configuration, end.partition) == (configuration, partition)
    return jobs
