"""What the profile stage submits together, from records alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.run_factory import measurement, oom
from tula_hpc.config import ClusterSpec, SearchSpec, SweepSpec
from tula_hpc.env import unix_time
from tula_hpc.errors import InputError, StageError
from tula_hpc.failure_kinds import Failure
from tula_hpc.launch.job_files import Submitted
from tula_hpc.launch.job_specs import ProfileJob
from tula_hpc.launch.launcher import Ended, JobsNow
from tula_hpc.records import (
    Configuration,
    Footprint,
    Identity,
    JobAccount,
    JobNote,
    Measurement,
    RunDirectory,
    append_record,
    measurements_for_search,
    notes_file,
)
from tula_hpc.stages.batches_that_fit import Estimate, none_fits, out_of_memory
from tula_hpc.stages.context import StageProgress, Sweep, stage_progress
from tula_hpc.stages.profile import (
    _broken_rounds,
    _profile_part,
    _record_end,
    _trusted_batch,
    allocated_nodes,
    first_wave,
    parts_of,
    profile_stage,
)

PROPOSED = [Configuration(n, 1, b // n) for n in (4, 1, 2) for b in (32, 256)]


def spec(**search: object) -> SweepSpec:
    return SweepSpec(name="x", search=SearchSpec.model_validate(search))


def slurm(**fields: object) -> ClusterSpec:
    return ClusterSpec.model_validate({"executor": "slurm", **fields})


def test_sizes_run_one_after_another_unless_the_cluster_runs_several_jobs() -> None:
    assert first_wave(spec(), slurm(), PROPOSED) == [(Configuration(1, 1, 32), Configuration(1, 1, 256))]
    assert [group[0].nodes for group in first_wave(spec(), slurm(array_parallelism=2), PROPOSED)] == [1, 2, 4]


def test_on_this_machine_jobs_never_run_at_the_same_time() -> None:
    parallel = ClusterSpec(array_parallelism=8)
    assert first_wave(spec(), parallel, PROPOSED) == [(Configuration(1, 1, 32), Configuration(1, 1, 256))]
    assert first_wave(spec(pack="never"), parallel, PROPOSED) == [(Configuration(1, 1, 32),)]


def test_in_one_allocation_all_go_together_and_what_may_run_out_of_memory_goes_last() -> None:
    (group,) = first_wave(spec(nest=True), slurm(), PROPOSED)
    assert sorted(group) == sorted(PROPOSED)
    assert [c.local_batch for c in group] == sorted(c.local_batch for c in PROPOSED)
    assert allocated_nodes(spec(nest=True, cluster_sizes=[1, 4, 8]), group) == 8
    assert allocated_nodes(spec(), group[-2:]) == group[-2].nodes


def test_a_part_without_nodes_enough_is_left_out(tmp_path_factory: pytest.TempPathFactory) -> None:
    run = RunDirectory(tmp_path_factory.mktemp("run"))
    tables = [{"partition": "big"}, {"partition": "small", "max_nodes": 1}, {"partition": "tiny", "max_nodes": 1}]
    parts = parts_of(Sweep(spec(cluster_sizes=[2, 4]), slurm(partitions=tables), run))
    assert [part.partition for part in parts] == ["big"]
    parts = parts_of(Sweep(spec(cluster_sizes=[1, 2]), slurm(partitions=tables[:2]), run))
    assert [(part.partition, part.spec.search.cluster_sizes) for part in parts] == [("big", (1, 2)), ("small", (1,))]
    assert [part.cluster.partition for part in parts] == ["big", "small"]


def test_failures_of_an_earlier_command_may_have_been_corrected() -> None:
    fields = {"nodes": 1, "workers_per_node": 1, "local_batch": 8, "failure": "bug"}
    rows = [
        Measurement.model_validate({"status": status, "finished_at": at, "partition": part, **fields})
        for status, at, part in [("failed", 100, ""), ("failed", 300, ""), ("oom", 100, ""), ("oom", 300, "other")]
    ]
    assert measurements_for_search(rows, "", since=200.0) == rows[1:3]


def test_one_allocation_for_all_needs_packing() -> None:
    with pytest.raises(ValueError, match="nest: true measures everything in one job"):
        spec(nest=True, pack="never")


class RecordedProgress(StageProgress):
    """A progress display that keeps its texts."""

    def __init__(self) -> None:
        super().__init__("profile")
        self.lines: list[str] = []

    def update(
        self, done: float, total: float, text: str, left_s: float | None = None, notes: Sequence[str] = (), **_: object
    ) -> None:
        self.lines.append(text)


FOOTPRINT = Footprint(
    parameter_bytes=1,
    gradient_bytes=1,
    optimizer_bytes=1,
    activation_bytes_per_sample=1,
    fixed_bytes=1,
    peaks={32: 1, 64: 2},
    largest_local_batch=32,
)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The devices for which an estimate was requested; none is made."""
    partitions: list[str] = []

    def estimate(*_: Path, partition: str) -> Estimate:
        partitions.append(partition)
        return Estimate(FOOTPRINT) if partition != "broken" else Estimate(None, "no torch here")

    monkeypatch.setattr("tula_hpc.stages.profile.estimate", estimate)
    return partitions


