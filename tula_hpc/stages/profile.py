"""Run the profile stage: jobs for the search's proposals, until it proposes nothing more."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import count, groupby
from pathlib import Path
from typing import Any

from tula_hpc.config import ClusterSpec, SweepSpec, sweep_for
from tula_hpc.env import unix_time
from tula_hpc.errors import InputError, StageError
from tula_hpc.failure_kinds import Failure
from tula_hpc.formatting import printable
from tula_hpc.launch.diagnosis import BY_HAND, informative_line
from tula_hpc.launch.job_files import Submitted, times_out
from tula_hpc.launch.job_specs import ProfileJob
from tula_hpc.launch.launcher import Ended, JobsNow
from tula_hpc.records import (
    Configuration,
    JobNote,
    Measurement,
    Submission,
    append_record,
    is_usable,
    measurements_for_search,
    notes_file,
    read_records,
    refuse_several,
    with_rank_files,
    write_atomically,
)
from tula_hpc.records.broken_hosts import profiled_in_vain, why_given_up
from tula_hpc.records.events import setup_failures
from tula_hpc.retry_policy import TIME_OUTS, is_broken_round, is_held_against, is_partition_hopeless
from tula_hpc.stages.batches_that_fit import (
    Estimate,
    estimate,
    measured_anything,
    none_fits,
    only_out_of_memory,
)
from tula_hpc.stages.context import (
    InterruptionNews,
    StageProgress,
    Sweep,
    describe_failures,
    failed_measurement,
    most_profiled,
    profiling_left_s,
    recording_failure,
    stage_progress,
    submitted_job,
)

NOTHING = "Nothing was submitted."
OTHER_ARGUMENTS = (
    "If workload.arguments have to change for that, give the sweep another name, or another "
    "--run-dir: what has been measured so far ran with the present ones."
)
# failures after which every job fails until the user has acted
FOR_THE_USER = (Failure.BAD_INPUT, Failure.NO_SPACE)


def profile_stage(sweep: Sweep) -> None:
    """Measure until the search proposes nothing more, on each partition of the cluster.

    Raises:
        InputError: By an estimate no batch fits into memory on any partition; or the model, its
            code or data changed between measurements.
        StageError: Nothing could be measured at all, and the message holds the first failure's log;
            or the user's own code failed in a job, and the message says where.
    """
    with recording_failure(sweep.run, "profile"):
        _profile_parts(sweep)


def _profile_parts(sweep: Sweep) -> None:
    with stage_progress("profiling") as progress:
        parts = parts_of(sweep)
        trusted = [_trusted_batch(part, progress) for part in parts]
        left_out = _parts_without_room(sweep, parts)
        for words in left_out.values():
            progress.update(0, 1, words)
        failures: list[Ended] = []
        for part, trusted_batch in zip(parts, trusted, strict=True):
            if part.partition in left_out:
                continue
            failures += _profile_part(part, progress, trusted_batch)
            if _wrong(failures):
                break
        good = sum(m.status == "ok" for m in sweep.run.measurements().records)
        tried = len(_tried(sweep))
        text = f"{good} of {tried} measured" if good else "nothing was measured"
        progress.update(tried if good else 0, tried, text)
    if not good:
        raise StageError(f"profile: {_why_nothing(sweep, failures)}")
    if wrong := _wrong(failures):
        is_scripts = sweep.spec.workload.is_script and wrong[-1].failure is Failure.BAD_INPUT
        advice = f"\n{OTHER_ARGUMENTS}" if is_scripts else ""
        raise StageError(f"profile: {describe_failures(wrong)}{advice}")


def _why_nothing(sweep: Sweep, failures: Sequence[Ended]) -> str:
    """Say why nothing could be measured."""
    if wrong := _wrong(failures):
        # others may have failed before it for a passing reason
        return f"nothing could be measured; {describe_failures(wrong)}"
    if failures and failures[-1].failure is Failure.DEVICE_FAILED:
        return why_given_up(sweep.run.events(), failures[-1].job.job_id, unix_time())
    if words := only_out_of_memory(sweep):
        return words
    late = next((end for end in failures if end.failure is Failure.TIMED_OUT), None)
    if late is not None:
        return f"{_at_its_limit(sweep, late.job)} and measured nothing; raise profile_minutes"
    return f"nothing could be measured; {describe_failures(failures)}"


def _at_its_limit(sweep: Sweep, job: Submitted) -> str:
    minutes = sweep.cluster.profile_minutes
    return (
        f"job {job.job_id} reached its time limit (profile_minutes = {minutes} in the cluster file)"
    )


def _requeues(sweep: Sweep, jobs: Sequence[Submitted]) -> list[str]:
    return [
        f"{_at_its_limit(sweep, job)}: requeued {count} of at most {TIME_OUTS} times"
        for job in jobs
        if (count := times_out(job))
    ]


def _wrong(failures: Sequence[Ended]) -> list[Ended]:
    """Return the ends whose cause only the user can remove: other jobs would fail, too."""
    return [end for end in failures if end.failure in FOR_THE_USER]


def parts_of(sweep: Sweep) -> list[Sweep]:
    """Return the sweep on each partition with enough nodes, with the sizes that fit there."""
    parts = []
    for name, cluster in sweep.cluster.by_name().items():
        spec = sweep_for(sweep.spec, cluster)
        if spec is not None:
            parts.append(sweep._replace(spec=spec, cluster=cluster, partition=name))
    return parts


def _parts_without_room(sweep: Sweep, parts: Sequence[Sweep]) -> dict[str, str]:
    stored = sweep.run.footprints(part.partition for part in parts)
    reasons = {part.partition: none_fits(part, stored.get(part.partition)) for part in parts}
    if reasons and all(reasons.values()):
        words = "\n".join(reasons.values())
        # `status` shows this event
        sweep.run.log_event("failed", "profile", detail=words[:2000])
        raise InputError(f"{words}\n{NOTHING}")
    return {name: words for name, words in reasons.items() if words}


def _profile_part(part: Sweep, progress: StageProgress, trusted_batch: int | None) -> list[Ended]:
    failures: list[Ended] = []
    while True:
        ended, dead = _settle(part, progress)
        failures += dead
        # refuse before more is measured that no plan can use
        refuse_several(part.run, part.run.measurements().records)
        kinds = [end.failure for end in failures]
        in_vain = is_partition_hopeless(kinds, _broken_rounds(part))
        hopeless = in_vain and not measured_anything(part)
        proposed: list[Configuration] = []
        if not (hopeless or _wrong(failures)):
            proposed = propose_on(part, trusted_batch)
        _say_cancelled(ended, goes_on=bool(proposed))
        if not proposed:
            return failures
        # a group is an array, which keeps to array_parallelism by itself, or one packed job: of
        # these, array_parallelism may run at a time
        at_a_time = part.cluster.array_parallelism if part.spec.search.packed else 1
        arrays: list[list[str]] = [[]] * at_a_time
        for group in first_wave(part.spec, part.cluster, proposed):
            arrays.append(_submit(part, group, trusted_batch, arrays[-at_a_time]))


def _say_cancelled(ended: Sequence[Ended], *, goes_on: bool) -> None:
    then = "no other job follows it"
    if goes_on:
        then = (
            "another job measures the rest; to stop for good, end this command with Ctrl-C: it "
            "then says how to cancel the job"
        )
    for end in ended:
        if end.failure is Failure.CANCELLED:
            sys.stderr.write(f"profiling: job {end.job.job_id} was cancelled, {BY_HAND}; {then}\n")


def propose_on(part: Sweep, trusted_batch: int | None) -> list[Configuration]:
    """Return the search's proposals here; by an estimate `trusted_batch` fits into memory."""
    from tula_hpc.analysis.search.propose import propose

    known = measurements_for_search(
        part.run.measurements().records,
        part.partition,
        part.started_at,
        part.spec.workload.entry_points,
    )
    return propose(part.spec, part.cluster, known, trusted_batch=trusted_batch)


