"""The house rules of CONTRIBUTING.md: a room imports only the rooms above it, and torch stays on the nodes."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

from tests.run_factory import make_run

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "tula_hpc"

# room: what it may import of tula_hpc. Folders may also import within themselves.
RULES: dict[str, set[str]] = {
    "__init__": {"search_path"},
    "__main__": {"cli"},
    "search_path": set(),
    "invocation": {"search_path"},
    "cli": {"search_path"},
    "errors": set(),
    "catalog": set(),
    "clock": set(),
    "env": {"clock"},
    "tres": set(),
    "power": set(),
    "files": set(),
    "nested": set(),
    "config": {"catalog", "config", "errors", "files", "tres"},
    "records": {"clock", "errors", "files", "invocation", "records"},
    "analysis": {"analysis", "config", "errors", "files", "invocation", "printable", "records", "tres"},
    "workloads": {
        "catalog", "config", "env", "errors", "files", "memory_errors", "nested", "printable", "records", "resident",
        "workloads",
    },
    "optim": {"errors", "nested", "optim"},
    "payload": set(),
    "checkpoint": {"errors", "files", "payload"},
    "schedule": {"config"},
    "timing": set(),
    "loader_waits": set(),
    "resident": set(),
    "memory_errors": {"errors"},
    "printable": set(),
    "slurm_command": {"env", "errors"},
    "slurm": {"env", "errors", "slurm_command"},
    "job_ends": {"errors", "slurm"},
    "job_logs": {"env", "job_ends"},
    "devices": {"errors", "records"},
    "device_errors": {"env", "errors", "job_ends", "records", "slurm"},
    "local_alive": set(),
    "local_jobs": {"job_pickle", "local_alive"},
    "job_setup": {"config", "records", "search_path"},
    "job_pickle": {"errors", "files", "job_setup", "records"},
    "job_start": {"env", "errors", "job_pickle", "slurm"},
    "submitit_controller": {"env"},
    "stopping": {"errors", "job_ends", "timing"},
    "drift": {"records"},
    "drift_start": {"analysis", "drift", "env", "errors", "jobs", "records", "worker"},
    "drift_probe": {"memory_errors", "nested", "profiler", "records", "timing", "worker"},
    "drift_guard": {
        "drift", "drift_probe", "drift_start", "jobs", "loader_waits", "optim", "records", "stopping", "worker",
    },
    "noise_probe": {"memory_errors", "nested", "optim", "worker", "workloads"},
    "forward_probe": {"memory_errors", "nested", "timing", "worker"},
    "methods": {"config", "optim", "records", "workloads"},
    "rendezvous": {"env", "errors", "files"},
    "worker": {
        "config", "env", "errors", "methods", "nested", "optim", "records", "rendezvous", "resident", "workloads",
    },
    "local_states": {"checkpoint", "errors", "worker"},
    "cadence": {"analysis", "config"},
    "snapshot": set(),
    "saving": {"cadence", "checkpoint", "errors", "files", "snapshot", "stopping"},
    "leaving": {"env"},
    "jobs": {
        "agenda", "config", "detach", "device_errors", "env", "job_pickle", "leaving", "records", "session", "stopping",
        "trainer",
    },
    "proposing": {"analysis", "config", "errors", "jobs", "records", "search_path"},
    "agenda": {"clock", "env", "errors", "jobs", "proposing", "records"},
    "allocation": {"config", "env", "rendezvous", "worker"},
    "session": {"agenda", "allocation", "env", "errors", "files", "jobs", "memory_errors", "profiler", "records"},
    "profiler": {
        "clock", "config", "env", "errors", "forward_probe", "loader_waits", "methods", "nested", "noise_probe",
        "power", "records", "resident", "stopping", "timing", "worker", "workloads",
    },
    "trainings": {"clock", "config", "devices", "errors", "jobs", "launch", "progress", "records", "slurm", "stages"},
    "trainer": {
        "cadence", "checkpoint", "clock", "drift_guard", "drift_start", "env", "errors", "files",
        "jobs", "local_states", "memory_errors", "nested", "optim", "profiler", "records", "saving", "schedule",
        "slurm", "stopping", "worker", "workloads",
    },
    "launch": {
        "clock", "config", "devices", "env", "errors", "files", "job_ends", "job_logs", "job_setup", "local_alive",
        "local_jobs", "printable", "records", "sbatch", "slurm", "waiting",
    },
    "sbatch": {"env", "errors", "job_pickle", "records", "slurm", "slurm_command"},
    "progress": {"printable"},
    "footprint": {"records", "search_path"},
    "stages": {
        "analysis", "clock", "config", "devices", "drift", "errors", "invocation", "job_ends", "jobs", "launch",
        "progress", "records",
    },
    "profile_stage": {
        "analysis", "clock", "config", "devices", "errors", "footprint", "jobs", "launch", "progress", "records",
        "stages",
    },
    "submission": {"errors", "launch", "sbatch", "slurm"},
    "dry_run": {
        "analysis", "changed_inputs", "clock", "config", "footprint", "launch", "profile_stage", "records", "stages",
        "submission",
    },
    "summary": {"analysis", "printable", "records"},
    "pipeline": {"analysis", "errors", "profile_stage", "records", "stages", "study_stage", "summary"},
    "detach": {"config", "env", "errors", "jobs", "launch", "pipeline", "records", "slurm", "stages"},
    "changed_inputs": {"analysis", "config", "errors", "files"},
    "command": {
        "analysis", "changed_inputs", "clock", "config", "detach", "env", "errors", "files", "invocation", "launch",
        "pipeline", "records", "stages",
    },
    "study_stage": {
        "analysis", "config", "errors", "jobs", "launch", "progress", "records", "stages", "submission", "trainings",
    },
    "waiting": {"slurm"},
    "accounting": {"slurm_command"},
    "holder": set(),
    "run_facts": {"clock", "config", "errors", "files", "holder", "job_ends", "job_logs", "launch", "records"},
    "job_status": {"errors", "records", "run_facts", "slurm", "waiting"},
    "training_status": {"drift", "job_status", "records", "run_facts"},
    "run_cost": {"accounting", "analysis", "config", "job_status", "records", "run_facts", "training_status"},
    "run_state": {
        "analysis", "config", "devices", "errors", "job_status", "records", "run_cost", "run_facts", "training_status",
        "trainings",
    },
    "status_text": {
        "analysis", "devices", "job_status", "printable", "records", "run_cost", "run_state", "training_status",
    },
    "status": {
        "accounting", "command", "config", "errors", "files", "job_status", "local_alive", "printable", "records",
        "run_facts", "run_state", "slurm", "status_text", "study_stage",
    },
    "check_job": {"check_probes", "config", "env", "jobs", "leaving", "records", "stopping"},
    "check_probes": {
        "allocation", "check_job", "config", "env", "errors", "records", "rendezvous", "slurm", "stopping", "worker",
        "workloads",
    },
    "check_site": {"config", "errors", "launch", "records", "sbatch", "slurm", "slurm_command"},
    "check_verdicts": {"analysis", "check_site", "config", "invocation", "records"},
    "check_rank_verdicts": {"analysis", "check_job", "check_verdicts", "config", "records"},
    "check": {
        "check_job", "check_rank_verdicts", "check_site", "check_verdicts", "command", "config", "errors", "files",
        "job_logs", "launch", "printable", "records", "slurm", "waiting",
    },
    "study": {"command", "config", "errors", "invocation", "pipeline", "printable", "records", "study_stage"},
    "sweep": {"command", "config", "dry_run", "errors", "pipeline", "printable", "study"},
}  # fmt: skip
TORCH_ROOMS = {
    "nested",
    "workloads",
    "optim",
    "checkpoint",
    "payload",
    "device_errors",
    "memory_errors",
    "methods",
    "rendezvous",
    "worker",
    "local_states",
    "saving",
    "snapshot",
    "profiler",
    "trainer",
    "allocation",
    "check_probes",
    "session",
    "drift_guard",
    "drift_probe",
    "drift_start",
    "forward_probe",
    "loader_waits",
    "noise_probe",
}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@functools.cache
def imported_modules(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            if node.module == "tula_hpc":
                names.update(f"tula_hpc.{alias.name}" for alias in node.names)
            names.add(node.module)
    return names


SOURCES = sorted(
    [*PACKAGE.glob("*.py"), *(p for room in PACKAGE.iterdir() if room.is_dir() for p in room.rglob("*.py"))]
)


def test_a_room_imports_only_what_it_may() -> None:
    assert {room_of(path) for path in SOURCES} <= set(RULES), "a room is missing in RULES and in CONTRIBUTING.md"
    for path in SOURCES:
        rooms = {name.split(".")[1] for name in imported_modules(path) if name.startswith("tula_hpc.")}
        assert rooms <= RULES[room_of(path)], f"{path} imports {sorted(rooms - RULES[room_of(path)])}"


def importers(*modules: str) -> set[Path]:
    return {path for path in SOURCES if {name.split(".")[0] for name in imported_modules(path)} & set(modules)}


def test_only_the_rooms_of_the_nodes_import_torch() -> None:
    assert {room_of(path) for path in importers("torch", "torchvision")} <= TORCH_ROOMS


def test_only_figures_import_matplotlib() -> None:
    strangers = {p for p in importers("matplotlib") if room_of(p) != "analysis" or not p.name.startswith("figures")}
    assert strangers == set()


def test_only_env_reads_the_schedulers_variables() -> None:
    # launch writes OMP_NUM_THREADS for the jobs, it reads none; search_path comes before env could be imported
    others = [path for path in SOURCES if room_of(path) not in ("env", "launch", "search_path")]
    readers = {path for path in others if "os.environ" in path.read_text()}
    assert {path for path in readers if "XDG_CACHE_HOME" not in path.read_text()} == set()


# One process for all commands and what they submit, those that need least first: what is loaded stays.
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

from tula_hpc.analysis import plan
main(plan, "--help")
check("help", numerics, jobs, drawing, {"rich"})
from tula_hpc.status import __main__ as status
path, os.environ["PATH"] = os.environ["PATH"], ""  # no Slurm: nothing is known
assert main(status, run) == 3
os.environ["PATH"] = path
check("status", numerics - {"numpy"}, jobs, drawing)
assert main(plan, run, "--objective", "time", "--json") == 0
check("plan", jobs, drawing, {"kneed"})
assert "numpy" in sys.modules
from tula_hpc.analysis.report import page as report
check("import of report", jobs, drawing)
from tula_hpc.analysis.figures import all as figures
figures.FIGURES = {"memory": figures.FIGURES["memory"]}
assert main(report, run) == 0
check("report", jobs, drawing - {"matplotlib"}, {"torchvision"})
assert main(plan, run, "--objective", "knee", "--json") == 0
check("knee", jobs)
import importlib, pkgutil, tula_hpc
rooms = "analysis check cli config launch records stages status".split()
for room in rooms:
    package = importlib.import_module(f"tula_hpc.{room}")
    for module in pkgutil.walk_packages(package.__path__, f"tula_hpc.{room}."):
        if module.name != "tula_hpc.check.probes":
            importlib.import_module(module.name)
from tula_hpc import study, sweep
check("everything", {"torch", "torchvision"})
"""


def test_commands_load_what_they_need_and_never_torch_on_the_login_node(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", epochs_done=5)
    command = [sys.executable, "-c", COMMANDS, str(run.root)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_analysis_is_refused_under_its_bare_name() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import analysis"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode != 0
    assert "ImportError: import this package as tula_hpc.analysis" in done.stderr


def test_the_link_is_in_place() -> None:
    assert (PACKAGE / "analysis").is_symlink()
    assert (PACKAGE / "analysis").readlink() == Path("../analysis")