def part_with_limit(root: Path, name: str = "", **search: object) -> Sweep:
    return Sweep(spec(**search), slurm(memory_gb=1.0), RunDirectory(root).create(), partition=name)


def test_before_the_first_profile_an_estimate_is_made_once(tmp_path: Path, asked: list[str]) -> None:
    progress = RecordedProgress()
    assert [_trusted_batch(part_with_limit(tmp_path), progress) for _ in range(2)] == [32, 32]
    assert asked == [""]
    assert "local batches up to 32 fit" in progress.lines[-1]
    assert _trusted_batch(part_with_limit(tmp_path, "gpu"), progress) == 32
    # another device has another limit
    assert asked == ["", "gpu"]


def test_an_estimate_that_fails_is_reported_and_stops_nothing(tmp_path: Path, asked: list[str]) -> None:
    progress = RecordedProgress()
    assert _trusted_batch(part_with_limit(tmp_path, "broken"), progress) is None
    assert "no torch here" in progress.lines[-1]
    assert asked == ["broken"]


def test_no_estimate_without_a_limit_after_measurements_or_where_none_is_wanted(
    tmp_path: Path, asked: list[str]
) -> None:
    assert _trusted_batch(part_with_limit(tmp_path, estimate=False), RecordedProgress()) is None
    assert _trusted_batch(part_with_limit(tmp_path)._replace(cluster=ClusterSpec()), RecordedProgress()) is None
    append_record(tmp_path / "profile" / "n1.jsonl", measurement(Configuration(1, 1, 32)))
    assert _trusted_batch(part_with_limit(tmp_path), RecordedProgress()) is None
    assert asked == []


TOO_LARGE = FOOTPRINT.model_copy(
    update={
        "parameter_bytes": 2 * 1024**3,
        "beside_bytes": 1024**3,
        "peaks": {32: 3 * 1024**3, 64: 4 * 1024**3},
        "limit_bytes": 3 * 1024**3 // 2,
        "largest_local_batch": 0,
        "world_size": 2,
    }
)


# "always" is what sweep files of earlier versions may say
PACKED = [[], [], ["1"]]


@pytest.mark.parametrize(("pack", "after"), [("auto", PACKED), ("always", PACKED), ("never", [[], ["1"], ["2"]])])
def test_no_more_jobs_run_at_a_time_than_are_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pack: str, after: list[list[str]]
) -> None:
    """A packed size is one job; otherwise the tasks of an array keep to the limit, and the next array waits."""
    asked: list[list[str]] = []
    part = part_with_limit(tmp_path)
    part = part._replace(spec=spec(pack=pack), cluster=slurm(array_parallelism=2))

    def submit(_launcher: object, _jobs: object, **how: Any) -> list[Submitted]:
        asked.append(how["after"])
        return [Submitted(str(len(asked)), tmp_path)]

    rounds = iter([PROPOSED, []])
    monkeypatch.setattr("tula_hpc.stages.profile.propose_on", lambda *_: next(rounds))
    monkeypatch.setattr("tula_hpc.stages.profile._settle", lambda *_: ([], []))
    monkeypatch.setattr("tula_hpc.launch.launcher.Launcher.submit", submit)
    with stage_progress("profiling") as progress:
        _profile_part(part, progress, None)
    assert asked == after