def _broken_rounds(part: Sweep) -> int:
    """Count this command's submissions with a job whose failure `is_broken_round` counts."""
    folders = set()
    for job in part.run.history().submissions("profile"):
        end = job.end if _is_of(part, job) else None
        if end is None or end.failure is None or end.time < part.started_at:
            continue
        if is_broken_round(end.failure):
            folders.add(job.folder)
    return len(folders)


def _is_of(part: Sweep, job: Submission) -> bool:
    return (job.partition or "") == part.partition


def _trusted_batch(part: Sweep, progress: StageProgress) -> int | None:
    """Return the largest local batch that fits by an estimate, made before the first profile."""
    stored = part.run.footprints([part.partition]).get(part.partition)
    if stored is not None:
        return stored.largest_local_batch
    if not wants_estimate(part):
        return None
    progress.update(0, 1, "estimating which batches fit into memory")
    tried = part.run.trial()
    reason = tried.reasons.get(part.partition) if tried is not None else None
    if reason:
        made = Estimate(None, reason)
    else:
        made = estimate(part.run.sweep_file, part.run.cluster_file, partition=part.partition)
    if made.footprint is not None:
        write_atomically(
            part.run.footprint_file(part.partition), made.footprint.model_dump_json(indent=1)
        )
    progress.update(0, 1, made.describe())
    return made.trusted_batch


