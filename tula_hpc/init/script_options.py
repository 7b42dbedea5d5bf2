"""Choose the options of a training script that a sweep gives values to, by its source alone.

The script is neither run nor imported.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from tula_hpc.config import ClusterSpec
from tula_hpc.init.declared_options import Option, declared_in, makers_in, written
from tula_hpc.init.syntax import (
    compared_in,
    compared_with,
    computed_in,
    divided_by,
    given_in,
    imported_by,
    last_name,
    nodes_in,
    saved_in,
)
from tula_hpc.own_sources import find_module, own_sources, parsed


class ScriptOptions(NamedTuple):
    """The script's options that a sweep gives values to; None for an option that it lacks."""

    batch: Option | None = None
    epochs: Option | None = None
    steps: Option | None = None
    seed: Option | None = None
    nodes: Option | None = None
    # processes of a node; of Lightning's scripts only, which compare them with those that run
    devices: Option | None = None
    accumulation: Option | None = None
    resume: Option | None = None
    # all other options that the script requires
    required: tuple[Option, ...] = ()
    # names of files that the script saves to, with "*" for formatted parts, as far as the source
    # has them, or its own word for the newest one
    saved: tuple[str, ...] = ()
    # True if the script or its framework seems to save something
    saves: bool = False
    # True if the script keeps its state by `tula_hpc.attach`, which resumes it without any option
    is_kept: bool = False
    # subcommand that trains; "": there is none
    command: str = ""
    # True if the script imports from its own package, so that it is run as a module
    is_in_package: bool = False
    # True if `accumulation` is the passes of all workers, among which the script divides them
    shares_passes: bool = False
    # True if the script divides its batch among all workers
    shares_batch: bool = False

    def words(self, values: Iterable[tuple[Option | None, str]]) -> list[str]:
        """Return a command line that gives options these values; skip values without an option."""
        given = [(option, value) for option, value in values if option is not None]
        before = [option.words(value) for option, value in given if option.is_before]
        after = [option.words(value) for option, value in given if not option.is_before]
        command = [self.command] if self.command else []
        return list(itertools.chain(*before, command, *after))

    def devices_on(self, cluster: ClusterSpec) -> Option | None:
        """Return the option for the devices of a node, if the script has to be told their number.

        A number of GPUs is none for workers on CPUs, and partitions may differ.
        """
        numbers = {part.workers_per_node for part in cluster.parts()}
        of_gpus = self.devices is not None and "gpu" in self.devices.flag
        return None if len(numbers) > 1 or (of_gpus and cluster.device == "cpu") else self.devices

    @property
    def is_global(self) -> bool:
        """Tell whether the batch is that of all workers, by its use, its name or its help."""
        if self.batch is None:
            return False
        if self.shares_batch or any(map(_GLOBAL.search, self.batch.names)):
            return True
        if any(map(_OF_ONE_PASS.search, self.batch.names)):
            # its help may mention a global batch, to say how that follows from this batch
            return False
        help_text = self.batch.help.lower()
        is_part = _OF_A_NODE.search(help_text) or _OF_A_WORKER.search(help_text)
        return _GLOBAL.search(help_text) is not None and not is_part

    def for_all_workers(self, arguments: Sequence[str]) -> list[str]:
        """Return arguments with {global_batch} for {local_batch} where the batch is global."""
        if self.batch is None or not self.is_global:
            return list(arguments)
        replaced = []
        for flag, argument in zip(flags_of(arguments), arguments, strict=True):
            # the names of `train.batch_size` are those of its last part
            is_batch = written(flag).rpartition(".")[2] in self.batch.names
            new = argument.replace("{local_batch}", "{global_batch}")
            replaced.append(new if is_batch else argument)
        return replaced


