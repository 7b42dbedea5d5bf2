"""Open a run directory for a command, work in it, and end on an error or Ctrl-C."""

from __future__ import annotations

import contextlib
import errno
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tula_hpc.analysis.plan import lost_inputs
from tula_hpc.cli.changed_inputs import (
    Changes,
    Key,
    changes_of,
    freeze,
    in_lines,
    is_between_nodes,
    is_of_submission,
    is_unmeasured,
    name_of,
    only_prices,
    sets_time,
    shown_line,
    that_matter,
)
from tula_hpc.command_errors import INTERRUPTED
from tula_hpc.config import ClusterSpec, SweepSpec, load_frozen_cluster
from tula_hpc.env import unix_time
from tula_hpc.errors import InputError, LaunchError, RunDirectoryError, StorageError
from tula_hpc.files import NO_SPACE, in_words, is_there
from tula_hpc.formatting import command_line
from tula_hpc.launch.job_files import Submitted
from tula_hpc.launch.launcher import Launcher, describe_states, lost
from tula_hpc.records import RunDirectory, write_atomically
from tula_hpc.records.run_directory import holder_of
from tula_hpc.stages.context import Sweep, jobs_of_original, jobs_on_record

# seconds to wait for Slurm's answer about jobs, while a user waits after Ctrl-C or a correction
LAST_ANSWER_S = 5.0
# errors that mean an existing folder is read-only
READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


def open_run(
    spec: SweepSpec, cluster: ClusterSpec, root: Path, *, has_cluster_file: bool = True
) -> Sweep:
    """Make the run directory, or continue one that was made from the same inputs.

    Without a cluster file, a refusal of another cluster says that the file is missing.

    Raises:
        RunDirectoryError: The folder is no run directory, or was made from other inputs.
    """
    run = RunDirectory(root)
    _refuse_other_folder(run)
    _refuse_copy(run)
    try:
        run.create()
    except OSError as error:
        is_locked = root.is_dir() and error.errno in READ_ONLY
        message = f"cannot be {'written' if is_locked else 'made'}: {in_words(error)}"
        if error.errno in NO_SPACE:
            raise StorageError(f"{error.filename or run.root}: {message}") from None
        message += "; make it writable, or" if is_locked else ";"
        message += " use another --run-dir"
        raise RunDirectoryError(message, source=error.filename or run.root) from None
    # for instance, a mistake in the inputs was corrected
    if _begins_anew(run, spec, cluster):
        _begin_anew(run, spec, cluster)
    _refuse_other_inputs(run, spec, cluster, has_cluster_file=has_cluster_file)
    for path, inputs in _files(run, spec, cluster):
        if path.exists():
            _take_over(run, path, inputs)
        else:
            if run.events_file.exists():
                why = "whether measurements were made with other inputs cannot be checked"
                sys.stderr.write(f"{path}: is missing, and is written anew: {why}\n")
            write_atomically(path, freeze(inputs))
    return Sweep(spec, cluster, run, started_at=unix_time())


def check_run(
    spec: SweepSpec, cluster: ClusterSpec, root: Path, *, has_cluster_file: bool = True
) -> None:
    """Check that a run directory may be made at `root`, or continued with these inputs.

    Raises:
        RunDirectoryError: The folder is no run directory, or was made from other inputs.
    """
    run = RunDirectory(root)
    _refuse_other_folder(run)
    if run.root.is_dir():
        run.check_owner()
    if not _begins_anew(run, spec, cluster):
        _refuse_other_inputs(run, spec, cluster, has_cluster_file=has_cluster_file)


# folders of a run that its jobs write to
FOLDERS = {"profile", "slurm", "train"}


def _refuse_other_folder(run: RunDirectory) -> None:
    with run.reading():
        is_other = run.root.is_dir() and not is_there(run.sweep_file) and not _is_fresh(run.root)
    if is_other:
        if words := lost_inputs(run):
            raise RunDirectoryError(words)
        words = "is not empty and not a run directory; choose another --run-dir"
        if {path.name for path in run.root.iterdir()} <= FOLDERS:
            words = (
                "holds the rest of a run that was deleted, perhaps written by one of its jobs that "
                "still runs (squeue shows it): cancel that job, delete the folder, and run the same "
                "command again"
            )
        raise RunDirectoryError(words, source=run.root)


