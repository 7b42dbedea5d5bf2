"""Commands of the package, with modules and help, and the steps from a script to a report.

`tula --help` shows both; `tula completion` reads the commands' options. No command is imported
here: `tula_hpc/__main__.py` imports a command when it is called.
"""

from __future__ import annotations

from typing import NamedTuple

from tula_hpc.python_path import PROGRAM


class Command(NamedTuple):
    """A command: its help, and a module whose `main` takes the arguments after its name."""

    module: str
    help: str


COMMANDS = {
    "init": Command(
        "tula_hpc.init.__main__", "write a cluster file, and a sweep file for a script"
    ),
    "check": Command("tula_hpc.check.__main__", "check a cluster before anything is trained there"),
    "attach": Command(
        "tula_hpc.attach.__main__",
        "run a training script here for some steps, and say what was seen",
    ),
    "footprint": Command(
        "tula_hpc.workloads.footprint", "estimate a worker's memory before anything runs"
    ),
    "sweep": Command(
        "tula_hpc.sweep", "profile a training, plan, train at the best configuration, and report"
    ),
    "study": Command("tula_hpc.study", "compare methods of training at several batches and seeds"),
    "status": Command(
        "tula_hpc.status.__main__", "show a run's jobs, failures, costs and next steps"
    ),
    "plan": Command(
        "tula_hpc.analysis.plan", "plan again from a run's measurements; submits nothing"
    ),
    "report": Command(
        "tula_hpc.analysis.report.__main__", "write the report of a run or study again"
    ),
    "completion": Command(
        "tula_hpc.cli.completion", "print the completion of commands for bash or zsh"
    ),
}
# from a script to a report: what to type, in order, and what it does
WAY = (
    ("init --script train.py", "write cluster.toml and train.toml, with some values unknown"),
    ("attach --into train.toml train.py --epochs 100", "run it here for some steps, fill these in"),
    ("check cluster.toml --sweep train.toml", "is the cluster as its file says? takes 3 minutes"),
    ("sweep train.toml --cluster cluster.toml --until plan", "measure, and choose"),
    ("status runs/train", "what runs and waits, and what it cost so far"),
    ("plan runs/train --objective cost", "plan again from the same measurements"),
    ("sweep train.toml --cluster cluster.toml", "train what was planned, and report"),
    ("report runs/train", "write the report again: runs/train/report/report.html"),
)


def overview() -> str:
    """Return the text of `tula --help`: steps from a script to a report, and all commands."""
    question = "How many nodes, which batch size, how long, and at what cost?"
    way = "\n".join(f"  {PROGRAM} {line}\n      {purpose}" for line, purpose in WAY)
    lines = "\n".join(f"  {name:<12}{command.help}" for name, command in COMMANDS.items())
    return f"{question}\n\nfrom a script to a report:\n{way}\n\ncommands:\n{lines}"
