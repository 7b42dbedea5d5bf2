"""Command `tula init`: write a cluster file for the cluster that this login node belongs to.

Slurm is asked for its partitions, nodes and limits, and for this user's accounts and QOS; nothing
is submitted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tula_hpc.command_errors import exit_code_of
from tula_hpc.formatting import plural, printable, printable_output
from tula_hpc.invocation import command_line

if TYPE_CHECKING:
    from tula_hpc.init.survey import Place, Survey


@printable_output()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    return exit_code_of(_run, _parser().parse_args(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tula init",
        description="Write a cluster file for the cluster of this login node, for the partition that "
        "suits a training best, or the one that is named. Nothing is submitted.",
        epilog="exit codes: 0 written; 1 Slurm does not answer; 2 bad input, or the file is there.",
    )
    parser.add_argument(
        "file",
        type=Path,
        nargs="?",
        default=Path("cluster.toml"),
        metavar="CLUSTER.toml",
        help="the file to write (default: cluster.toml)",
    )
    parser.add_argument("--partition", metavar="NAME", help="write it for this partition")
    parser.add_argument("--force", action="store_true", help="replace the file if it is there")
    return parser


def _run(options: argparse.Namespace) -> int:
    from tula_hpc.config import load_cluster
    from tula_hpc.errors import InputError
    from tula_hpc.files import write_out
    from tula_hpc.init.cluster_file import cluster_file
    from tula_hpc.init.survey import survey_cluster
    from tula_hpc.records import write_atomically

    target: Path = options.file
    if target.exists() and not options.force:
        raise InputError("is there already; name another file, or add --force", source=target)
    if not target.parent.is_dir():
        raise InputError("its folder does not exist; make it first", source=target)
    survey = survey_cluster()
    place = _chosen(survey, options.partition)
    write_atomically(target, cluster_file(survey, place))
    # what was written is what the other commands will read
    load_cluster(target)
    write_out("".join(f"{printable(line)}\n" for line in _words(survey, place, target)))
    return 0


def _chosen(survey: Survey, name: str | None) -> Place:
    from tula_hpc.errors import InputError

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


def _words(survey: Survey, place: Place, target: Path) -> list[str]:
    lines = [f"{target}: partition {_described(place)}."]
    if place.refused:
        lines.append(f"It may refuse your jobs: {place.refused}.")
    others = [each for each in survey.places if each is not place]
    if others:
        lines.append("Other partitions (--partition NAME):")
        lines += [f"  {_described(each)}{_reason(each)}" for each in others]
    if not survey.requeues:
        lines.append(
            "The site's jobs are not requeued by default (JobRequeue=0); those of a sweep ask for it."
        )
    lines.append(f"Next: {command_line('check', str(target))}")
    return lines


def _described(place: Place) -> str:
    nodes = place.nodes
    if nodes is None:
        return place.partition.name
    parts = [plural(nodes.count, "node"), f"{nodes.cpus} CPUs"]
    if place.gpus:
        kind = f" {place.gpu_type}" if place.gpu_type else ""
        parts.append(f"{place.gpus}{kind} {'GPU' if place.gpus == 1 else 'GPUs'}")
    limit = place.most_minutes
    parts.append("no time limit" if limit is None else f"at most {limit} min")
    default = ", the default" if place.is_default else ""
    return f"{place.partition.name} ({', '.join(parts)}{default})"


def _reason(place: Place) -> str:
    return f": {place.refused}" if place.refused else ""


if __name__ == "__main__":
    sys.exit(main())