def wants_estimate(part: Sweep) -> bool:
    """Tell whether an estimate of memory is made before the first profile; it needs a limit.

    None is made for a script, whose model is not known before it runs.
    """
    if part.spec.workload.is_script or part.cluster.container is not None:
        return False
    measured = any(m.partition == part.partition for m in part.run.measurements().records)
    return (
        part.spec.search.estimate and part.cluster.memory_limit_bytes is not None and not measured
    )


def _settle(part: Sweep, progress: StageProgress) -> tuple[list[Ended], list[Ended]]:
    """Wait for submitted jobs, and record the configurations that ended a job.

    Returns:
        Ends of all these jobs; and of those that died without a record of their own, except jobs of
        an earlier command that failed for a cause that the user may have removed.
    """
    unsettled = part.run.history().unsettled("profile")
    submitted = {job.job_id: job for job in unsettled if _is_of(part, job)}
    wanted = {(part.partition, each) for job in submitted.values() for each in job.configurations}
    tried = _tried(part)
    expected = len(tried.keys() | wanted)
    # jobs of the adaptive search ask for more configurations
    asks = part.spec.search.mode == "adaptive"
    if asks:
        elsewhere = sum(name != part.partition for name, _ in tried)
        most_here = most_profiled(part.spec, part.cluster.workers_per_node) or 0
        expected = max(expected, elsewhere + most_here)
    earlier = part.run.job_notes()
    warned = set(setup_failures(earlier))

    def warn_of_setup() -> None:
        outputs = [notes_file(_output_of(part, job)) for job in submitted.values()]
        notes = [*earlier, *read_records(JobNote, outputs).records]
        for words in setup_failures(notes):
            if words not in warned:
                warned.add(words)
                sys.stderr.write(f"warning: {printable(words)}\n")

    interruptions = InterruptionNews(part, "profiling")

    def tick(now: JobsNow) -> None:
        warn_of_setup()
        interruptions.tell(now.waiting)
        statuses = list(_tried(part).values())
        done = len(statuses)
        most = max(done, expected)
        left_s = _left_s(part, most - done) if now.running else None
        failed = statuses.count("failed")
        count = f"{done - failed} done" if asks else f"{done - failed} of {most} done"
        if failed:
            count += f", {failed} failed"
        if asks and most > done:
            count += f", at most {most - done} more"
        text = f"{count}, {now.text}"
        progress.update(done, most, text, left_s, _requeues(part, jobs), is_most=asks)

    jobs = [submitted_job(part.run, job) for job in submitted.values()]
    ended = part.launcher.wait(jobs, tick) if jobs else []
    # once more, for jobs that ended between two looks
    warn_of_setup()
    dead = [end for end in ended if _record_end(part, submitted[end.job.job_id], end)]
    mended = {j.job_id for j in submitted.values() if j.submitted_at < part.started_at}
    return ended, [e for e in dead if not (e.failure in FOR_THE_USER and e.job.job_id in mended)]


