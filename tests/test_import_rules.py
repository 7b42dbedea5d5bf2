"""The house rules of CONTRIBUTING.md: a room imports only the rooms above it, and torch stays on the nodes."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "tula_hpc"

# room: what it may import of tula_hpc. `analysis` and `optim` may also import within themselves.
RULES: dict[str, set[str]] = {
    "__init__": set(),
    "errors": set(),
    "catalog": set(),
    "env": set(),
    "tres": set(),
    "power": set(),
    "files": set(),
    "config": {"errors", "catalog", "files", "tres"},
    "records": {"errors", "config", "files"},
    "analysis": {"errors", "config", "files", "records", "analysis"},
    "workloads": {"errors", "catalog", "config", "records", "resident", "workloads"},
    "optim": {"errors", "optim"},
    "payload": set(),
    "checkpoint": {"errors", "files", "payload"},
    "schedule": {"config"},
    "timing": set(),
    "resident": set(),
    "memory_errors": {"errors"},
    "slurm": {"errors"},
    "stopping": {"timing"},
    "drift": {"records"},
    "drift_start": {"analysis", "drift", "env", "errors", "jobs", "records", "worker"},
    "drift_probe": {"memory_errors", "profiler", "records", "worker"},
    "drift_guard": {"drift", "drift_probe", "drift_start", "jobs", "optim", "records", "stopping", "worker"},
    "noise_probe": {"memory_errors", "optim", "worker", "workloads"},
    "curvature_probe": {"memory_errors", "optim", "records", "worker"},
    "methods": {"config", "optim", "records", "workloads"},
    "worker": {"config", "env", "methods", "records", "optim", "workloads"},
    "local_states": {"checkpoint", "errors", "worker"},
    "cadence": {"analysis", "config"},
    "snapshot": set(),
    "saving": {"cadence", "checkpoint", "errors", "snapshot", "stopping"},
    "jobs": {"agenda", "config", "detach", "env", "records", "session", "trainer", "stopping"},
    "proposing": {"analysis", "config", "errors", "jobs", "records"},
    "agenda": {"env", "errors", "jobs", "proposing", "records"},
    "allocation": {"config", "env", "worker"},
    "session": {"agenda", "allocation", "env", "jobs", "memory_errors", "profiler", "records"},
    "profiler": {
        "config", "env", "errors", "noise_probe", "power", "records", "resident", "timing", "worker", "workloads",
    },
    "trainings": {"config", "errors", "jobs", "launch", "progress", "records", "slurm", "stages"},
    "tuner": set(),
    "tuning": {"checkpoint", "records", "tuner", "worker"},
    "trainer": {
        "cadence", "checkpoint", "curvature_probe", "drift_guard", "drift_start", "env", "errors", "jobs",
        "local_states", "memory_errors", "optim", "profiler", "records", "saving", "schedule", "slurm", "stopping",
        "tuning", "worker", "workloads",
    },
    "launch": {"errors", "config", "files", "records", "sbatch", "slurm"},
    "sbatch": {"env", "errors", "slurm"},
    "progress": set(),
    "footprint": {"records"},
    "stages": {"analysis", "config", "drift", "errors", "jobs", "launch", "progress", "records", "slurm"},
    "profile_stage": {
        "analysis", "config", "errors", "footprint", "jobs", "launch", "progress", "records", "stages",
    },
    "dry_run": {"analysis", "config", "launch", "profile_stage", "records", "stages"},
    "summary": {"analysis", "records"},
    "pipeline": {"analysis", "errors", "profile_stage", "records", "stages", "study_stage", "summary"},
    "detach": {"config", "env", "errors", "jobs", "launch", "pipeline", "records", "slurm", "stages"},
    "command": {"config", "detach", "errors", "files", "pipeline", "records", "stages"},
    "study_stage": {"config", "errors", "jobs", "launch", "progress", "records", "stages", "trainings"},
    "waiting": {"slurm"},
    "accounting": {"slurm"},
    "holder": set(),
    "run_facts": {"config", "errors", "files", "holder", "launch", "records"},
    "job_status": {"errors", "records", "run_facts", "slurm", "waiting"},
    "training_status": {"drift", "job_status", "records", "run_facts"},
    "run_cost": {"accounting", "analysis", "config", "job_status", "records", "run_facts", "training_status"},
    "run_state": {
        "analysis", "config", "errors", "job_status", "records", "run_cost", "run_facts", "training_status",
        "trainings",
    },
    "status_text": {"analysis", "job_status", "records", "run_cost", "run_state", "training_status"},
    "status": {
        "accounting", "command", "errors", "job_status", "records", "run_facts", "run_state", "slurm", "status_text",
        "study_stage",
    },
    "study": {"command", "config", "errors", "pipeline", "records", "study_stage"},
    "sweep": {"command", "config", "dry_run", "errors", "pipeline", "study"},
}  # fmt: skip
TORCH_ROOMS = {
    "workloads",
    "optim",
    "checkpoint",
    "payload",
    "memory_errors",
    "methods",
    "worker",
    "local_states",
    "saving",
    "snapshot",
    "profiler",
    "trainer",
    "allocation",
    "session",
    "drift_guard",
    "drift_probe",
    "drift_start",
    "curvature_probe",
    "noise_probe",
    "tuning",
}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


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


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_room_imports_only_what_it_may(path: Path) -> None:
    room = room_of(path)
    assert room in RULES, f"{path} is in no room: add it to RULES and to CONTRIBUTING.md"
    rooms = {name.split(".")[1] for name in imported_modules(path) if name.startswith("tula_hpc.")}
    assert rooms <= RULES[room], f"{path} imports {sorted(rooms - RULES[room])}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_the_rooms_of_the_nodes_import_torch(path: Path) -> None:
    heavy = {name.split(".")[0] for name in imported_modules(path)} & {"torch", "torchvision"}
    assert not heavy or room_of(path) in TORCH_ROOMS


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_figures_import_matplotlib(path: Path) -> None:
    heavy = {name.split(".")[0] for name in imported_modules(path)}
    assert "matplotlib" not in heavy or (room_of(path) == "analysis" and path.name.startswith("figures"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_env_reads_the_schedulers_variables(path: Path) -> None:
    if room_of(path) in ("env", "launch"):  # launch writes OMP_NUM_THREADS for the jobs, it reads none
        return
    text = path.read_text()
    assert "os.environ" not in text or "XDG_CACHE_HOME" in text, f"{path} reads the environment"


@pytest.mark.parametrize(
    "statement",
    [
        "import tula_hpc",
        "import tula_hpc.sweep, tula_hpc.stages, tula_hpc.dry_run",
        "import tula_hpc.analysis.plan, tula_hpc.analysis.report",
        "import tula_hpc.jobs, tula_hpc.launch",
        "import tula_hpc.study, tula_hpc.study_stage, tula_hpc.analysis.study, tula_hpc.analysis.figures_study",
        "import tula_hpc.status, tula_hpc.status_text, tula_hpc.run_state, tula_hpc.run_facts",
    ],
)
def test_torch_is_not_imported_on_the_login_node(statement: str) -> None:
    code = f"{statement}; import sys; print([m for m in ('torch', 'torchvision') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_analysis_is_refused_under_its_bare_name() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import analysis"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode != 0
    assert "tula_hpc.analysis" in done.stderr


def test_the_link_is_in_place() -> None:
    assert (PACKAGE / "analysis").is_symlink()
    assert (PACKAGE / "analysis").readlink() == Path("../analysis")