def _refuse_copy(run: RunDirectory) -> None:
    """Refuse a copy while jobs of the original are not over: waiting for them would be in vain."""
    copied = jobs_of_original(run)
    left = [job.job_id for job in _jobs_left(run) if job.job_id in copied] if copied else []
    if left:
        home = copied[left[0]]
        raise RunDirectoryError(
            f"is a copy of {home}, whose job {left[0]} is at work and writes there, not here; go on "
            f"with --run-dir {shlex.quote(str(home))}, or copy it again when nothing is at work",
            source=run.root,
        )


def _begins_anew(run: RunDirectory, spec: SweepSpec, cluster: ClusterSpec) -> bool:
    """Tell whether other inputs may replace the run's: it has no results, and no job is left."""
    changed = (
        key for path, inputs in _files(run, spec, cluster) for key in changes_of(path, inputs)
    )
    if all(map(is_of_submission, changed)) or run.has_results():
        return False
    return not _jobs_left(run) and not any(lost(run))


def _jobs_left(run: RunDirectory) -> list[Submitted]:
    jobs = jobs_on_record(run, "profile", "train", "control")
    if not jobs:
        return []
    try:
        launcher = Launcher(load_frozen_cluster(run.cluster_file), run, "")
        active = launcher.executor.states(jobs, LAST_ANSWER_S)
    except (LaunchError, InputError):
        return jobs
    return [job for job in jobs if job.job_id in active]


def _begin_anew(run: RunDirectory, spec: SweepSpec, cluster: ClusterSpec) -> None:
    with _locked_for_others(run):
        # before the lock was taken, another command has submitted or measured something
        if not _begins_anew(run, spec, cluster):
            return
        aside = run.set_aside()
        for path, inputs in _files(run, spec, cluster):
            write_atomically(path, freeze(inputs))
    moved = f"; the files of the earlier jobs are in {aside}" if aside else ""
    sys.stderr.write(
        f"{run.root}: no measurement was made with the earlier inputs: the new ones replace them"
        f"{moved}\n"
    )