def test_where_no_batch_fits_nothing_is_submitted_unless_the_estimate_is_not_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted: list[tuple[Configuration, ...]] = []
    monkeypatch.setattr("tula_hpc.stages.profile.estimate", lambda *_, **__: Estimate(TOO_LARGE))
    monkeypatch.setattr("tula_hpc.stages.profile._submit", lambda _, group, *__: submitted.append(group))
    sweep = part_with_limit(tmp_path)
    with pytest.raises(InputError) as refused:
        profile_stage(sweep)
    sentence, end = str(refused.value).splitlines()
    assert "a worker uses 3.0 GiB before any batch and 4.0 GiB with the smallest local batch, 32" in sentence
    assert "but only 1.5 GiB are allowed (memory_gb = 1 of the cluster file, less memory_margin); raise" in sentence
    assert "workload.zero_stage = 1; search.estimate = false tries it all the same" in sentence
    assert end == "Nothing was submitted."
    assert not submitted
    assert [(event.event, event.detail) for event in sweep.run.events()] == [("failed", sentence)]
    assert none_fits(part_with_limit(tmp_path, estimate=False), TOO_LARGE) == ""
    small_states = {"parameter_bytes": 1, "beside_bytes": 0, "host_baseline_bytes": 1024**3}
    message = none_fits(sweep, TOO_LARGE.model_copy(update=small_states))
    assert "uses 1.0 GiB before any batch (1.0 GiB of it interpreter and libraries) and 3.0 GiB with" in message
    assert "lower search.min_batch" in message
    append_record(sweep.run.profile / "n1.jsonl", measurement(Configuration(1, 1, 32)))
    assert none_fits(sweep, TOO_LARGE) == "", "a measured batch has fitted"


def test_a_partition_where_no_batch_fits_is_left_out_and_the_others_are_profiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"small": TOO_LARGE, "large": FOOTPRINT}
    monkeypatch.setattr("tula_hpc.stages.profile.estimate", lambda *_, partition, **__: Estimate(sizes[partition]))
    profiled: list[str] = []

    def profile(part: Sweep, *_: object) -> list[Ended]:
        profiled.append(part.partition)
        return []

    monkeypatch.setattr("tula_hpc.stages.profile._profile_part", profile)
    sweep = part_with_limit(tmp_path)
    parts = [sweep._replace(partition=name) for name in sizes]
    monkeypatch.setattr("tula_hpc.stages.profile.parts_of", lambda _: parts)
    with pytest.raises(StageError, match="nothing could be measured"):
        profile_stage(sweep)
    assert profiled == ["large"]
    assert "no batch fits into memory of partition 'small'" in capsys.readouterr().err


def test_what_only_the_user_can_mend_is_named_even_if_another_job_failed_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = {Failure.TIMED_OUT: "too late", Failure.BAD_INPUT: "tula_hpc.errors.InputError: workload.model: no such"}
    ends = [Ended(Submitted(str(n), tmp_path), kind, line, None) for n, (kind, line) in enumerate(lines.items())]
    monkeypatch.setattr("tula_hpc.stages.profile._profile_part", lambda *_: ends)
    with pytest.raises(StageError, match=r"^profile: nothing could be measured; workload\.model: no such$"):
        profile_stage(part_with_limit(tmp_path, estimate=False))


def test_where_every_configuration_ran_out_of_memory_one_sentence_says_so(tmp_path: Path) -> None:
    sweep = part_with_limit(tmp_path, cluster_sizes=[1], min_batch=32, max_batch=64, estimate=False)
    for batch in (32, 64):
        append_record(sweep.run.profile / "n1.jsonl", oom(Configuration(1, 1, batch)))
    words = r"^profile: no batch fits into memory: N=1 b=32 \(B=32\), the smallest that was tried, exceeded its limit"
    with pytest.raises(StageError, match=rf"{words} of 1\.0 GiB for a worker \(memory_gb = 1 .*; raise memory_gb"):
        profile_stage(sweep)
    assert out_of_memory(sweep.run) == ["N=1 b=32 (B=32)", "N=1 b=64 (B=64)"]
    append_record(sweep.run.profile / "n1.jsonl", measurement(Configuration(1, 1, 32)))
    append_record(sweep.run.profile / "n1.jsonl", oom(Configuration(2, 1, 64)).model_copy(update={"partition": "gpu"}))
    assert out_of_memory(sweep.run) == ["N=1 b=64 (B=64)", "N=2 b=64 (B=128) on gpu"], (
        "a configuration that fits the second time counts as fitting"
    )


