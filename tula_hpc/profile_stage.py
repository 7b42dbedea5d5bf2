"""The profile stage: rounds of jobs for what the search proposes, until it proposes nothing more."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from tula_hpc.config import ClusterSpec, SweepSpec, sweep_for
from tula_hpc.errors import StageError
from tula_hpc.footprint import estimate
from tula_hpc.jobs import ProfileJob, counted
from tula_hpc.launch import Ended, Launcher, Submitted
from tula_hpc.progress import StageProgress, stage_progress
from tula_hpc.records import (
    Configuration,
    JobNote,
    Measurement,
    RunDirectory,
    append_record,
    notes_file,
    read_records,
    with_rank_files,
    write_atomically,
)
from tula_hpc.stages import Sweep, failed_measurement, wait_for_earlier, why

HOPELESS_ROUNDS = 3  # of jobs that fail, for other reasons than memory, before anything was measured


class Part(NamedTuple):
    """One part of the cluster and what is profiled there."""

    spec: SweepSpec  # with the cluster sizes that the part has nodes for
    cluster: ClusterSpec
    run: RunDirectory
    name: str  # see `Measurement.partition`
    since: float  # failures before this time do not count
    trusted_batch: int | None = None

    @property
    def launcher(self) -> Launcher:
        """Submits jobs to this part."""
        return Launcher(self.cluster, self.run, f"tula-{self.spec.name}")

    def propose(self) -> list[Configuration]:
        """What the search wants next on this part."""
        from tula_hpc.analysis.search import propose

        known = counted(self.run.measurements().records, self.name, self.since)
        return propose(self.spec, self.cluster, known, trusted_batch=self.trusted_batch)

    def measured_anything(self) -> bool:
        """Whether any profile of this part succeeded."""
        return any(m.status == "ok" and m.partition == self.name for m in self.run.measurements().records)


class Batch(NamedTuple):
    """Configurations on their way through the scheduler together: for each job a group and an output file."""

    groups: list[tuple[Configuration, ...]]
    outputs: list[Path]
    jobs: list[Submitted]


def profile_stage(sweep: Sweep) -> None:
    """Measure what the search proposes until it proposes nothing more, on each part of the cluster.

    Raises:
        StageError: Nothing could be measured at all; the message holds the first failure's log.
    """
    with stage_progress("profile") as progress:
        wait_for_earlier(sweep, "profile", lambda text: progress.update(0, 1, f"jobs submitted before: {text}"))
        failures = [failure for part in parts_of(sweep) for failure in _profile_part(part, progress)]
        measured = sweep.run.measurements().records
        progress.update(len(measured), len(measured), f"{len(measured)} measurements")
    if not any(m.status == "ok" for m in measured):
        raise StageError(f"profile: nothing could be measured; {why(failures)}")


def parts_of(sweep: Sweep) -> list[Part]:
    """The parts of the cluster that have nodes enough for any of the sweep's sizes."""
    now = time.time()
    named = zip(sweep.cluster.part_names(), sweep.cluster.parts(), strict=True)
    specs = ((sweep_for(sweep.spec, cluster), cluster, name) for name, cluster in named)
    return [Part(spec, cluster, sweep.run, name, now) for spec, cluster, name in specs if spec is not None]


def _profile_part(part: Part, progress: StageProgress) -> list[Ended]:
    part = part._replace(trusted_batch=_trusted_batch(part, progress))
    failures: list[Ended] = []
    barren = 0
    while barren < HOPELESS_ROUNDS and (proposed := part.propose()):
        found = _profile_round(part, proposed, progress)
        failures += found
        broken = any(not end.failure.is_oom for end in found)
        barren = barren + 1 if broken and not part.measured_anything() else 0
    return failures


def _trusted_batch(part: Part, progress: StageProgress) -> int | None:
    """Largest local batch that fits by an estimate, made once, before the first profile, where a limit is known."""
    stored = part.run.footprints([part.name]).get(part.name)
    if stored is not None:
        return stored.largest_local_batch
    measured = any(m.partition == part.name for m in part.run.measurements().records)
    if measured or not part.spec.search.estimate or part.cluster.memory_limit_bytes is None:
        return None
    progress.update(0, 1, "estimating which batches fit into memory")
    made = estimate(part.run.sweep_file, part.run.cluster_file, partition=part.name)
    if made.footprint is None:
        progress.update(0, 1, f"no estimate of memory ({made.reason}): the search begins with all batches")
        return None
    write_atomically(part.run.footprint_file(part.name), made.footprint.model_dump_json(indent=1))
    progress.update(0, 1, f"by an estimate, local batches up to {made.trusted_batch} fit into memory")
    return made.trusted_batch


