"""Write the cluster file and the sweep file of a first sweep, and say what is in them."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tula_hpc.config import ClusterSpec, check_together, load_cluster, load_sweep
from tula_hpc.errors import InputError, NotConfiguredError, NotStartedError
from tula_hpc.files import write_out
from tula_hpc.formatting import command_line, listed, plural, printable
from tula_hpc.init.cluster_file import cluster_file, local_cluster_file
from tula_hpc.init.script_options import read_options
from tula_hpc.init.survey import Place, Survey, survey_cluster
from tula_hpc.init.sweep_file import (
    Script,
    filled_in,
    required_arguments,
    required_keys,
    sweep_file,
    unknown_keys,
)
from tula_hpc.own_sources import find_module, trains_together
from tula_hpc.records import write_atomically

# what to do on a machine that has no Slurm at all
WITHOUT_SLURM = "(without Slurm a sweep needs no cluster file: leave out --cluster)"
# a machine without any of these commands, or without a configuration for them, has no Slurm
SLURM_COMMANDS = ("scontrol", "sinfo", "sbatch")


class _Cluster(NamedTuple):
    """Cluster of a sweep, its file, and what Slurm said about it if the file is new."""

    spec: ClusterSpec
    file: Path
    is_kept: bool
    survey: Survey | None = None
    place: Place | None = None

    @property
    def others(self) -> list[Place]:
        """Partitions other than the one that the file is for."""
        places = self.survey.places if self.survey is not None else ()
        return [each for each in places if each is not self.place]


def write_files(options: argparse.Namespace) -> int:
    """Write the files that the options ask for, and say what is in them; return the exit code."""
    options.file = options.file or Path("cluster.toml")
    _refuse_no_cluster_file(options.file)
    script = None if options.script is None else _read_script(options)
    cluster = _cluster(options)
    if script is not None:
        _write_sweep(script, cluster)
    if options.json:
        write_out(json.dumps(_as_json(cluster, script), indent=1) + "\n")
    else:
        write_out("".join(f"{printable(line)}\n" for line in _words(cluster, script)))
    return 0


def _refuse_no_cluster_file(file: Path) -> None:
    """Refuse what cannot be a cluster file's name before anything is asked, written or replaced."""
    expected = "expected the name of a cluster file"
    if file.suffix == ".py":
        meant = command_line("init", "--script", str(file))
        raise InputError(f"is a script; {expected}, or {meant}", source=file)
    if file.is_dir():
        raise InputError(f"is a folder; {expected}", source=file)


def _read_script(options: argparse.Namespace) -> Script:
    """Read the script and choose its sweep file, before Slurm is asked or anything is written."""
    path: Path = options.script
    mistake = None
    if not path.is_file():
        mistake = "is no file" if path.exists() else "no such file"
    elif path.suffix == ".toml":
        # TOML is often valid Python, and the sweep file would get the same name
        mistake = "is a sweep or cluster file"
    elif path.suffix == ".ipynb":
        # its JSON is valid Python, too
        mistake = "is a notebook"
    if mistake is not None:
        message = f"{mistake}; expected a training script in Python, by its path from {Path.cwd()}"
        raise InputError(message, source=path)
    target = options.file.with_name(f"{path.stem}.toml")
    if target == options.file:
        target = target.with_name(f"{path.stem}-sweep.toml")
    _refuse_existing(target, "move it away", force=options.force)
    try:
        script = Script(path.absolute(), read_options(path), target)
    except ValueError as error:
        raise InputError(str(error), source=path) from None
    if script.module is not None and find_module(script.module) is None:
        message = (
            f"imports from its package, so that it is run as module {script.module}, which is not "
            "here or installed; install it, or start the command in the folder of the package"
        )
        raise InputError(message, source=path)
    return script


def _refuse_existing(target: Path, remedy: str, *, force: bool) -> None:
    if target.is_dir():
        raise InputError(f"is a folder; {remedy}", source=target)
    if target.exists() and not force:
        words = f"exists already; {remedy}, or add --force, which replaces it"
        raise InputError(words, source=target)
    if not target.parent.is_dir():
        raise InputError("its folder does not exist; make it first", source=target)


def _cluster(options: argparse.Namespace) -> _Cluster:
    """Write the cluster file, unless there is a script and the file exists; return the cluster."""
    target: Path = options.file
    has_script = options.script is not None
    if has_script and target.exists():
        kept = load_cluster(target)
        if options.partition not in (None, kept.partition, *kept.part_names()):
            message = (
                f"{target} exists already and is left as it is; leave out --partition, or name"
            )
            raise InputError(f"{message} another cluster file", source="--partition")
        return _Cluster(kept, target, is_kept=True)
    _refuse_existing(target, "name another file", force=options.force)
    survey: Survey | None = None
    if not has_script or any(map(shutil.which, SLURM_COMMANDS)):
        try:
            survey = survey_cluster(options.partition)
        except (NotConfiguredError, NotStartedError) as error:
            if not has_script:
                raise type(error)(f"{error} {WITHOUT_SLURM}") from None
            if isinstance(error, NotStartedError):
                raise
    if survey is None:
        if options.partition is not None:
            raise InputError("no Slurm is set up here; leave it out", source="--partition")
        write_atomically(target, local_cluster_file())
        return _Cluster(load_cluster(target), target, is_kept=False)
    place = _chosen(survey, options.partition)
    write_atomically(target, cluster_file(survey, place))
    # read the file again, as the other commands will
    return _Cluster(load_cluster(target), target, is_kept=False, survey=survey, place=place)


