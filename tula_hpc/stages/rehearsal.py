"""Rehearse: try the workload on this machine before anything is submitted.

This needs torch, so it runs in a process of its own: `profiling/rehearsal_process.py`. Mistakes are
refused here, and so are a model or data that differ from what the run has measured. The result is
kept in the run directory: the next command tries again only if code, keys of the workload or
libraries have changed since.

`search.estimate = false` skips the rehearsal, for data or libraries that only the compute nodes
have; a job then finds the mistakes. Controller jobs skip it, too. A training script of the user's
own is not run here: its syntax was checked when the sweep was read; the first job finds the rest.
"""

from __future__ import annotations

import hashlib
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import ValidationError

from tula_hpc.config import ClusterSpec, SweepSpec, local_batches, study_part
from tula_hpc.config.workload import SETTINGS
from tula_hpc.env import slurm_job_id, with_variables
from tula_hpc.errors import InputError, TrialError
from tula_hpc.formatting import in_short, last_line, printable
from tula_hpc.own_sources import digests_of, is_own, trains_together
from tula_hpc.python_path import start_of_python
from tula_hpc.records import (
    Identity,
    Trial,
    measured_identity,
    parse_record,
    refuse_another,
    write_atomically,
)
from tula_hpc.stages.batches_that_fit import TIMEOUT_S, Estimate, run_apart
from tula_hpc.stages.context import Sweep, stage_progress
from tula_hpc.stages.profile import NOTHING, parts_of, wants_estimate

TRYING = f"the workload on this machine (search.estimate), at most {TIMEOUT_S / 60:.0f} min"
ELSEWHERE = (
    "If only this machine lacks something, set search.estimate = false: then nothing is tried here."
)
LIBRARIES = ("torch", "torchvision", "timm")
# a stack frame, as faulthandler prints it
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in ', re.MULTILINE)


def rehearse(
    spec: SweepSpec, cluster: ClusterSpec, files: tuple[Path, Path], memory: Sequence[str] = ()
) -> Trial | str:
    """Try the workload; return the findings, or the reason why it could not be tried.

    `memory` names partitions for which memory is estimated as well.

    Raises:
        TrialError: The workload has a mistake, which the message names.
    """
    # -B, since a dry run must leave nothing behind, not even compiled files of the user's modules;
    # faulthandler prints where a crash happened
    options = ["-B", "-X", "faulthandler", "-m", "tula_hpc.profiling.rehearsal_process"]
    command = [*start_of_python(), *options, *map(str, files)]
    command += [word for name in memory for word in ("--memory", name)]
    # taken before the trial, so that later changes of the code are noticed
    key = key_of(spec)
    done = run_apart(command, TIMEOUT_S, with_variables(cluster.parts()[0].environment))
    if isinstance(done, str):
        return f"it {done}"
    last = last_line(done.stderr)
    if done.returncode in (2, 3):
        words = last if done.returncode == 2 else with_remedy(last, cluster)
        raise TrialError(f"{words}\n{NOTHING}")
    if done.returncode < 0:
        end = signal.strsignal(-done.returncode)
        if not (place := _own_place(done.stderr)):
            return f"it ended by a signal: {end}"
        died = f"your own code ends its process: {end} ({place})"
        raise TrialError(f"{with_remedy(died, cluster)}\n{NOTHING}")
    if done.returncode != 0:
        return last or f"it ended with exit code {done.returncode}"
    answer = last_line(done.stdout)
    if not answer:
        return "it ended without an answer, as by os._exit"
    try:
        trial = parse_record(Trial, answer.encode())
    except ValueError as error:
        return f"its answer is damaged: {error}"
    _refuse_large_batches(spec, cluster, trial.identity)
    for words in trial.warnings:
        sys.stderr.write(f"warning: {printable(words)}\n")
    return trial.model_copy(update={"key": key})


def _own_place(trace: str) -> str:
    """Return the innermost place of the user's own code in a crash, "" if there is none."""
    frames = _FRAME.findall(trace)
    return next((f"{Path(file).name}:{line}" for file, line in frames if is_own(file)), "")