class Scheduler:
    """A scheduler that ends every job with a broken device, after one measurement if it `measures` several."""

    def __init__(self, run: RunDirectory, measures: bool) -> None:
        self.run, self.measures = run, measures
        self.wanted: list[list[Configuration]] = []

    def submit(
        self, jobs: Sequence[ProfileJob], *, data: Sequence[Mapping[str, object]], **_: object
    ) -> list[Submitted]:
        submitted = []
        for job, fields in zip(jobs, data, strict=True):
            self.wanted.append(list(job.configurations))
            job_id = str(len(self.wanted))
            self.run.log_event("submitted", "profile", job_id=job_id, data={"folder": f"slurm/{job_id}", **fields})
            if self.measures and len(job.configurations) > 1:
                append_record(job.output, measurement(job.configurations[0], job_id=job_id))
            submitted.append(Submitted(job_id, self.run.slurm))
        return submitted

    def wait(self, jobs: Sequence[Submitted], tick: Callable[[JobsNow], None]) -> list[Ended]:
        return [Ended(job, Failure.DEVICE_FAILED, "E: an ECC error", None, (f"node{job.job_id}",)) for job in jobs]


def profile(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *, measures: bool, kind: type[Scheduler] = Scheduler
) -> tuple[Scheduler, Sweep]:
    run = RunDirectory(folder).create()
    search = {"cluster_sizes": [1], "min_batch": 32, "max_batch": 64, "mode": "full", "estimate": False}
    scheduler = kind(run, measures)
    monkeypatch.setattr(Sweep, "launcher", property(lambda _: scheduler))
    return scheduler, Sweep(spec(**search), ClusterSpec(), run, unix_time())


def test_a_configuration_that_meets_broken_devices_is_measured_by_the_next_job_and_bounds_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scheduler, sweep = profile(monkeypatch, tmp_path, measures=True)
    profile_stage(sweep)
    assert "failed while it measured N=1 b=64 (B=64) (device failed: E: an ECC error)" in capsys.readouterr().err
    first, second = Configuration(1, 1, 32), Configuration(1, 1, 64)
    # the first job measured one of two; three jobs met broken devices with the other, which is then given up
    assert scheduler.wanted == [[first, second], [second], [second]]
    records = sweep.run.measurements().records
    assert [(m.configuration, m.status, m.failure) for m in records] == [
        (first, "ok", None),
        (second, "failed", Failure.DEVICE_FAILED),
    ]
    # another command tries it again
    assert [m.configuration for m in measurements_for_search(records, "", time.time())] == [first]


def test_nothing_more_is_measured_of_another_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    scheduler, sweep = profile(monkeypatch, tmp_path, measures=True)
    for batch, parameters in ((8, 100), (16, 200)):
        identity = Identity(
            parameters=parameters, gradient_bytes=400, structure="", train_samples=640, test_samples=0, sources={}
        )
        row = measurement(Configuration(1, 1, batch), identity=identity, finished_at=float(batch))
        append_record(sweep.run.profile / f"{batch}.jsonl", row)
    with pytest.raises(
        InputError,
        match=r"200 parameters now, 100 before.*: N=1 b=16 \(B=16\) measured after .*, N=1 b=8 \(B=8\) before it\. ",
    ):
        profile_stage(sweep)
    assert scheduler.wanted == []


class FullDisk(Scheduler):
    """A scheduler whose disk is full, so that no measurement is saved."""

    def wait(self, jobs: Sequence[Submitted], tick: Callable[[JobsNow], None]) -> list[Ended]:
        return [
            Ended(job, Failure.NO_SPACE, "a.jsonl: No space left on device; make space there", None) for job in jobs
        ]


def test_a_full_disk_ends_profiling_after_one_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    full, sweep = profile(monkeypatch, tmp_path, measures=True, kind=FullDisk)
    with pytest.raises(StageError, match="No space left on device; make space there"):
        profile_stage(sweep)
    assert len(full.wanted) == 1


def test_where_all_devices_are_broken_one_line_names_the_hosts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    scheduler, sweep = profile(monkeypatch, tmp_path, measures=False)
    with pytest.raises(StageError) as caught:
        profile_stage(sweep)
    assert len(scheduler.wanted) == 3
    hosts = "node1, node2 and node3 reported 'E: an ECC error'"
    assert str(caught.value) == f"profile: a device failed once more, in job 3: {hosts}; have these nodes repaired"


