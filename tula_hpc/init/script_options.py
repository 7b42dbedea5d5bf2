"""Read the options of a training script from its source; the script is neither run nor imported.

It finds options of argparse and click, and absl's flags; parameters of functions and fields of
dataclasses from which typer, Fire, tyro or Hugging Face's `HfArgumentParser` make a command line;
keys that a script with Hydra or OmegaConf reads; and variables that a script lets nanoGPT's
configurator set.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tula_hpc.init.syntax import (
    compared_in,
    compared_with,
    computed_in,
    constants_of,
    divided_by,
    given_in,
    holder_of,
    imported_by,
    keys_of,
    keywords_of,
    last_name,
    nodes_in,
    saved_in,
    value_of,
)
from tula_hpc.own_sources import parsed


class Option(NamedTuple):
    """An option of a command line."""

    # The flag as it is typed, with a final "=" if the value is in the same word. A plain name is a
    # positional argument: only its value is typed.
    flag: str
    # all names of the option, as the script's code writes them
    names: tuple[str, ...]
    # the default, if the source has it as a literal; else None
    default: Any = None
    takes_value: bool = True
    is_required: bool = False
    help: str = ""
    # subcommand that the option belongs to; "": none
    command: str = ""
    # True if the program has subcommands and takes the option before them
    is_before: bool = False

    def words(self, value: str) -> list[str]:
        """Return the words of a command line that give the option this value."""
        if not self.takes_value:
            return [self.flag]
        if re.fullmatch(r"\w+", self.flag):
            # a positional argument
            return [value]
        return [self.flag + value] if self.flag.endswith("=") else [self.flag, value]


class ScriptOptions(NamedTuple):
    """The script's options that a sweep gives values to; None for an option that it lacks."""

    batch: Option | None = None
    epochs: Option | None = None
    steps: Option | None = None
    seed: Option | None = None
    nodes: Option | None = None
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
    # True if the script imports from its own package, which works only if it is run as a module
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
            is_batch = _written(flag).rpartition(".")[2] in self.batch.names
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
    "batch": rf"(?:(?:{_OF_BATCHES})_?)*batch(?:_?size)?(?:_per_[a-z]+)?|bs",
    "epochs": r"(?:(?:num|n|nb|number_of|max|train|training|total)_?)*epochs?",
    "steps": r"(?:(?:num|n|max|total|train|training)[_.]?)*(?:steps|iters?|iterations)",
    "seed": r"(?:(?:random|manual|global|torch|rng)_?)*seed",
    "nodes": r"(?:(?:num|n)_?)?nodes|nnodes",
    "accumulation": r"(?:(?:gradient|grad)_?)?accum(?:ulat(?:ion|e))?(?:_[a-z_]+)?",
    "resume": r"(?:auto_?)?resume(?:_training)?(?:_from)?(?:_checkpoint)?(?:_path)?"
    r"|load_checkpoint|restore(?:_from)?|continue_from",
}
# names of a batch for one forward pass; preferred to a batch that is cut into several passes
_OF_ONE_PASS = re.compile(r"per_|micro|local")
# names of the number of environments, or of all their steps; and of those between two updates
_OF_ROLLOUTS = re.compile(r"total_?time_?steps|(?:num|n)_?envs")
_OF_A_ROLLOUT = re.compile(r"(?:num|n)_?steps")
_MAKERS = frozenset({"run", "Fire", "cli", "HfArgumentParser", "ArgumentParser"})
_KEEPING = frozenset({"keep", "trainer_callback", "lightning_callback"})
_CONFIGS = frozenset({"cfg", "config", "conf"})
# options of transformers.TrainingArguments, which is not in the script's own source
_HUGGING_FACE = (
    Option("--per_device_train_batch_size", ("per_device_train_batch_size",), 8),
    Option("--num_train_epochs", ("num_train_epochs",), 3),
    Option("--seed", ("seed",), 42),
    Option("--gradient_accumulation_steps", ("gradient_accumulation_steps",), 1),
    Option("--resume_from_checkpoint", ("resume_from_checkpoint",), "out/checkpoint-*"),
)
# options of a LightningCLI, which makes them from the parameters of its classes
_LIGHTNING_CLI = (
    Option("--data.batch_size", ("batch_size",)),
    Option("--trainer.max_epochs", ("max_epochs",)),
    Option("--trainer.num_nodes", ("num_nodes",), 1),
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
    declared = [*_declared(tree), *_made(tree), *_of_configurator(tree)]
    if takes_keys or _takes_keys(tree):
        declared += _of_config(tree)
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
        is_in_package=any(node.level > 0 for node in nodes_in(tree, ast.ImportFrom)),
        shares_passes=_is_divided(roles["accumulation"], _OF_WORKERS, tree),
        shares_batch=_is_divided(roles["batch"], _OF_RANKS, tree),
    )