def with_remedy(mistake: str, cluster: ClusterSpec) -> str:
    """Add the remedy that helps if only this machine lacks something."""
    if cluster.executor == "local" and not cluster.setup:
        return mistake
    return f"{mistake}\n{ELSEWHERE}"


def _refuse_large_batches(spec: SweepSpec, cluster: ClusterSpec, found: Identity) -> None:
    """Refuse global batches that are larger than the training set, as a job would."""
    key = "search.max_batch" if spec.study is None else "study.batches"
    largest = max(_batches(spec, cluster), default=0)
    if largest > found.train_samples:
        message = f"a batch of {largest} is above the {found.train_samples} training samples"
        also = ""
        if spec.study is None and spec.search.min_batch > found.train_samples:
            also = f", and search.min_batch = {spec.search.min_batch}"
        raise TrialError(f"{message}; lower it{also}\n{NOTHING}", key=key)


def _batches(spec: SweepSpec, cluster: ClusterSpec) -> Iterator[int]:
    if spec.study is not None:
        if study_part(spec.study, cluster):
            yield from spec.study.batches
        return
    yield from (world * local for world, local in _candidates(spec, cluster))


def _candidates(spec: SweepSpec, cluster: ClusterSpec) -> Iterator[tuple[int, int]]:
    """Yield the number of workers and the local batch of every candidate."""
    for part in cluster.parts():
        for nodes in spec.search.cluster_sizes:
            for local in local_batches(spec.search, nodes, part.workers_per_node):
                yield nodes * part.workers_per_node, local


def key_of(spec: SweepSpec) -> str:
    """Return a digest of a trial's inputs: the workload, its code, and libraries."""
    sources = sorted(digests_of(spec.workload.entry_points).items())
    facts = [spec.workload.model_dump_json(), str(sources), sys.version, *map(_version, LIBRARIES)]
    return hashlib.sha256("\n".join(facts).encode(errors="replace")).hexdigest()[:32]


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return ""


def try_before_jobs(sweep: Sweep) -> bool:
    """Try the workload of a run unless that was done, and compare it with the measured one.

    Returns:
        False if it could not be tried here.

    Raises:
        InputError: The workload has a mistake, or differs from the one that was measured.
    """
    if slurm_job_id() is not None:
        return True
    if not is_tried(sweep.spec, sweep.cluster):
        refused = "if that changed the model, the training's job refuses it"
        warn_of_sources(sweep, f"{refused}: undo it, or measure again with another --run-dir")
        warn_of_script(sweep)
        return True
    before = sweep.run.trial()
    if before is not None and before.key == key_of(sweep.spec):
        _refuse_large_batches(sweep.spec, sweep.cluster, before.identity)
        return True
    try:
        tried = _try_with_progress(sweep)
        if tried is None:
            return False
        refuse_another_model(sweep, tried)
    except InputError as error:
        # `status` shows this event
        sweep.run.log_event("failed", "profile", detail=str(error)[:2000])
        raise
    kept = tried.model_copy(update={"footprints": {}})
    write_atomically(sweep.run.trial_file, kept.model_dump_json(indent=1))
    return True


def refuse_another_model(sweep: Sweep, tried: Trial) -> None:
    """Refuse a model or data other than the run has measured; warn of code that has changed.

    Raises:
        InputError: The model or the data differ.
    """
    measured, before = measured_identity(sweep.run.measurements().records), sweep.run.trial()
    # without GPUs the model may be another one here: it is compared with that of the last trial
    if before is None or not tried.identity.is_same(before.identity):
        refuse_another(sweep.run, measured, tried.identity)
    if measured is not None:
        _say_changed(tried.identity.changed_sources(measured), "model and data are the same")