def _left_s(part: Sweep, left: int) -> float | None:
    rows = part.run.measurements().records
    mine = [row for row in rows if row.partition == part.partition and is_usable(row)]
    recent = [row for row in mine if row.finished_at >= part.started_at]
    return profiling_left_s(recent, left, unix_time())


def _tried(sweep: Sweep) -> dict[tuple[str, Configuration], str]:
    """Return how each configuration that `measurements_for_search` counts has ended."""
    records = sweep.run.measurements().records
    parts = {m.partition for m in records}
    return {
        (name, m.configuration): "left out" if m.is_left_out else m.status
        for name in parts
        for m in measurements_for_search(
            records, name, sweep.started_at, sweep.spec.workload.entry_points
        )
    }


def _output_of(part: Sweep, job: Submission) -> Path:
    # the run may be a copy of another user's, whose events name any file
    return part.run.profile / Path(job.output).name


def _record_end(part: Sweep, job: Submission, end: Ended) -> bool:
    """Record how a job ended; return whether a configuration, and not a preemption, ended it."""
    output = _output_of(part, job)
    blamed = blamed_configuration(job.configurations, output) if output.is_file() else None
    if blamed is None:
        part.run.log_event("ended", "profile", job_id=job.job_id, failure=None)
        return False
    if _is_an_attempt(part, blamed, end):
        record = failed_measurement(part.cluster, blamed, end, part.partition)
        notes = read_records(JobNote, [notes_file(output)]).records
        changes: dict[str, Any] = {"accumulation": notes[-1].accumulation if notes else None}
        # dated back: the user may have removed the cause since that earlier command
        if job.submitted_at < part.started_at:
            changes["finished_at"] = job.submitted_at
        append_record(output, record.model_copy(update=changes))
        # a cancellation is reported with what follows from it
        if not (end.failure.is_oom or end.failure in (*FOR_THE_USER, Failure.CANCELLED)):
            sys.stderr.write(f"profiling: {_how_it_failed(blamed, end)}\n")
    fields: dict[str, Any] = {"failure": end.failure}
    if end.failure is Failure.DEVICE_FAILED:
        where = {"configuration": list(blamed), "partition": part.partition}
        fields["detail"] = informative_line(end.log_tail)
        fields["data"] = {"hosts": list(end.hosts), **where}
    part.run.log_event("ended", "profile", job_id=job.job_id, **fields)
    return end.failure is not Failure.PREEMPTED


def _how_it_failed(blamed: Configuration, end: Ended) -> str:
    # "bug" adds nothing to our own sentences and others' exceptions
    kind = "" if end.failure is Failure.BUG else end.failure.value.replace("_", " ")
    why = ": ".join(filter(None, [kind, informative_line(end.log_tail).rstrip(".")]))
    log = f"; log: {end.log_file}" if end.log_file else ""
    return f"job {end.job.job_id} failed while it measured {blamed} ({why}){log}"


def _is_an_attempt(part: Sweep, blamed: Configuration, end: Ended) -> bool:
    broken_devices = 0
    # events, which may be many, are read only if needed
    if end.failure is Failure.DEVICE_FAILED:
        events = part.run.events()
        broken_devices = profiled_in_vain(events, blamed, part.partition, part.started_at)
    return is_held_against(end.failure, broken_devices)


