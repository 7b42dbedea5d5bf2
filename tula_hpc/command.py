"""What the commands share: their options, their inputs, the run directory, and how they end."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tula_hpc.errors import InputError, LaunchError, RunDirectoryError, StorageError, TulaError
from tula_hpc.files import NO_SPACE, drop_output, in_words

if TYPE_CHECKING:
    from tula_hpc.config import ClusterSpec, SweepSpec
    from tula_hpc.records import RunDirectory
    from tula_hpc.stages import Sweep

# Of a cluster file what only says how jobs are submitted: a project's hours are used up, or a time limit was too short.
# Neither a measurement nor a training depends on it.
OF_SUBMISSION = frozenset({
    "account", "qos", "profile_minutes", "train_minutes", "array_parallelism",
    "controller_minutes", "controller_partition", "controller_memory_gb",
})  # fmt: skip
SHOWN_LINES = 40  # of what differs between inputs
LAST_ANSWER_S = 5.0  # so long who interrupts a command waits for Slurm's word on its jobs
NOT_SET = "not set"  # a key's value, in words
Changes = dict[str, tuple[Any, Any]]  # by key: its value in the run directory, and now


def add_input_options(parser: argparse.ArgumentParser) -> None:
    """The sweep file, the cluster file, the run directory, and single keys."""
    parser.add_argument("sweep", type=Path, metavar="SWEEP.toml", help="what to train; see sweeps/example.toml")
    parser.add_argument(
        "--cluster",
        type=Path,
        metavar="CLUSTER.toml",
        help="where to run; see slurm_templates/ (default: this machine)",
    )
    parser.add_argument("--run-dir", type=Path, metavar="RUN", help="where results go (default: runs/NAME)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="section.key=value",
        help="override a key of the sweep, or of the cluster as cluster.key=value, and of one of its partitions as "
        "cluster.partitions.NAME.key=value; repeatable",
    )
    parser.add_argument(
        "--detach",
        action="store_true",
        help="submit, and return at once: small Slurm jobs carry on (see python -m tula_hpc.status RUN)",
    )


def exit_code_of(run: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Run a command; returns the exit code: 0 done, 1 a stage failed, 2 bad input, 130 interrupted."""
    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # a killed login session ends like Ctrl-C: nothing is lost
    try:
        code = run(options)
        sys.stdout.flush()
        return code
    except InputError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except TulaError as error:
        sys.stderr.write(f"{error}\nMend the cause and run the same command again: what is done is not done again.\n")
        return 1
    except BrokenPipeError:
        drop_output()
        return 128 + signal.SIGPIPE
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        sys.stderr.write(f"{where}{in_words(error)}\nMend the cause and run the same command again.\n")
        return 1
    except KeyboardInterrupt:
        return 130


def load_inputs(options: argparse.Namespace) -> tuple[SweepSpec, ClusterSpec]:
    """Read and check the sweep and the cluster, one by itself and both together.

    Raises:
        InputError: One line per mistake.
    """
    from tula_hpc.config import load_together

    dry = getattr(options, "dry_run", False)
    spec, cluster = load_together(options.sweep, options.cluster, options.set, check_paths=not dry)
    if dry:
        _warn_of_paths(options)
    if getattr(options, "detach", False) and cluster.executor != "slurm":
        raise InputError('needs a cluster with executor = "slurm"; here use nohup or tmux', source="--detach")
    return spec, cluster


def _warn_of_paths(options: argparse.Namespace) -> None:
    from tula_hpc.config import load_together

    try:
        load_together(options.sweep, options.cluster, options.set)
    except InputError as error:  # all else was right before
        sys.stderr.write(f"warning: {error}\n")


def run_root(options: argparse.Namespace, spec: SweepSpec) -> Path:
    """The run directory's path.

    Raises:
        RunDirectoryError: It holds characters that job scripts would take for something else.
    """
    from tula_hpc.records import RunDirectory

    root = Path(options.run_dir or Path("runs") / spec.name)
    RunDirectory(root).check_name()
    return root