def _try_with_progress(sweep: Sweep) -> Trial | None:
    parts = parts_of(sweep) if sweep.spec.study is None else []
    # even if there is an estimate, which may be of another model
    memory = [part.partition for part in parts if wants_estimate(part)]
    with stage_progress("trying") as progress:
        progress.update(0, 1, TRYING)
        files = (sweep.run.sweep_file, sweep.run.cluster_file)
        tried = rehearse(sweep.spec, sweep.cluster, files, memory)
        if isinstance(tried, str):
            progress.update(
                1, 1, f"your code is not tried here, so only a job will show its mistakes: {tried}"
            )
            return None
        for name, footprint in tried.footprints.items():
            write_atomically(sweep.run.footprint_file(name), footprint.model_dump_json(indent=1))
        found = [Estimate(footprint).describe() for footprint in tried.footprints.values()]
        model = f"{tried.identity.parameters:,} parameters"
        data = f"{tried.identity.train_samples:,} training samples"
        progress.update(1, 1, "; ".join([model, data, *dict.fromkeys(found)]))
    return tried


def warn_of_sources(sweep: Sweep, consequence: str) -> None:
    """Warn of own code that changed since the run's measurements, and say what that means."""
    measured = measured_identity(sweep.run.measurements().records)
    if measured is not None:
        now = measured.model_copy(update={"sources": digests_of(sweep.spec.workload.entry_points)})
        _say_changed(now.changed_sources(measured), consequence)


def _say_changed(names: Sequence[str], consequence: str) -> None:
    if names:
        sys.stderr.write(
            f"warning: {in_short(names)} changed since the measurements; {consequence}\n"
        )


def warn_of_script(sweep: Sweep) -> None:
    """Warn, before anything is measured, of what the first jobs of a script would fail at."""
    if sweep.spec.study is not None or sweep.run.measurements().records:
        return
    _warn_of_lone_workers(sweep.spec, sweep.cluster)
    # a container has files of its own
    missing = [] if sweep.cluster.container else _missing_settings(sweep.spec, sweep.cluster)
    if missing:
        sys.stderr.write(
            f"warning: no such file: {printable(in_short(missing))}; the search may try these "
            "batches: if the script reads a file for each, write it, or change search.min_batch, "
            "max_batch or cluster_sizes\n"
        )


def _missing_settings(spec: SweepSpec, cluster: ClusterSpec) -> list[str]:
    """Return the files of settings, one for each batch, that are not there."""
    work = spec.workload
    named = [each.rpartition("=")[2] for each in work.arguments if each.endswith(SETTINGS)]
    paths: dict[str, None] = {}
    for world, local in _candidates(spec, cluster):
        values = {"{local_batch}": local // work.accumulation, "{global_batch}": world * local}
        for placeholder, value in values.items():
            by_batch = [name for name in named if placeholder in name]
            paths |= dict.fromkeys(name.replace(placeholder, str(value)) for name in by_batch)
    return [path for path in paths if "{" not in path and not Path(path).exists()]


def _warn_of_lone_workers(spec: SweepSpec, cluster: ClusterSpec) -> None:
    """Warn if a script's workers seem to train each for itself; only its steps can prove that."""
    of_node = max(part.workers_per_node for part in cluster.parts())
    workers = max(spec.search.cluster_sizes) * of_node
    work = spec.workload
    if work.is_script and workers > 1 and not trains_together(work.entry_points):
        alone = "search.cluster_sizes = [1]"
        if of_node > 1:
            alone += ", and workers_per_node = 1 in the cluster file"
        sys.stderr.write(
            f"warning: {printable(work.script_name)} does not seem to use DistributedDataParallel "
            "where WORLD_SIZE is above 1: if so, profiles of several workers are refused, after "
            f"those of one; to use a single worker, set {alone}\n"
        )


def is_tried(spec: SweepSpec, cluster: ClusterSpec) -> bool:
    """Tell whether a workload is tried before any job; its libraries may be only in a container."""
    return spec.search.estimate and not spec.workload.is_script and cluster.container is None


def is_here(spec: SweepSpec) -> bool:
    """Tell whether data folder and modules are on this machine; a dry run does not need them."""
    try:
        SweepSpec.model_validate_json(spec.model_dump_json(), context={"check_paths": True})
    except ValidationError:
        return False
    return True
