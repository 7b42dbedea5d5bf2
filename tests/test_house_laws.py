"""Check rules of CONTRIBUTING.md: sizes of packages and modules, names, line density, and imports on a login node.

Layers, import cycles and the imports of torch and matplotlib are contracts of import-linter in pyproject.toml.
"""

from __future__ import annotations

import ast
import functools
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.run_factory import make_run

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "tula_hpc"
SOURCES = sorted(PACKAGE.glob("*.py")) + sorted(
    path for folder in PACKAGE.iterdir() if folder.is_dir() for path in folder.rglob("*.py")
)
MODULES = [path for path in SOURCES if path.name not in ("__init__.py", "__main__.py")]
MOST_MODULES = {"tula_hpc": 15}
# config, records and figures name a module after its owner, a command after its stage; the list may only shrink
SHARED_NAMES = {
    "drift", "evaluation", "job", "memory", "plan", "probes", "study", "sweep", "text", "training",
    "workload",
}  # fmt: skip
# small modules allowed: public names, entry points of jobs, or no better place in the package; may only shrink
SMALL = {
    "analysis/memory.py", "analysis/performance.py", "analysis/study.py",
    "profiling/job.py", "training/job.py",
}  # fmt: skip
# modules allowed to be larger than the limit; may only shrink
LARGE = {"optim/optimizer.py", "records/events.py"}
DIRECTIVE = re.compile(r"#\s*(noqa|type:|pragma|fmt:)")


def place(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


@functools.cache
def nodes_of(source: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source)))