def _profile_round(part: Part, proposed: Sequence[Configuration], progress: StageProgress) -> list[Ended]:
    """Submit what may run together, wait, and write a record for a configuration that a job died of."""
    expected = len(part.run.measurements().records) + len(proposed)
    batches = [_submit(part, configurations) for configurations in first_wave(part.spec, part.cluster, proposed)]
    jobs = [job for batch in batches for job in batch.jobs]

    def tick(text: str) -> None:
        done = len(part.run.measurements().records)
        progress.update(done, max(done, expected), text)

    return _record_failures(part, batches, part.launcher.wait(jobs, tick))


def first_wave(
    spec: SweepSpec, cluster: ClusterSpec, proposed: Sequence[Configuration]
) -> list[tuple[Configuration, ...]]:
    """What is submitted together, one batch of jobs for each size of allocation.

    Where jobs would disturb each other only the first batch or job is submitted; the search then proposes anew, knowing
    more (a batch that ran out of memory is not tried on more nodes).
    """
    if spec.search.nest:  # small batches first: what runs out of memory ends the job
        return [tuple(sorted(proposed, key=lambda c: (c.local_batch, c.nodes)))]
    by_nodes = [tuple(group) for _, group in groupby(sorted(proposed), key=lambda c: c.nodes)]
    if cluster.executor == "local" and not spec.search.packed:
        return [by_nodes[0][:1]]
    return by_nodes[:1] if one_at_a_time(spec, cluster) else by_nodes


def one_at_a_time(spec: SweepSpec, cluster: ClusterSpec) -> bool:
    """Whether no two jobs of a part run beside each other."""
    return spec.search.nest or cluster.executor == "local" or cluster.array_parallelism == 1


def allocated_nodes(spec: SweepSpec, configurations: Sequence[Configuration]) -> int:
    """Nodes of the allocation in which these are measured."""
    return max(spec.search.cluster_sizes) if spec.search.nest else configurations[0].nodes


def _submit(part: Part, configurations: tuple[Configuration, ...]) -> Batch:
    alone: list[tuple[Configuration, ...]] = [(configuration,) for configuration in configurations]
    groups = [configurations] if part.spec.search.packed else alone
    nodes = allocated_nodes(part.spec, configurations)
    outputs = [_new_output(part, nodes, group) for group in groups]
    jobs = [_job(part, nodes, group, output) for group, output in zip(groups, outputs, strict=True)]
    minutes = part.cluster.profile_minutes
    return Batch(groups, outputs, part.launcher.submit(jobs, stage="profile", nodes=nodes, minutes=minutes))


def _job(part: Part, nodes: int, group: tuple[Configuration, ...], output: Path) -> ProfileJob:
    return ProfileJob(
        part.spec,
        part.cluster,
        group,
        output,
        nodes,
        partition=part.name,
        asks=part.spec.search.packed and part.spec.search.mode == "adaptive",
        smaller=one_at_a_time(part.spec, part.cluster),
        since=part.since,
        trusted_batch=part.trusted_batch,
        submitted_at=time.time(),
    )


def _new_output(part: Part, nodes: int, group: Sequence[Configuration]) -> Path:
    """A file that no other job writes to: [<partition>-]n<N>-b<b>[-<b>]-<attempt>.jsonl."""
    ends = sorted({group[0].local_batch, group[-1].local_batch})
    partition = [part.name.replace("/", "_")] if part.name else []
    stem = "-".join([*partition, f"n{nodes}", f"b{ends[0]}", *map(str, ends[1:])])
    taken = len(list(part.run.profile.glob(f"{stem}-*.jsonl")))
    path = part.run.profile / f"{stem}-{taken}.jsonl"
    path.touch(mode=0o600)
    return path


def _record_failures(part: Part, batches: Sequence[Batch], ended: Sequence[Ended]) -> list[Ended]:
    """A record for the configuration that a job died of; what it left undone after that is proposed again."""
    how = {end.job.job_id: end for end in ended}
    failures = []
    for batch in batches:
        for group, output, job in zip(batch.groups, batch.outputs, batch.jobs, strict=True):
            blamed = died_of(group, output)
            if blamed is not None:
                failures.append(how[job.job_id])
                append_record(output, failed_measurement(part.cluster, blamed, how[job.job_id], part.name))
    return failures


def died_of(group: Sequence[Configuration], output: Path) -> Configuration | None:
    """The configuration that a job was measuring when it died without a word of its own; None if it did not.

    A job that died before it began to measure is held against the first of its list, so that it is not tried for ever.
    """
    recorded = read_records(Measurement, with_rank_files(output)).records
    notes = read_records(JobNote, [notes_file(output)]).records
    if any(m.status == "oom" for m in recorded) or (notes and notes[-1].note == "ended"):
        return None
    done = {m.configuration for m in recorded}
    if notes and notes[-1].configuration in done:  # between two configurations: neither is to blame
        return None
    begun = [notes[-1].configuration] if notes else []
    return next((c for c in [*begun, *group] if c is not None and c not in done), None)