@contextlib.contextmanager
def _locked_for_others(run: RunDirectory) -> Iterator[None]:
    """Lock a run whose inputs are about to change.

    Raises:
        RunDirectoryError: Another command holds it; the message says what to do instead.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(run.locked())
        except RunDirectoryError as error:
            remedy = "another name or --run-dir makes a run of its own"
            raise RunDirectoryError(
                f"{error}; your inputs differ from its inputs: {remedy}"
            ) from None
        yield


def _files(
    run: RunDirectory, spec: SweepSpec, cluster: ClusterSpec
) -> list[tuple[Path, SweepSpec | ClusterSpec]]:
    return [(run.sweep_file, spec), (run.cluster_file, cluster)]


def _refuse_other_inputs(
    run: RunDirectory, spec: SweepSpec, cluster: ClusterSpec, *, has_cluster_file: bool
) -> None:
    if words := lost_inputs(run):
        raise RunDirectoryError(words)
    is_sweep = spec.study is None
    free = is_sweep and not _may_train(run)
    for path, inputs in _files(run, spec, cluster):
        refused = {
            key: values
            for key, values in that_matter(changes_of(path, inputs)).items()
            if not (free and _is_unmeasured(key, run, spec))
        }
        if refused:
            kind = "sweep" if path == run.sweep_file else "cluster"
            if kind == "cluster" and not has_cluster_file:
                kind = ""
            frees_up = is_sweep and all(_is_unmeasured(key, run, spec) for key in refused)
            words = _other_inputs(refused, run, kind, is_sweep=is_sweep, frees_up=frees_up)
            raise RunDirectoryError(words, source=path)


def _is_unmeasured(key: Key, run: RunDirectory, spec: SweepSpec) -> bool:
    if spec.workload.is_script and key == ("workload", "metric"):
        # only the output of trainings is searched for it
        return True
    if is_between_nodes(key):
        return all(row.nodes == 1 for row in run.measurements().records)
    return is_unmeasured(key)


def _may_train(run: RunDirectory) -> bool:
    """Tell whether a training has begun, or may begin at any moment by an unattended sweep."""
    history = run.history()
    if any((run.root / "train").glob("*/*")) or history.unsettled("control"):
        return True
    # the training's files may have been moved away before its job was over
    return bool(history.unsettled("train") and _jobs_left(run))


def _take_over(run: RunDirectory, path: Path, inputs: SweepSpec | ClusterSpec) -> None:
    """Replace the inputs for later jobs; keep measurements, delete an affected plan."""
    changes = changes_of(path, inputs)
    if not changes:
        return
    with _locked_for_others(run):
        if that_matter(changes) or (sets_time(changes) and not _may_train(run)):
            _warn_of_lost_objective(run)
            # first, so that a command killed in between leaves no plan that fits the old inputs
            run.plan_file.unlink(missing_ok=True)
        write_atomically(path, freeze(inputs))
    for key, (was, now) in changes.items():
        sys.stderr.write(
            shown_line(f"{path}: {name_of(key)}: {was} before, {now} from now on") + "\n"
        )


def _warn_of_lost_objective(run: RunDirectory) -> None:
    with contextlib.suppress(RunDirectoryError):
        if lost := run.read_plan().other_objective:
            sys.stderr.write(
                f"warning: {run.plan_file}: a new plan is made by your sweep file, without "
                f"{', '.join(lost)} (tula plan --write); to keep that, end this command (Ctrl-C) and "
                "set it there\n"
            )


def _is_fresh(root: Path) -> bool:
    """Tell whether a folder is empty, or holds only what an interrupted command left."""
    return all(
        path.name.startswith(".sweep.toml.") or (path.name in FOLDERS and not any(path.iterdir()))
        for path in root.iterdir()
    )


def _other_inputs(
    refused: Changes, run: RunDirectory, kind: str, *, is_sweep: bool, frees_up: bool
) -> str:
    """Explain which keys differ from the run directory but may not, and what to do.

    `kind` is the file that has them, "sweep" or "cluster"; "": there is no cluster file now.
    `frees_up`: no measurement depends on these keys, so that they may change later.
    """
    was, now = refused.get(("executor",), ("", ""))
    if now == "local":
        return (
            "was made for Slurm, and is now started on this machine; give its cluster file: "
            f"--cluster {shlex.quote(str(run.cluster_file))}"
        )
    made = "was made from"
    if frees_up and run.train().result_file.exists():
        made = "belongs to a training that is over and was made from"
    if was == "local":
        lines = [
            "was made without --cluster, on this machine; to measure on Slurm use another --run-dir"
        ]
    else:
        what, remedy = _of_file(kind, refused, run)
        lines = [
            f"{made} other inputs{what} now:",
            *in_lines(refused),
            f"{remedy}another --run-dir, for a sweep of its own, which measures again.",
        ]
    if is_sweep and only_prices(refused):
        again = command_line("plan", str(run.root), "--set", "KEY=VALUE")
        lines.append(f"To plan again over the same measurements: {again}")
    if frees_up:
        lines.append(_when_free(run))
    elif not run.has_results() and (left := _jobs_left(run)):
        lines.append(_in_the_way(run, left))
    return "\n".join(lines)


def _of_file(kind: str, refused: Changes, run: RunDirectory) -> tuple[str, str]:
    """Say in which file inputs differ, and the remedy up to another run directory."""
    if not kind:
        remedy = f"Add --cluster {shlex.quote(str(run.cluster_file))}; or use "
        return ", and no cluster is given", remedy
    another = back = ""
    if ("name",) in refused:
        back = f", and add --run-dir {shlex.quote(str(run.root))}"
    elif kind == "sweep":
        another = "another name in it, or "
    remedy = "Set them back in your file (or in this copy, if it was edited)"
    return f" than your {kind} file (or --set) has", f"{remedy}{back}; or use {another}"


def _when_free(run: RunDirectory) -> str:
    if run.has_trained():
        steps = []
        holder = holder_of(run.root / ".lock")
        if holder.alive:
            steps.append(f"end the command that is at work, process {holder.process} (Ctrl-C)")
        if left := _jobs_left(run):
            steps.append(": ".join(filter(None, ["cancel what is left", _to_cancel(run, left)])))
        what = "the trained model" if run.train().result_file.exists() else "what is trained so far"
        steps.append(f"move {run.root / 'train'} away: it holds {what}")
        return f"To train from the start over the same measurements, {', then '.join(steps)}."
    job_id = run.history().unsettled("control")[0].job_id
    return f"The sweep goes on unattended: other values are accepted once job {job_id} is over."


def _in_the_way(run: RunDirectory, left: Sequence[Submitted]) -> str:
    how = _to_cancel(run, left)
    to_cancel = f"; to cancel: {how}" if how else ""
    over = f"other inputs are accepted once job {left[0].job_id} is over"
    return f"Nothing is measured yet: {over}{to_cancel}"


def _to_cancel(run: RunDirectory, left: Sequence[Submitted]) -> str:
    # the run's cluster file may be damaged
    with contextlib.suppress(InputError):
        return Launcher(load_frozen_cluster(run.cluster_file), run, "").executor.cancel_command(
            left
        )
    return ""


def work(sweep: Sweep, until: str, *, detach: bool = False, here: bool = False) -> int:
    """Work on an open run up to a stage; return 0 when done or detached, 130 if interrupted.

    With `detach`, controller jobs carry on; with `here`, this command replaces any controllers.

    Raises:
        TulaError: The work failed; see `exit_code_of`.
    """
    from tula_hpc.cli.detached import carry_on_detached, look_on, take_over
    from tula_hpc.cli.pipeline import carry_out

    try:
        if not detach and not here:
            look_on(sweep)
        with sweep.run.locked():
            _refuse_changed_meanwhile(sweep)
            if detach:
                return carry_on_detached(sweep, until)
            take_over(sweep)
            return carry_out(sweep, until)
    except KeyboardInterrupt:
        with _undisturbed():
            say_interrupted(sweep, until, detach=detach)
        return INTERRUPTED


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Ignore a second Ctrl-C: the message about remaining jobs takes only seconds."""
    before = {each: signal.signal(each, signal.SIG_IGN) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _refuse_changed_meanwhile(sweep: Sweep) -> None:
    files = _files(sweep.run, sweep.spec, sweep.cluster)
    if any(changes_of(path, inputs) for path, inputs in files):
        raise RunDirectoryError(
            "another command has just changed its inputs; run this one again to use yours",
            source=sweep.run.root,
        )


def say_interrupted(sweep: Sweep, until: str, *, detach: bool = False) -> None:
    """Say what goes on without this command, how to continue, and how to cancel the jobs."""
    jobs = jobs_on_record(sweep.run, "profile", "train", "control")
    states, unless = "", ", unless they are over: Slurm does not answer"
    with contextlib.suppress(LaunchError):
        active = sweep.launcher.executor.states(jobs, LAST_ANSWER_S)
        jobs, unless = [job for job in jobs if job.job_id in active], ""
        at_work = {job.job_id for job in jobs_on_record(sweep.run, "profile", "train")}
        states = describe_states({key: active[key] for key in active if key in at_work})
    again = ("--until", until) if until != "report" else ()
    ids = {job.job_id for job in jobs}
    control = [job for job in sweep.run.history().unsettled("control") if job.job_id in ids]
    if control:
        # not a guard, which only waits until another controller is over
        acts = [job for job in control if not job.role] or control
        goes_on = f"the sweep goes on unattended, by controller job {acts[-1].job_id}{unless}"
        here = sweep.command(*again, "--take-over")
        sys.stderr.write(f"\ninterrupted; {goes_on}. To carry on here: {here}\n")
    else:
        same = sweep.command(*again, *(["--detach"] if detach else []))
        sys.stderr.write(
            f"\ninterrupted. To continue, run the same command again, or from anywhere: {same}\n"
        )
        if sweep.run.history().detached():
            sys.stderr.write("no controller job is left: nothing goes on unattended\n")
    if jobs:
        cancel = sweep.launcher.executor.cancel_command(jobs)
        shown = f" ({states})" if states else ""
        sys.stderr.write(f"jobs are left as they are{shown}{unless}; to cancel them: {cancel}\n")
    else:
        sys.stderr.write("no job is left\n")