def open_run(spec: SweepSpec, cluster: ClusterSpec, root: Path) -> Sweep:
    """Make the run directory, or continue one that was made from the same inputs.

    Raises:
        RunDirectoryError: It is something else, or was made from other inputs.
    """
    from tula_hpc.records import RunDirectory, write_atomically
    from tula_hpc.stages import Sweep

    run = RunDirectory(root)
    _refuse_other_folder(run)
    try:
        run.create()
    except OSError as error:
        message = f"cannot be made: {in_words(error)}"
        if error.errno in NO_SPACE:
            raise StorageError(f"{error.filename or run.root}: {message}") from None
        raise RunDirectoryError(message, source=error.filename or run.root) from None
    if _is_unused(run):  # a mistake in the inputs was mended before anything came of them
        _forget_other_inputs(run, spec, cluster)
    _refuse_other_inputs(run, spec, cluster)
    for path, inputs in _files(run, spec, cluster):
        if path.exists():
            _take_over(run, path, inputs)
        else:
            write_atomically(path, _frozen(inputs))
    return Sweep(spec, cluster, run, started_at=time.time())


def check_run(spec: SweepSpec, cluster: ClusterSpec, root: Path) -> None:
    """Whether a run directory may be made there, or continued with these inputs; makes nothing.

    Raises:
        RunDirectoryError: It is something else, or was made from other inputs.
    """
    from tula_hpc.records import RunDirectory

    run = RunDirectory(root)
    _refuse_other_folder(run)
    if run.root.is_dir():
        run.check_owner()
    if not _is_unused(run):
        _refuse_other_inputs(run, spec, cluster)


def _refuse_other_folder(run: RunDirectory) -> None:
    if run.root.exists() and not run.root.is_dir():
        raise RunDirectoryError("is not a folder", source=run.root)
    if run.root.is_dir() and not run.sweep_file.exists() and not _is_fresh(run.root):
        raise RunDirectoryError("is not empty and not a run directory; choose another --run-dir", source=run.root)


def _is_unused(run: RunDirectory) -> bool:
    """Whether no job was ever submitted, and nothing measured or planned: other inputs change nothing that is there."""
    from tula_hpc.launch import NOTICE

    if any(run.slurm.glob(f"*/{NOTICE}")) or run.plan_file.exists():
        return False
    measured = any(path.stat().st_size for path in run.profile.glob("*.jsonl"))
    return not measured and all(event.event != "submitted" for event in run.events())


def _forget_other_inputs(run: RunDirectory, spec: SweepSpec, cluster: ClusterSpec) -> None:
    """Remove the inputs of an unused run, where they are other ones, and the estimate that was made from them."""
    if not any(_changes(path, inputs) for path, inputs in _files(run, spec, cluster)):
        return
    with run.locked():
        if _is_unused(run):  # still: the command that was at work may have submitted meanwhile
            for path in (*run.root.glob("footprint*.json"), run.cluster_file, run.sweep_file):
                path.unlink(missing_ok=True)


def _files(run: RunDirectory, spec: SweepSpec, cluster: ClusterSpec) -> list[tuple[Path, SweepSpec | ClusterSpec]]:
    return [(run.sweep_file, spec), (run.cluster_file, cluster)]


def _changes(path: Path, inputs: SweepSpec | ClusterSpec) -> Changes:
    """What of a run's inputs is another than in its file, if that is there."""
    if not path.exists():
        return {}
    old, new = _keys(_read_frozen(path)), _keys(_frozen(inputs))
    differing = (key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key))
    return {key: (old.get(key, NOT_SET), new.get(key, NOT_SET)) for key in differing}


def _refuse_other_inputs(run: RunDirectory, spec: SweepSpec, cluster: ClusterSpec) -> None:
    """How jobs are submitted may change at any time; until the first training all that no measurement depends on."""
    is_sweep = spec.study is None
    free = is_sweep and not _has_trained(run)
    for path, inputs in _files(run, spec, cluster):
        changes = _changes(path, inputs)
        if not all(key in OF_SUBMISSION or (free and _is_unmeasured(key)) for key in changes):
            raise RunDirectoryError(_other_inputs(changes, run, is_sweep=is_sweep), source=path)


def _is_unmeasured(key: str) -> bool:
    from tula_hpc.analysis.measured_inputs import FREE_OF_WORKLOAD, MEASURED_OF_TRAINING

    section, _, name = key.partition(".")
    free = {"workload": name in FREE_OF_WORKLOAD, "training": name not in MEASURED_OF_TRAINING}
    return free.get(section, section in ("objective", "pricing") and bool(name))


def _has_trained(run: RunDirectory) -> bool:
    """Whether a training has begun, or a job is on its way to that."""
    from tula_hpc.launch import unsettled

    return any((run.root / "train").glob("*/*")) or any(unsettled(run, "train", "control"))