class Slow(Scheduler):
    """A scheduler whose jobs are requeued once at their time limit, and then reach it again."""

    def wait(self, jobs: Sequence[Submitted], tick: Callable[[JobsNow], None]) -> list[Ended]:
        tick(JobsNow(1, "1 running"))
        for job in jobs:
            job.folder.mkdir(parents=True)
            (job.folder / f"{job.job_id}_time_outs_left.txt").write_text("2\n")
        tick(JobsNow(0, "1 waiting"))
        log = "submitit.core.utils.UncompletedJobError: Job not requeued because: timed-out too many times."
        return [Ended(job, Failure.TIMED_OUT, log, None) for job in jobs]


def test_a_time_limit_is_reported_at_once_with_its_key_and_ends_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scheduler, sweep = profile(monkeypatch, tmp_path, measures=False, kind=Slow)
    limit = "job 1 reached its time limit (profile_minutes = 20 in the cluster file)"
    with pytest.raises(StageError) as caught:
        profile_stage(sweep)
    assert str(caught.value) == f"profile: {limit} and measured nothing; raise profile_minutes"
    first, second, *_ = capsys.readouterr().err.splitlines()
    assert (first, second) == (
        "profiling: 0 of 2 done, 1 running",
        f"profiling: 0 of 2 done, 1 waiting; {limit}: requeued 1 of at most 3 times",
    )
    failure = sweep.run.history().stage_failure()
    assert failure is not None, "status needs the failure"
    assert failure.detail == str(caught.value)
    assert len(scheduler.wanted) == 1
    assert {row.detail for row in sweep.run.measurements().records} == {"reached its time limit too many times."}


class Measuring(Scheduler):
    """A scheduler whose job measures two configurations, half a minute each, and fails at a third."""

    def wait(self, jobs: Sequence[Submitted], tick: Callable[[JobsNow], None]) -> list[Ended]:
        for batch in (32, 64):
            row = measurement(Configuration(1, 1, batch), finished_at=time.time(), elapsed_s=35.0)
            append_record(self.run.profile / "n1.jsonl", row)
            tick(JobsNow(1, "1 running"))
        failed = measurement(
            Configuration(1, 1, 128), status="failed", failure=Failure.BUG, finished_at=time.time(), elapsed_s=35.0
        )
        append_record(self.run.profile / "n1.jsonl", failed)
        tick(JobsNow(1, "1 running"))
        raise KeyboardInterrupt