def _resumed_by_word(options: Sequence[Option], tree: ast.Module) -> Option | None:
    """Return the option that has a script go on where it is "resume", as nanoGPT's `init_from`."""
    names = compared_with(tree, "resume")
    able = [each for each in options if not (each.is_required or each.flag.isidentifier())]
    return next((option for option in able if not names.isdisjoint(option.names)), None)


def _is_divided(option: Option | None, by: re.Pattern[str], tree: ast.Module) -> bool:
    return option is not None and not divided_by(by, tree).isdisjoint(option.names)


def _training_command(options: Sequence[Option]) -> str:
    """Return the subcommand with most of a training's options; "" if there are no subcommands."""

    def known(command: str) -> int:
        own = [option for option in options if option.command == command]
        return sum(_best(role, own) is not None for role in _ROLES)

    commands = dict.fromkeys(option.command for option in options if option.command)
    return max(commands, key=known, default="")


def collects_rollouts(names: Iterable[str]) -> bool:
    """Tell whether options with these names are those of reinforcement learning.

    Its `--num-steps` are those of an environment between two updates of the policy.
    """
    return any(_OF_ROLLOUTS.fullmatch(_written(name).strip("=")) for name in names)


def is_batch_of_all(name: str) -> bool:
    """Tell whether an option of this name sets the batch of all workers together."""
    return "batch" in name.lower() and _GLOBAL.search(_written(name)) is not None


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
    if role in ("batch", "epochs", "steps", "seed", "nodes", "accumulation"):
        fits = [each for each in fits if each.takes_value]
    if role == "seed":
        # a script without a default seed may use slower algorithms once a seed is given
        fits = [each for each in fits if each.default is not None or each.is_required]
    return fits[0] if fits else None


def _declared(tree: ast.Module) -> Iterator[Option]:
    """Yield the options that a call declares: those of argparse, click and absl."""
    constants = constants_of(tree)
    parsers = _Parsers(tree)
    of_click = _commands_of_click(tree)
    for call in nodes_in(tree, ast.Call):
        name = last_name(call.func)
        values = [arg.value for arg in call.args if isinstance(arg, ast.Constant)]
        texts = [value for value in values if isinstance(value, str)]
        given = keywords_of(call)
        if name.startswith("DEFINE_") and texts:
            default = value_of(call.args[1], constants) if len(call.args) > 1 else None
            takes_value = name not in ("DEFINE_bool", "DEFINE_boolean")
            yield Option(f"--{texts[0]}", (_written(texts[0]),), default, takes_value)
        elif name in ("add_argument", "option", "argument") and texts:
            option = _of_call(texts, given, constants)
            command = of_click.get(call, parsers.command_of(call))
            yield option._replace(command=command or "", is_before=command is None)


