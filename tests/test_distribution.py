"""sdist and wheel: built without a network, installed into an empty environment, and used there as the README says."""

from __future__ import annotations

import ast
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parent.parent
BUILD = "from setuptools import build_meta as b; import sys; print(getattr(b, sys.argv[1])(sys.argv[2]))"


def run(*words: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(word) for word in words], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel built from the unpacked sdist, which therefore contains all that it needs."""
    folder = tmp_path_factory.mktemp("dist")
    listed = run("git", "ls-files", "-co", "--exclude-standard", cwd=ROOT).splitlines()
    with tarfile.open(folder / "tree.tar", "w") as tree:
        for name in listed:
            if not name.startswith("tests/") and (ROOT / name).exists():
                tree.add(ROOT / name, name)
    with tarfile.open(folder / "tree.tar") as tree:
        tree.extractall(folder / "tree", filter="tar")
    sdist = run(sys.executable, "-c", BUILD, "build_sdist", folder, cwd=folder / "tree").splitlines()[-1]
    with tarfile.open(folder / sdist) as archive:
        archive.extractall(folder, filter="data")
    source = folder / sdist.removesuffix(".tar.gz")
    return folder / run(sys.executable, "-c", BUILD, "build_wheel", folder, cwd=source).splitlines()[-1]


@pytest.fixture(scope="module")
def environment(wheel: Path) -> Path:
    """The folder of commands of an environment with the wheel; its dependencies are this environment's."""
    folder = wheel.parent / "environment"
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index")
    run(*pip, "--disable-pip-version-check", wheel, cwd=folder)
    # links to packages that are installed for editing are not followed from there
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    others = [path for path in sys.path if path.endswith("site-packages")]
    (Path(site) / "others.pth").write_text("".join(f"{path}\n" for path in others))
    return folder / "bin"


def test_the_wheel_has_every_module_and_template_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    listed = run("git", "ls-files", "-co", "--exclude-standard", "tula_hpc", "analysis", cwd=ROOT).splitlines()
    sources = {name.removeprefix("tula_hpc/") for name in listed if name.endswith((".py", ".html", "py.typed"))}
    inside = {name.removeprefix("tula_hpc/") for name in names if name.startswith("tula_hpc/")}
    assert {name for name in inside if not name.startswith("examples/")} == sources
    examples = {name for name in inside if name.startswith("examples/")}
    for folder in ("sweeps", "slurm_templates"):
        wanted = {f"examples/{folder}/{path.name}" for path in (ROOT / folder).iterdir() if path.is_file()}
        assert wanted <= examples
    assert {name.partition("/")[0] for name in names} <= {"tula_hpc", "tula_hpc-0.1.0.dist-info"}


def test_what_is_installed_does_what_the_readme_says(environment: Path, tmp_path: Path) -> None:
    tula = environment / "tula"
    run(tula, "init", "--examples", "examples", cwd=tmp_path)
    cluster = ("--cluster", "examples/slurm_templates/v100.toml", "--set", "search.estimate=false")
    assert "#SBATCH" in run(
        tula, "sweep", "examples/sweeps/resnet50_imagenet.toml", *cluster, "--dry-run", cwd=tmp_path
    )
    where = "import tula_hpc.analysis.report.page as page; print(page.__file__)"
    assert str(environment.parent) in run(environment / "python", "-c", where, cwd=tmp_path)


def test_an_older_python_is_told_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "tula_hpc/__init__.py").read_text()
    # Python 2 cannot be tested here; it fails at non-ASCII text and at f-strings
    assert text.isascii()
    assert not any(isinstance(node, ast.JoinedStr) for node in ast.walk(ast.parse(text)))
    code = compile(ast.parse(text, feature_version=(3, 4)), "tula_hpc/__init__.py", "exec", dont_inherit=True)
    monkeypatch.setattr(sys, "version_info", (3, 9, 18))
    with pytest.raises(SystemExit, match=r"^tula_hpc needs Python 3\.11 or newer; this is "):
        exec(code, {})  # noqa: S102