# words in an option's name or help that mean the batch of all workers together
_GLOBAL = re.compile(
    r"(?:^|_|\b)(?:global|effective|total|ims_per)(?:_|\b)"
    r"|\b(?:of|over|across) all (?:gpus|workers|ranks|processes|devices|nodes)\b"
)
# words in a help text that mean a node's batch; with one worker for each GPU it is a worker's batch
_OF_A_NODE = re.compile(r"\b(?:a|the|the current|current|each|per|this) node\b")
_OF_A_WORKER = re.compile(r"\b(?:each|per) (?:gpu|worker|rank|process|device)\b")
# names of the number of workers, and those that never mean processes of a loader
_OF_WORKERS = re.compile(r"world_?size|num_(?:processes|workers|gpus)", re.IGNORECASE)
_OF_RANKS = re.compile(r"world_?size|num_(?:processes|gpus)", re.IGNORECASE)
_OF_BATCHES = "train|training|per|device|gpu|rank|worker|local|micro|mini|global|total|effective"
_ROLES = {
    "batch": rf"(?:(?:{_OF_BATCHES})_?)*(?:batch(?:_?size)?|bsz?)(?:_train)?(?:_per_?[a-z]+)?"
    r"|(?:sample|ima?ge?)s_per_gpu",
    "epochs": r"(?:(?:num|n|nb|number_of|max|train|training|total)_?)*epochs?",
    "steps": r"(?:(?:num|n|max|total|train|training)[_.]?)*(?:steps|iters?|iterations)",
    "seed": r"(?:(?:random|manual|global|torch|rng)_?)*seed",
    "nodes": r"(?:(?:num|n)_?)?nodes|nnodes",
    "devices": r"(?:(?:num|n)_?)?(?:gpus|devices)(?:_per_node)?",
    "accumulation": r"(?:(?:gradient|grad)_?)?accum(?:ulat(?:ion|e))?(?:_[a-z_]+)?"
    r"|(?:gradient|grad)_?acc(?:_steps)?",
    "resume": r"(?:auto_?)?resume(?:_training)?(?:_from)?(?:_checkpoint)?(?:_path)?"
    r"|load_checkpoint|restore(?:_from)?|continue_from",
}
# names of a batch for one forward pass; preferred to a batch that is cut into several passes
_OF_ONE_PASS = re.compile(r"per_|pergpu|micro|local|device")
# names of the number of environments, or of all their steps; and of those between two updates
_OF_ROLLOUTS = re.compile(r"total_?time_?steps|(?:num|n)_?envs")
_OF_A_ROLLOUT = re.compile(r"(?:num|n)_?steps")
_KEEPING = frozenset({"keep", "trainer_callback", "lightning_callback"})
# options of transformers.TrainingArguments, which is not in the script's own source
_HUGGING_FACE = (
    Option("--per_device_train_batch_size", ("per_device_train_batch_size",), 8),
    Option("--num_train_epochs", ("num_train_epochs",), 3),
    Option("--seed", ("seed",), 42),
    Option("--gradient_accumulation_steps", ("gradient_accumulation_steps",), 1),
    Option("--resume_from_checkpoint", ("resume_from_checkpoint",), "out/checkpoint-*"),
)
# names under which Lightning is imported
_LIGHTNING = frozenset({"lightning", "pytorch_lightning"})
# options of a LightningCLI, which makes them from the parameters of its classes
_LIGHTNING_CLI = (
    Option("--data.batch_size", ("batch_size",)),
    Option("--trainer.max_epochs", ("max_epochs",)),
    Option("--trainer.num_nodes", ("num_nodes",), 1),
    Option("--trainer.devices", ("devices",)),
    Option("--seed_everything", ("seed",), 0),
    Option("--ckpt_path", ("resume",), "last"),
)


def read_options(path: Path, *, takes_keys: bool = False) -> ScriptOptions:
    """Read the options of a script's command line from its source.

    `takes_keys`: the script is known to take keys of its configuration, as in `train.lr=0.1`.

    Raises:
        ValueError: The script cannot be read, or is not valid Python.
    """
    tree = parsed(path)
    declared = declared_in(tree, takes_keys=takes_keys) or _imported(path, makers_in(tree))
    # options whose value the script computes, as CleanRL's batch_size: int = 0
    computed = computed_in(tree)
    options = [each for each in declared if each.default != 0 or computed.isdisjoint(each.names)]
    names = set(map(last_name, ast.walk(tree)))
    names |= {name.rpartition(".")[2] for name in imported_by(tree)}
    if names & {"TrainingArguments", "Seq2SeqTrainingArguments"} and "HfArgumentParser" in names:
        options += _HUGGING_FACE
    if "LightningCLI" in names and False in given_in(tree, "run"):
        # it only parses: there are no subcommands, and fit is called without a checkpoint
        options += _LIGHTNING_CLI[:-1]
    elif "LightningCLI" in names:
        options += (each._replace(command="fit") for each in _LIGHTNING_CLI)
    command = _training_command(options)
    options = [option for option in options if option.command in ("", command)]
    roles = {role: _best(role, options) for role in _ROLES}
    if not any(name.partition(".")[0] in _LIGHTNING for name in imported_by(tree)):
        roles["devices"] = None
    roles["resume"] = roles["resume"] or _resumed_by_word(options, tree)
    chosen = [option for option in roles.values() if option is not None]
    resume = roles["resume"]
    # the word for its newest checkpoint, as `latest` in the scripts of diffusers
    words = compared_in(tree, resume.names) if resume is not None else set()
    words = words & {"resume"} or words
    return ScriptOptions(
        **roles,
        required=tuple(each for each in options if each.is_required and each not in chosen),
        saved=tuple(words if len(words) == 1 else dict.fromkeys(saved_in(tree))),
        saves="Trainer" in names
        or any(re.search("save|checkpoint", name.lower()) for name in names),
        is_kept=not names.isdisjoint(_KEEPING) and "tula_hpc.attach" in imported_by(tree),
        command=command,
        is_in_package=any(node.level > 0 for node in nodes_in(tree, ast.ImportFrom))
        or any(_is_around(path.absolute(), name) for name in imported_by(tree)),
        shares_passes=_is_divided(roles["accumulation"], _OF_WORKERS, tree),
        shares_batch=_is_divided(roles["batch"], _OF_RANKS, tree),
    )