class _Parsers:
    """Variables that hold argparse's parsers, and the subcommand of each parser."""

    def __init__(self, tree: ast.Module) -> None:
        self.programs: set[str] = set()
        for call in nodes_in(tree, ast.Call):
            if last_name(call.func) == "add_subparsers":
                self.programs.add(holder_of(call.func))
        self.programs.discard("")
        # line, variable and subcommand: a variable may hold one parser after another
        self.made: list[tuple[int, str, str | None]] = []
        for node in sorted(nodes_in(tree, ast.Assign), key=lambda each: each.lineno):
            if isinstance(node.value, ast.Call):
                for each in node.targets:
                    if isinstance(each, ast.Name):
                        self.made.append((node.lineno, each.id, self._made_by(node.value, each.id)))

    def _made_by(self, call: ast.Call, variable: str) -> str | None:
        kind = last_name(call.func)
        if kind == "add_parser" and call.args:
            return str(value_of(call.args[0], {}) or "")
        if kind in ("add_argument_group", "add_mutually_exclusive_group"):
            return self.command_of(call)
        return None if variable in self.programs else ""

    def command_of(self, call: ast.Call) -> str | None:
        """Return the subcommand of the parser whose method is called; "" if none is known.

        None stands for the main parser of a program with subcommands.
        """
        variable = holder_of(call.func)
        last = None if variable in self.programs else ""
        for line, name, command in self.made:
            if name == variable and line <= call.lineno:
                last = command
        return last


def _commands_of_click(tree: ast.Module) -> dict[ast.Call, str | None]:
    """Return the subcommand of each option's decorator; None: it stands before any subcommand."""
    functions = nodes_in(tree, ast.FunctionDef)
    groups = {each.name for each in functions if "group" in map(last_name, each.decorator_list)}
    commands: dict[ast.Call, str | None] = {}
    for each in functions:
        calls = [node for node in each.decorator_list if isinstance(node, ast.Call)]
        if each.name in groups:
            commands |= dict.fromkeys(calls)
        for call in calls:
            if last_name(call.func) == "command" and holder_of(call.func) in groups:
                commands |= dict.fromkeys(calls, _command_name(each, call))
    return commands


def _command_name(function: ast.FunctionDef, decorator: ast.expr) -> str:
    """Return the name of a command of click or typer."""
    given = decorator.args if isinstance(decorator, ast.Call) else []
    named = value_of(given[0], {}) if given else None
    return named if isinstance(named, str) else function.name.replace("_", "-")


def _of_call(texts: list[str], given: dict[str, ast.expr], constants: dict[str, Any]) -> Option:
    flags = [text.partition("/")[0] for text in texts if text.startswith("-")]
    action = value_of(given.get("action"), constants)
    is_switch = isinstance(action, str) and action.startswith(
        ("store_true", "store_false", "count")
    )
    is_switch |= last_name(given.get("action")) == "BooleanOptionalAction"
    is_switch |= value_of(given.get("is_flag"), constants) is True
    # an option of argparse that may be given without a value, or click's `--on/--off`
    is_switch |= "const" in given or "/" in "".join(texts)
    dest = value_of(given.get("dest"), constants)
    typed = [*(text.partition("/")[0] for text in texts), *filter(None, [dest])]
    names = [_written(text) for text in typed if isinstance(text, str)]
    # a positional argument is required, unless a default, nargs or required=False says otherwise
    optional = "default" in given or value_of(given.get("nargs"), constants) in ("?", "*", 0, -1)
    required = value_of(given.get("required"), constants)
    help_text = value_of(given.get("help"), constants)
    return Option(
        flag=max(flags, key=len, default=texts[0]),
        names=tuple(names),
        default=value_of(given.get("default"), constants),
        takes_value=not is_switch,
        is_required=bool(required) or (not flags and not optional and required is not False),
        help=help_text if isinstance(help_text, str) else "",
    )


def _made(tree: ast.Module) -> Iterator[Option]:
    """Yield the parameters and fields from which a call or a decorator makes options."""
    # absl's `app.run` gives its function the arguments that are left, and makes no options of it
    is_absl = any(name.startswith("absl") for name in imported_by(tree))
    making = _MAKERS - {"run"} if is_absl else _MAKERS
    makers: set[str] = set()
    for call in nodes_in(tree, ast.Call):
        if last_name(call.func) in making:
            for argument in call.args:
                makers |= {each.id for each in nodes_in(argument, ast.Name)}
    constants = constants_of(tree)
    # without click's commands, whose options `_declared` finds
    commands: dict[str, str | None] = {**dict.fromkeys(makers, ""), **_commands_of_typer(tree)}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name in commands:
            command = commands[node.name]
            for option in _parameters(node.args, constants):
                # typer makes a parameter without a default a positional argument
                by_place = option.is_required and node.name not in makers
                flag = option.names[0] if by_place else option.flag
                yield option._replace(flag=flag, command=command or "", is_before=command is None)
        elif isinstance(node, ast.ClassDef) and node.name in makers:
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    yield _of_name(field.target.id, field.value, constants)


