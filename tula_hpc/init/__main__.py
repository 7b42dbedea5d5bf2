"""Command `tula init`: write the files of a first sweep.

Slurm is asked for its partitions, nodes and limits, and for this user's accounts and QOS; nothing
is submitted. With `--script` the options of a training script are read from its source. Where
Slurm is not set up on the machine, `--script` writes a cluster file for the machine itself.

`--json` prints one object. Its keys (None where there is none):

    schema_version
    cluster_file    path
    is_kept         true if the cluster file was there already and was left as it is
    partition       name, nodes, cpus, gpus, gpu_type, max_minutes (None: no limit), is_default, refused
    others          the other partitions, likewise
    sweep_file      path; None without --script
    unknown         keys to fill in, by file
    required        the unknown keys of the sweep file without which nothing starts
    notes           sentences on possible problems
    next            command lines, in order
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from tula_hpc.command_errors import CommandParser, command
from tula_hpc.errors import InputError, StorageError
from tula_hpc.files import full_disk, write_out
from tula_hpc.formatting import command_line

# links to the folders sweeps/ and slurm_templates/; an installed package has copies of them
EXAMPLES = Path(__file__).parent.parent / "examples"


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="tula init",
        description="Write a cluster file for the cluster of this login node, for the partition that "
        "suits a training best, or for --partition; with --script also a sweep file for a "
        "training script. Nothing is submitted, and the script is not run.",
        epilog="exit codes: 0 written; 1 Slurm does not answer; 2 bad input, or the file exists.",
    )
    parser.add_argument(
        "file",
        type=Path,
        nargs="?",
        metavar="CLUSTER.toml",
        help="the file to write (default: cluster.toml)",
    )
    parser.add_argument(
        "--script",
        type=Path,
        metavar="SCRIPT.py",
        help="also write a sweep file for this script, next to the cluster file; a cluster file "
        "that exists is kept, and without Slurm the new one is for this machine",
    )
    parser.add_argument("--partition", metavar="NAME", help="write the file for this partition")
    parser.add_argument(
        "--force",
        action="store_true",
        help="replace an existing file: the sweep file with --script, else the cluster file",
    )
    parser.add_argument(
        "--examples",
        type=Path,
        metavar="FOLDER",
        help="write only the example files, with the explanation of every key, into a new folder",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _run(options: argparse.Namespace) -> int:
    if options.examples is not None:
        others = (options.file, options.json, options.force, options.partition, options.script)
        if any(each not in (None, False) for each in others):
            message = "cannot be combined with other arguments; leave them out"
            raise InputError(message, source="--examples")
        return _write_examples(options.examples)
    from tula_hpc.init.first_files import write_files

    return write_files(options)


def _write_examples(folder: Path) -> int:
    if folder.exists():
        raise InputError("exists already; name a new folder", source=folder)
    ignored = shutil.ignore_patterns("__pycache__", "study_*")
    try:
        shutil.copytree(EXAMPLES, folder, symlinks=False, ignore=ignored)
    except shutil.Error as error:
        # it lists every file; what is there would have the same command refused
        words = full_disk(folder) or f"{folder}: cannot be written: {error.args[0][0][2]}"
        shutil.rmtree(folder, ignore_errors=True)
        raise StorageError(words) from None
    first = command_line("sweep", str(folder / "sweeps" / "quickstart.toml"))
    write_out(f"{folder}: sweep files, cluster files, and what every key means\nNext: {first}\n")
    return 0


main = command(_parser, _run)

if __name__ == "__main__":
    sys.exit(main())