def test_an_adaptive_search_says_how_many_more_there_may_be(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, sweep = profile(monkeypatch, tmp_path, measures=False, kind=Measuring)
    sweep = sweep._replace(spec=spec(cluster_sizes=[1, 2], min_batch=32, max_batch=512, estimate=False))
    with pytest.raises(KeyboardInterrupt):
        profile_stage(sweep)
    first, second, third = capsys.readouterr().err.splitlines()
    assert first == "profiling: 1 done, at most 7 more, 1 running, up to about 4 min left", "search.max_profiles is 8"
    assert second.startswith("profiling: 2 done, at most 6 more, 1 running, up to about ")
    assert third.startswith("profiling: 2 done, 1 failed, at most 5 more, 1 running, up to about ")


class Cancelled(Scheduler):
    """A scheduler whose jobs are all cancelled."""

    def wait(self, jobs: Sequence[Submitted], tick: Callable[[JobsNow], None]) -> list[Ended]:
        return [Ended(job, Failure.CANCELLED, "CANCELLED AT 12:00", None) for job in jobs]


def test_a_cancelled_job_is_reported_once_and_another_one_only_if_it_follows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scheduler, sweep = profile(monkeypatch, tmp_path, measures=False, kind=Cancelled)
    with pytest.raises(StageError, match="was cancelled, by scancel or an operator"):
        profile_stage(sweep)
    output = capsys.readouterr().err
    assert output.count("was cancelled, by scancel or an operator") == len(scheduler.wanted)
    assert output.count("another job measures the rest") == len(scheduler.wanted) - 1
    assert output.count("no other job follows it") == 1
    assert "failed while it measured" not in output
    assert {row.detail for row in sweep.run.measurements().records} == {"by scancel or an operator"}


class Requeued(Scheduler):
    """A scheduler that requeues job 1 after a node failure, which accounting reports a moment later."""

    asked = 0

    def note_accounts(self) -> bool:
        self.asked += 1
        if self.asked == 2:
            account = JobAccount(job_id="1", stage="profile", state="NODE_FAIL", over=True, nodes=1, elapsed_s=3.0)
            append_record(self.run.accounting_file, account)
        return True

    def wait(self, jobs: Sequence[Submitted], tick: Callable[[JobsNow], None]) -> list[Ended]:
        for waiting in (1, 0, 0, 1, 1, 1, 0):
            tick(JobsNow(1 - waiting, "as squeue tells it", waiting))
        return super().wait(jobs, tick)


def test_the_reason_why_a_job_that_ran_waits_again_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, sweep = profile(monkeypatch, tmp_path, measures=True, kind=Requeued)
    profile_stage(sweep)
    output = capsys.readouterr().err
    assert output.count("profiling: job 1 waits to run again, as a node failed (NODE_FAIL)\n") == 1


class BrokenSetup(Scheduler):
    """A scheduler whose job goes on although a line of the cluster file's `setup` failed."""

    def submit(self, jobs: Sequence[ProfileJob], **options: Any) -> list[Submitted]:
        self.outputs = [job.output for job in jobs]
        return super().submit(jobs, **options)

    def wait(self, jobs: Sequence[Submitted], tick: Callable[[JobsNow], None]) -> list[Ended]:
        tick(JobsNow(0, "1 waiting"))
        words = "`module …` in setup ended with exit code 1"
        append_record(notes_file(self.outputs[0]), JobNote(note="began", time=1.0, job_id="1", detail=words))
        tick(JobsNow(1, "1 running"))
        tick(JobsNow(1, "1 running"))
        raise KeyboardInterrupt


def test_a_failed_command_of_setup_is_reported_once_while_the_first_job_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, sweep = profile(monkeypatch, tmp_path, measures=False, kind=BrokenSetup)
    with pytest.raises(KeyboardInterrupt):
        profile_stage(sweep)
    waiting, warning, running = capsys.readouterr().err.splitlines()
    assert (waiting[-9:], running[-9:]) == ("1 waiting", "1 running")
    assert warning.startswith("warning: job 1 went on although `module …` in setup ended with exit code 1")


@pytest.mark.parametrize("failure", [Failure.PREEMPTED, Failure.KILLED])
def test_a_preemption_does_not_count_against_what_was_being_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, failure: Failure
) -> None:
    """If it cancels the job, another job measures that; a job that was killed may have died of it."""
    part, output = part_with_limit(tmp_path), tmp_path / "profile" / "n1.jsonl"
    small, large = Configuration(1, 1, 32), Configuration(1, 1, 64)
    append_record(output, measurement(small))
    append_record(notes_file(output), JobNote(note="measuring", time=1.0, job_id="7", configuration=large))
    data = {"output": "profile/n1.jsonl", "configurations": [list(small), list(large)], "folder": "slurm/a"}
    part.run.log_event("submitted", "profile", job_id="7", data=data)
    end = Ended(Submitted("7", tmp_path / "slurm" / "a"), failure, "", None)
    submission = part.run.history().submissions()[-1]
    with monkeypatch.context() as context:
        # all events of a run are read only for a broken device
        context.delattr(RunDirectory, "events")
        is_counted = _record_end(part, submission, end)
    recorded = [m.configuration for m in part.run.measurements().records]
    if failure is Failure.PREEMPTED:
        assert (is_counted, recorded, _broken_rounds(part)) == (False, [small], 0)
    else:
        assert (is_counted, recorded, _broken_rounds(part)) == (True, [small, large], 1)
    assert [event.failure for event in part.run.events() if event.event == "ended"] == [failure]


def test_the_end_of_a_job_is_recorded_among_the_measurements_whatever_file_the_events_name(tmp_path: Path) -> None:
    """A copy of another user's run may name any file of this user's, as one that the shell reads."""
    part, theirs = part_with_limit(tmp_path / "run"), tmp_path / "profile.sh"
    theirs.write_text("# mine\n")
    data = {"output": f"../{theirs.name}", "configurations": [[1, 1, 32]], "folder": "slurm/a"}
    part.run.log_event("submitted", "profile", job_id="7", data=data)
    end = Ended(Submitted("7", part.run.slurm / "a"), Failure.BUG, "$(echo in a string that JSON quotes)", None)
    _record_end(part, part.run.history().submissions()[-1], end)
    assert theirs.read_text() == "# mine\n"