def _commands_of_typer(tree: ast.Module) -> dict[str, str | None]:
    """Return typer's subcommands by the names of their functions.

    None stands for the function whose options come before any subcommand, "" for the function of a
    program without subcommands.
    """
    commands: dict[str, str | None] = {}
    if "typer" not in imported_by(tree):
        return commands
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    for each in functions:
        for decorator in each.decorator_list:
            if last_name(decorator) == "command":
                commands[each.name] = _command_name(each, decorator)
            elif last_name(decorator) == "callback":
                commands[each.name] = None
    # a single command is the program itself
    return commands if len(commands) > 1 else dict.fromkeys(commands, "")


def _parameters(given: ast.arguments, constants: dict[str, Any]) -> Iterator[Option]:
    named = [*given.posonlyargs, *given.args]
    first = len(named) - len(given.defaults)
    for place, parameter in enumerate(named):
        default = given.defaults[place - first] if place >= first else None
        yield _of_name(parameter.arg, default, constants)
    for parameter, value in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        yield _of_name(parameter.arg, value, constants)


def _of_name(name: str, value: ast.expr | None, constants: dict[str, Any]) -> Option:
    """Return the option of a parameter or field, whose default may be wrapped in a call."""
    flag = f"--{name.replace('_', '-')}"
    is_required = value is None
    if isinstance(value, ast.Call):
        texts = [value_of(argument, constants) for argument in value.args]
        flags = [text for text in texts if isinstance(text, str) and text.startswith("--")]
        flag = flags[0].partition("/")[0] if flags else flag
        keywords = keywords_of(value)
        value = keywords.get("default", value.args[0] if value.args else None)
        is_required = isinstance(value, ast.Constant) and value.value is ...
    default = value_of(value, constants)
    return Option(flag, (_written(name),), default, not isinstance(default, bool), is_required)


def _takes_keys(tree: ast.Module) -> bool:
    """Tell whether a script takes keys of its configuration, by Hydra or by OmegaConf itself."""
    imported = imported_by(tree)
    functions = nodes_in(tree, ast.FunctionDef)
    decorators = itertools.chain.from_iterable(each.decorator_list for each in functions)
    if "hydra" in imported and "main" in map(last_name, decorators):
        return True
    return "omegaconf" in imported and any(last_name(node) == "from_cli" for node in ast.walk(tree))


def _of_config(tree: ast.Module) -> Iterator[Option]:
    """Yield the keys that a script reads from its configuration."""
    for node in ast.walk(tree):
        keys = keys_of(node)
        if len(keys) > 1 and keys[0] in _CONFIGS:
            yield Option(f"{'.'.join(keys[1:])}=", (_written(keys[-1]),))


def _of_configurator(tree: ast.Module) -> Iterator[Option]:
    """Yield the variables that nanoGPT's configurator, executed below them, takes as options."""
    calls = [node for node in tree.body if isinstance(node, ast.Expr)]
    lines = [node.lineno for node in calls if last_name(node.value) == "exec"]
    for node in tree.body:
        if isinstance(node, ast.Assign) and node.lineno < min(lines, default=0):
            for name in filter(None, map(last_name, node.targets)):
                yield Option(f"--{name}=", (_written(name),), value_of(node.value, {}))


def flags_of(arguments: Sequence[str]) -> list[str]:
    """Return the name that each value belongs to, as in `--name 5`, `--name=5` or `name=5`."""
    parted = (argument.rpartition("=") for argument in arguments)
    before = ["", *arguments]
    return [name if equals else before[i] for i, (name, equals, _) in enumerate(parted)]


def _written(flag: str) -> str:
    """Return the name of a flag's value in the script's code."""
    return flag.lstrip("-").replace("-", "_").lower()