def _resumed_by_word(options: Sequence[Option], tree: ast.Module) -> Option | None:
    """Return the option that has a script go on where it is "resume", as nanoGPT's `init_from`."""
    names = compared_with(tree, "resume")
    able = [each for each in options if not (each.is_required or each.flag.isidentifier())]
    return next((option for option in able if not names.isdisjoint(option.names)), None)


def _is_around(script: Path, module: str) -> bool:
    """Tell whether a module is in the package, or folder of modules, that a script is in."""
    top = module.partition(".")[0]
    found = find_module(module) if top in script.parent.parts else None
    return found is not None and script.is_relative_to(found[0] / top)


def _is_divided(option: Option | None, by: re.Pattern[str], tree: ast.Module) -> bool:
    return option is not None and not divided_by(by, tree).isdisjoint(option.names)


def _training_command(options: Sequence[Option]) -> str:
    """Return the subcommand with most of a training's options; "" if there are no subcommands."""
    commands = dict.fromkeys(option.command for option in options if option.command)
    own = {each: [option for option in options if option.command == each] for each in commands}
    return max(commands, key=lambda command: _roles_filled(own[command]), default="")


def _imported(path: Path, made_of: Collection[str]) -> list[Option]:
    """Return the options of a training that a module declares which the script imports."""
    found = []
    for source in own_sources([str(path.absolute())]).values():
        with contextlib.suppress(ValueError):
            found.append(declared_in(parsed(source), made_of))
    best = max(found, key=_roles_filled, default=[])
    return best if _roles_filled(best) else []


def _roles_filled(options: Sequence[Option]) -> int:
    return sum(_best(role, options) is not None for role in _ROLES)


def collects_rollouts(names: Iterable[str]) -> bool:
    """Tell whether options with these names are those of reinforcement learning.

    Its `--num-steps` are those of an environment between two updates of the policy.
    """
    return any(_OF_ROLLOUTS.fullmatch(written(name).strip("=")) for name in names)


def is_batch_of_all(name: str) -> bool:
    """Tell whether an option of this name sets the batch of all workers together."""
    return "batch" in name.lower() and _GLOBAL.search(written(name)) is not None


def _best(role: str, options: Sequence[Option]) -> Option | None:
    pattern = re.compile(_ROLES[role])
    fits = [each for each in options if any(map(pattern.fullmatch, each.names))]
    if role == "batch":
        fits.sort(key=lambda each: not any(map(_OF_ONE_PASS.search, each.names)))
    if role == "steps":
        if collects_rollouts(name for each in options for name in each.names):
            fits = [each for each in fits if not any(map(_OF_A_ROLLOUT.fullmatch, each.names))]
        # next to "num_steps", plain "iters" may be iterations within a step, as in RAFT
        fits.sort(key=lambda each: "_" not in "".join(each.names))
    if role == "nodes":
        # other defaults mean nodes of a graph
        fits = [each for each in fits if each.default == 1]
    if role != "resume":
        fits = [each for each in fits if each.takes_value]
    if role == "seed":
        # a script without a default seed may use slower algorithms once a seed is given
        fits = [each for each in fits if each.default is not None or each.is_required]
    return fits[0] if fits else None


def flags_of(arguments: Sequence[str]) -> list[str]:
    """Return the name that each value belongs to, as in `--name 5`, `--name=5` or `name=5`."""
    parted = (argument.rpartition("=") for argument in arguments)
    before = ["", *arguments]
    return [name if equals else before[i] for i, (name, equals, _) in enumerate(parted)]