@pytest.mark.processes
def test_import_linter_finds_the_floors_as_they_should_be() -> None:
    lint = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as lint; lint()"]
    done = subprocess.run(lint, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout


def test_a_package_has_at_most_ten_modules() -> None:
    sizes = Counter(path.parent for path in MODULES)
    assert {place(folder): n for folder, n in sizes.items() if n > MOST_MODULES.get(folder.name, 10)} == {}


def test_no_module_has_the_name_of_another() -> None:
    names = Counter(path.stem for path in MODULES)
    assert {name for name, times in names.items() if times > 1} == SHARED_NAMES


def test_modules_are_neither_too_small_nor_too_large() -> None:
    lines = {place(path): len(path.read_text().splitlines()) for path in MODULES}
    assert {name for name, n in lines.items() if n < 60} == SMALL
    assert {name for name, n in lines.items() if n > 500} == LARGE


def has_comment_behind_code(line: str) -> bool:
    """Return whether a `#` follows code in the line; it may be part of a string."""
    return "#" in line and not line.strip().startswith("#")


def several_things(text: str) -> Iterator[str]:
    """Yield nested conditional expressions and comments behind code, with their line numbers."""
    for node in nodes_of(text):
        if isinstance(node, ast.IfExp) and sum(isinstance(child, ast.IfExp) for child in ast.walk(node)) > 1:
            yield f"line {node.lineno}: a conditional expression within another"
    # tokenizing every file takes seconds
    behind = filter(has_comment_behind_code, text.splitlines())
    if all(DIRECTIVE.match(line[line.index("#") :]) for line in behind):
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and has_comment_behind_code(token.line) and not DIRECTIVE.match(token.string):
            yield f"line {token.start[0]}: a comment behind code"


@pytest.mark.processes
def test_a_line_says_one_thing() -> None:
    found = {place(path): list(several_things(path.read_text())) for path in SOURCES}
    assert {name: lines for name, lines in found.items() if lines} == {}
    assert len(list(several_things("x = 1 if a else (2 if b else 3)\ny = '#'  # behind\n# above\n"))) == 2


def places_that_look_into_events(source: str) -> Iterator[int]:
    """Yield the lines that read the name of an event or its data."""
    for node in nodes_of(source):
        if not isinstance(node, ast.Attribute):
            continue
        name = node.value.id if isinstance(node.value, ast.Name) else ""
        if node.attr == "event" or (node.attr == "data" and name in ("event", "e", "last")):
            yield node.lineno


@pytest.mark.parametrize("text", ["x.event == 'ended'", "event.data['label']", "job.event.stage"])
def test_the_check_finds_what_it_forbids(text: str) -> None:
    assert list(places_that_look_into_events(text)) == [1]


@pytest.mark.processes
def test_only_records_look_into_events() -> None:
    """Other packages ask `RunHistory` what a run's events mean."""
    others = [path for path in SOURCES if path.parent.name != "records"]
    found = {place(path): list(places_that_look_into_events(path.read_text())) for path in others}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_only_env_reads_the_schedulers_variables() -> None:
    # launch only writes OMP_NUM_THREADS for the jobs; python_path runs before env can be imported
    others = [path for path in SOURCES if place(path).split("/")[0] not in ("env.py", "launch", "python_path.py")]
    readers = {path for path in others if "os.environ" in path.read_text()}
    assert {place(path) for path in readers if "XDG_CACHE_HOME" not in path.read_text()} == set()


# One process runs all commands and their jobs, those with the fewest imports first: a module once loaded stays.
COMMANDS = """
import contextlib, io, os, sys
numerics, drawing, jobs = {"numpy", "scipy", "kneed"}, {"matplotlib", "matplotlib.pyplot"}, {"submitit", "torch"}
run = sys.argv[1]

def main(command, *arguments):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        return command.main([*arguments])

def check(what, *modules):
    found = set().union(*modules) & sys.modules.keys()
    assert not found, (what, found)

from tula_hpc import __main__ as tula; from tula_hpc import sweep
main(tula, "--help"); main(sweep, "--help")
check("help", numerics, jobs, drawing, {"rich", "jinja2", "markupsafe", "pydantic"})
assert main(tula, "completion", "bash") == 0
from tula_hpc.analysis import plan
main(plan, "--help")
check("completion and help of a plan", numerics, jobs, drawing, {"rich", "jinja2"})
assert main(plan, run, "--objective", "time", "--json") == 0
check("plan", jobs, drawing, {"kneed"})
assert "numpy" in sys.modules
from tula_hpc.analysis.report import __main__ as report
check("import of report", jobs, drawing)
from tula_hpc.analysis.figures import all as figures
figures.FIGURES = {"memory": figures.FIGURES["memory"]}
assert main(report, run) == 0
check("report", jobs, drawing - {"matplotlib"}, {"torchvision"})
assert main(plan, run, "--objective", "knee", "--json") == 0
check("knee", jobs)
from tula_hpc.status import __main__ as status
path, os.environ["PATH"] = os.environ["PATH"], ""  # no Slurm: nothing is known
assert main(status, run) == 4
os.environ["PATH"] = path
import importlib, pkgutil, tula_hpc
rooms = "analysis check cli config launch records stages status".split()
for room in rooms:
    package = importlib.import_module(f"tula_hpc.{room}")
    for module in pkgutil.walk_packages(package.__path__, f"tula_hpc.{room}."):
        if module.name not in ("tula_hpc.check.probes", "tula_hpc.check.speed"):
            importlib.import_module(module.name)
from tula_hpc import study
# a signal that comes while torch is imported must already be handled
from tula_hpc.launch.job_specs import Requeueable, resolve
kinds = Requeueable.__subclasses__()
assert len(kinds) == 4 and all(callable(resolve(job.run)) for job in kinds)
check("everything", {"torch", "torchvision"})
from tula_hpc.profiling import profile_loop; from tula_hpc.training import loop
from tula_hpc.config import WorkloadSpec; from tula_hpc.data.datasets import build_data
build_data(WorkloadSpec(dataset="digits"))
check("a worker", {"torchvision", "sklearn", "timm", "torch.distributed.optim"})
"""


@pytest.mark.processes
def test_commands_and_workers_load_what_they_need_and_never_torch_on_the_login_node(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", epochs_done=5)
    command = [sys.executable, "-c", COMMANDS, str(run.root)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_module_that_a_text_names_is_there() -> None:
    # a module of Python's own, and a user's
    strangers = {"json.py", "analysis.py"}
    tests = [path.relative_to(ROOT) for path in (ROOT / "tests").rglob("*.py")]
    there = {f"/{path}" for path in (*map(place, SOURCES), *tests)}
    for text in (*SOURCES, ROOT / "CONTRIBUTING.md", ROOT / "README.md"):
        named = set(re.findall(r"`([\w/]+\.py)`", text.read_text())) - strangers
        named = {name.removeprefix("tula_hpc/") for name in named}
        assert {name for name in named if not any(path.endswith(f"/{name}") for path in there)} == set(), text


def test_every_name_that_the_map_gives_is_defined_there() -> None:
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("| to see |")[2].partition("\n\n")[0]
    named = re.findall(r"`([\w/]+\.py)`(?::|, and) `(\w+)`", table)
    assert len(named) >= 5
    for path, name in named:
        assert re.search(rf"^ *(def|class) {name}\b", (PACKAGE / path).read_text(), re.MULTILINE), (path, name)


@pytest.mark.processes
def test_analysis_is_refused_under_its_bare_name() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import analysis"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode != 0
    assert "ImportError: import this package as tula_hpc.analysis" in done.stderr


def test_the_link_is_in_place() -> None:
    assert (PACKAGE / "analysis").is_symlink()
    assert (PACKAGE / "analysis").readlink() == Path("../analysis")