def _write_sweep(script: Script, cluster: _Cluster) -> None:
    text = sweep_file(script, cluster.spec)
    write_atomically(script.target, text)
    # check the file as the other commands will, with examples for the keys that are still unknown
    sweep = load_sweep(script.target, filled_in(text))
    check_together(sweep, cluster.spec, script.target, cluster.file)


def _chosen(survey: Survey, name: str | None) -> Place:
    if name is None:
        best = survey.best()
        if best is None:
            reasons = "; ".join(f"{each.partition.name}: {each.refused}" for each in survey.places)
            raise InputError(f"no partition can be used: {reasons}", key="--partition")
        return best
    found = next((each for each in survey.places if each.partition.name == name), None)
    if found is None:
        names = ", ".join(each.partition.name for each in survey.places)
        raise InputError(f"no partition {name!r}; there are {names}", key="--partition")
    if found.nodes is None:
        raise InputError(f"{name}: {found.refused}", key="--partition")
    return found


def _as_json(cluster: _Cluster, script: Script | None) -> dict[str, object]:
    """Return the object that `--json` prints; the docstring of `__main__` describes it."""
    written = [cluster.file, *([script.target] if script else [])]
    return {
        "schema_version": 1,
        "cluster_file": str(cluster.file),
        "is_kept": cluster.is_kept,
        "partition": cluster.place and _partition(cluster.place),
        "others": list(map(_partition, cluster.others)),
        "sweep_file": str(script.target) if script else None,
        "unknown": {str(path): unknown_keys(path.read_text()) for path in written},
        "required": required_keys(script.target.read_text()) if script else [],
        "notes": list(_notes(cluster, script)),
        "next": list(_next(cluster, script)),
    }


def _partition(place: Place) -> dict[str, object]:
    nodes = place.nodes
    return {
        "name": place.partition.name,
        "nodes": nodes.count if nodes else 0,
        "cpus": nodes.cpus if nodes else 0,
        "gpus": place.gpus,
        "gpu_type": place.gpu_type,
        "max_minutes": place.most_minutes,
        "is_default": place.is_default,
        "refused": place.refused,
    }


def _notes(cluster: _Cluster, script: Script | None) -> Iterator[str]:
    if cluster.place is not None and cluster.place.refused:
        yield f"This partition may refuse your jobs: {cluster.place.refused}."
    if cluster.survey is not None and not cluster.survey.requeues:
        yield (
            "The site's jobs are not requeued by default (JobRequeue=0); those of a sweep ask for it."
        )
    if script is None:
        return
    if script.options.batch is None:
        yield (
            f"No option for the batch was found in {script.path.name}; if it has one, run it with "
            "that by tula attach; else it needs one, or a file of settings for each batch."
        )
    if not script.options.saves:
        yield f"{script.path.name} does not seem to save its model, which would be lost at its end."
    if not trains_together([str(script.path)]):
        yield (
            f"{script.path.name} does not seem to use DistributedDataParallel: several workers "
            "would train apart."
        )


def _next(cluster: _Cluster, script: Script | None) -> Iterator[str]:
    if script is not None:
        here = Path.cwd()
        path = script.path
        if path.is_relative_to(here):
            path = path.relative_to(here)
        run = [str(path)] if script.module is None else ["-m", script.module]
        yield command_line("attach", "--into", str(script.target), *run, *script.trial())
    # with the sweep file, the check knows that the script brings its own data and loader
    checked = () if script is None else ("--sweep", str(script.target))
    yield command_line("check", str(cluster.file), *checked)
    if script is None:
        copies = command_line("init", "--examples", "examples")
        yield f"{copies}  # sweep files to begin with, and what every key means"
    else:
        where = ("--cluster", str(cluster.file))
        yield command_line("sweep", str(script.target), *where, "--until", "plan")


def _words(cluster: _Cluster, script: Script | None) -> Iterator[str]:
    if cluster.place is not None:
        yield f"{cluster.file}: partition {_described(cluster.place)}."
    elif cluster.is_kept:
        yield f"{cluster.file}: exists already and is left as it is."
    else:
        cores = plural(cluster.spec.max_nodes, "core")
        yield f"{cluster.file}: this machine with its {cores}, since no Slurm is set up here."
    if script is not None:
        text = script.target.read_text()
        lacking = listed([*required_keys(text), *required_arguments(text)])
        needs = f" It still needs {lacking}; tula attach fills in what it sees." if lacking else ""
        yield f"{script.target}: a sweep of {script.path.name}.{needs}"
    yield from _notes(cluster, script)
    if cluster.others:
        yield "Other partitions (--partition NAME):"
        for each in cluster.others:
            why = f": {each.refused}" if each.refused else ""
            yield f"  {_described(each)}{why}"
    label = "Next"
    for line in _next(cluster, script):
        yield f"{label}: {line}"
        label = "Then"


def _described(place: Place) -> str:
    nodes = place.nodes
    if nodes is None:
        return place.partition.name
    parts = [plural(nodes.count, "node"), f"{nodes.cpus} CPUs"]
    if place.gpus:
        parts.append(plural(place.gpus, f"{place.gpu_type} GPU".lstrip()))
    if place.most_minutes is None:
        parts.append("no time limit")
    else:
        parts.append(f"at most {place.most_minutes} min")
    if place.is_default:
        parts.append("the default")
    return f"{place.partition.name} ({', '.join(parts)})"