def _take_over(run: RunDirectory, path: Path, inputs: SweepSpec | ClusterSpec) -> None:
    """Go on with these inputs; jobs that wait or run stay as they are. Measurements stay, a plan is made anew."""
    from tula_hpc.records import write_atomically

    changes = _changes(path, inputs)
    if not changes:
        return
    with run.locked():
        write_atomically(path, _frozen(inputs))
        if not changes.keys() <= OF_SUBMISSION:
            run.plan_file.unlink(missing_ok=True)
    for key, (was, now) in changes.items():
        sys.stderr.write(_shown(f"{path}: {key}: {was} before, {now} from now on") + "\n")


def _is_fresh(root: Path) -> bool:
    """Whether a folder is empty, or as empty as a command leaves it that could not go on after making it."""
    return all(
        path.name.startswith(".sweep.toml.") or (path.name in ("profile", "slurm", "train") and not any(path.iterdir()))
        for path in root.iterdir()
    )


def _read_frozen(path: Path) -> str:
    from tula_hpc.config import MAX_FILE_BYTES
    from tula_hpc.files import read_bounded

    try:
        return read_bounded(path, MAX_FILE_BYTES).decode(errors="replace")
    except OSError as error:
        raise RunDirectoryError(f"cannot be read: {in_words(error)}", source=path) from None


def _other_inputs(changes: Changes, run: RunDirectory, *, is_sweep: bool) -> str:
    """What to say of a run directory that was made from other inputs: which keys differ, and what to do."""
    lines = [_shown(f"  {key}: {was} there, {now} now") for key, (was, now) in changes.items()]
    more = ["  ..."] if len(lines) > SHOWN_LINES else []
    if all(key.startswith(("objective.", "pricing.")) for key in changes):
        again = f"python -m tula_hpc.analysis.plan {shlex.quote(str(run.root))} --set KEY=VALUE --write"
        more.append(f"To plan again over the same measurements: {again}")
    elif is_sweep and all(key in OF_SUBMISSION or _is_unmeasured(key) for key in changes):
        more.append(f"To train anew over the same measurements, delete {run.root / 'train'}.")
    words = "was made from other inputs; use another --run-dir or the same inputs:"
    return "\n".join([words, *lines[:SHOWN_LINES], *more])


def _shown(line: str) -> str:
    return line[:200] if line.isprintable() else ascii(line)[:200]


def _keys(toml: str) -> dict[str, Any]:
    """Every value by its dotted key; none of what is no TOML any more."""
    import tomllib

    def flat(table: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for key, value in table.items():
            if isinstance(value, dict):
                yield from flat(value, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}", value

    try:
        return dict(flat(tomllib.loads(toml), ""))
    except (tomllib.TOMLDecodeError, RecursionError):
        return {}


def _frozen(spec: SweepSpec | ClusterSpec) -> str:
    """The resolved input as TOML."""
    import tomli_w

    return tomli_w.dumps(spec.model_dump(mode="json", exclude_none=True))


def work(sweep: Sweep, until: str, *, detach: bool = False) -> int:
    """Carry out an open run up to a stage; returns the exit code: 0 done or detached, 130 interrupted.

    Raises:
        TulaError: It cannot be done; see `exit_code_of`.
    """
    from tula_hpc.detach import carry_on_detached, take_over
    from tula_hpc.pipeline import carry_out

    with sweep.run.locked():
        try:
            if detach:
                return carry_on_detached(sweep, until)
            take_over(sweep)
            return carry_out(sweep, until)
        except KeyboardInterrupt:
            say_interrupted(sweep)
            return 130


def say_interrupted(sweep: Sweep) -> None:
    """How to go on, and how to cancel what still runs, or did by the files where Slurm does not answer at once."""
    from tula_hpc.stages import jobs_left, jobs_on_record

    sys.stderr.write("\ninterrupted. Run the same command again to continue.\n")
    stages, unless = ("profile", "train", "control"), ""
    try:
        jobs = jobs_left(sweep, *stages, timeout_s=LAST_ANSWER_S)
    except LaunchError:
        jobs, unless = jobs_on_record(sweep.run, *stages), ", unless they are over: Slurm does not answer"
    if jobs:
        cancel = sweep.launcher.cancel_command(jobs)
        sys.stderr.write(f"jobs are left as they are{unless}; to cancel them: {cancel}\n")