def first_wave(
    spec: SweepSpec, cluster: ClusterSpec, proposed: Sequence[Configuration]
) -> list[tuple[Configuration, ...]]:
    """Return the configurations that are submitted together, by size of allocation.

    If jobs would disturb each other, only the first batch or job is submitted; the search then
    proposes anew, knowing more (a batch that ran out of memory is not tried on more nodes).
    """
    # small batches first: a batch that runs out of memory ends the job
    if spec.search.nest:
        return [tuple(sorted(proposed, key=lambda c: (c.local_batch, c.nodes)))]
    by_nodes = [tuple(group) for _, group in groupby(sorted(proposed), key=lambda c: c.nodes)]
    if cluster.executor == "local" and not spec.search.packed:
        return [by_nodes[0][:1]]
    if one_at_a_time(spec, cluster):
        return by_nodes[:1]
    return by_nodes


def one_at_a_time(spec: SweepSpec, cluster: ClusterSpec) -> bool:
    """Tell whether no two jobs of a partition run at the same time."""
    return spec.search.nest or cluster.executor == "local" or cluster.array_parallelism == 1


def allocated_nodes(spec: SweepSpec, configurations: Sequence[Configuration]) -> int:
    """Return the number of nodes of the allocation in which the configurations are measured."""
    if spec.search.nest:
        return max(spec.search.cluster_sizes)
    return configurations[0].nodes


def _submit(
    part: Sweep,
    configurations: tuple[Configuration, ...],
    trusted_batch: int | None,
    before: Sequence[str],
) -> list[str]:
    """Submit a job for each batch, or for all, after these arrays; return the ids of its own."""
    alone: list[tuple[Configuration, ...]] = [(configuration,) for configuration in configurations]
    groups = [configurations] if part.spec.search.packed else alone
    nodes = allocated_nodes(part.spec, configurations)
    jobs = []
    data = []
    for group in groups:
        output = _new_output(part, nodes, group)
        job = ProfileJob(
            part.spec,
            part.cluster,
            group,
            output,
            nodes,
            partition=part.partition,
            asks=part.spec.search.packed and part.spec.search.mode == "adaptive",
            smaller=one_at_a_time(part.spec, part.cluster),
            since=part.started_at,
            trusted_batch=trusted_batch,
            submitted_at=unix_time(),
        )
        jobs.append(job)
        name = str(output.relative_to(part.run.root))
        measured = list(map(list, group))
        data.append({"partition": part.partition, "output": name, "configurations": measured})
    minutes = part.cluster.profile_minutes
    # jobs beyond the site's limits are left to the next round
    submitted = part.launcher.submit(
        jobs, stage="profile", nodes=nodes, minutes=minutes, data=data, after=before
    )
    return list(dict.fromkeys(job.array_id for job in submitted))


def _new_output(part: Sweep, nodes: int, group: Sequence[Configuration]) -> Path:
    """Return a new file name: [<partition>-]n<N>-b<b>[-<b>]-<attempt>.jsonl."""
    ends = sorted({group[0].local_batch, group[-1].local_batch})
    partition = [part.partition.replace("/", "_")] if part.partition else []
    stem = "-".join([*partition, f"n{nodes}", f"b{ends[0]}", *map(str, ends[1:])])
    paths = (part.run.profile / f"{stem}-{attempt}.jsonl" for attempt in count())
    # not the number of files, of which some may have been moved away
    path = next(path for path in paths if not path.exists())
    path.touch(mode=0o600)
    return path


def blamed_configuration(group: Sequence[Configuration], output: Path) -> Configuration | None:
    """Return the configuration that ended a job, and of which the job has no record, if any.

    If a job died before it began to measure, the first configuration of its list is blamed, so that
    it is not tried forever.
    """
    recorded = read_records(Measurement, with_rank_files(output)).records
    notes = read_records(JobNote, [notes_file(output)]).records
    failed = any(m.status != "ok" and not m.is_left_out for m in recorded)
    if failed or (notes and notes[-1].note == "ended"):
        # recorded by the job itself, or by a command that was killed right afterwards
        return None
    done = {m.configuration for m in recorded}
    # died between two configurations: neither is to blame
    if notes and notes[-1].configuration in done:
        return None
    begun = [notes[-1].configuration] if notes else []
    return next((c for c in [*begun, *group] if c is not None and c not in done), None)
