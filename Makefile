# make demo    profile, plan, train and report on this machine, with real data and real DDP (about a minute)
# make unit    the tests to run after every change, which start no processes (under two minutes on two cores)
# make test    every test that this machine can run, but for variations of others
# make thorough  those variations, and what needs the machine to itself, before a release (minutes)
# make gpu     the tests that need a GPU, checks of process groups, streams and memory on one, whole sweeps, and what an
#              optimizer and checkpoints cost and a memory estimate misses there, into tests/benchmarks/results (25 minutes)
# make slurm   install Slurm from Debian's packages for the real-Slurm tests (root)
# make browser install chromium from Debian's packages for the tests of the report's page (root)
# make picture the README's picture anew, the first page of the demo's report (chromium; on a machine that does nothing else)
# make lint    ruff and mypy
# make .venv   the set-up alone

PYTHON ?= python3
BIN := .venv/bin

# a module is compiled once, not at every start of a process
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo unit test thorough gpu slurm browser picture lint .venv clean

.venv: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "tula_hpc needs python3 >= 3.11"; exit 1; }
	@echo "setting up .venv: torch and its libraries, about 5 GB, two to five minutes ..."
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile \
		--only-binary :all: --require-hashes --requirement constraints.txt
	@$(BIN)/python -m compileall -qq -j 0 .venv/lib || true # on all cores, which pip does not; templates are no Python
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@
	@echo ".venv is ready"

demo: .venv/.ready
	@$(BIN)/python -m tula_hpc.sweep sweeps/quickstart.toml

# as many workers as cores: none of these tests waits for a process
unit: .venv/.ready
	@cores=$$(nproc); $(BIN)/python -m pytest -q --numprocesses $$((cores < 6 ? cores : 6)) \
		--dist loadscope -m "not thorough and not processes" \
		--ignore tests/attach --ignore tests/local --ignore tests/slurm

# jobs on the test cluster, jobs on this machine, scripts of a user's own, each one test after another, and beside them,
# with what they leave of the processors, all that starts no jobs
test: .venv/.ready
	@cores=$$(nproc); $(BIN)/python -m pytest --numprocesses $$((cores < 4 ? cores + 1 : 6)) \
		--dist loadscope --no-loadscope-reorder -m "not thorough"

# at last what measures
thorough: .venv/.ready
	@$(BIN)/python -m pytest -m "thorough and not alone" --numprocesses 2 --dist loadscope
	@$(BIN)/python -m pytest -m alone tests/slurm

# each part runs whatever became of those before it; the exit code says whether all were well
RESULTS := tests/benchmarks/results
gpu: .venv/.ready
	@failed=; part() { echo "== $$1"; shift; "$$@" || failed=1; }; \
	part "tests that need a GPU" \
		env TULA_REQUIRE_GPU=1 $(BIN)/python -m pytest -m gpu --ignore tests/local --ignore tests/slurm; \
	part "process groups, streams, synchronizations, memory that runs out" \
		$(BIN)/python -m tests.benchmarks.gpu_checks --out $(RESULTS)/gpu_checks.json; \
	part "whole sweeps, of the loop and of scripts" \
		$(BIN)/python -m tests.benchmarks.gpu_sweeps build/gpu_sweeps --out $(RESULTS)/gpu_sweeps.json; \
	part "what scaling gradients adds to a step" \
		$(BIN)/python -m tests.benchmarks.optimizer_overhead --device cuda --seconds 20 --out $(RESULTS)/optimizer_overhead_cuda.json; \
	part "what the memory estimate misses by" \
		$(BIN)/python -m tests.benchmarks.memory_estimate --device cuda --out $(RESULTS)/memory_estimate_cuda.json; \
	part "what checkpoints cost" \
		$(BIN)/python -m tests.benchmarks.checkpoint_cost build --device cuda --out $(RESULTS)/checkpoint_cost_cuda.json; \
	test -z "$$failed"

slurm:
	@$(PYTHON) tests/slurm/testcluster.py install

browser:
	@command -v chromium >/dev/null || { apt-get -o DPkg::Lock::Timeout=120 -qq update && \
		DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=120 -qq --no-install-recommends install \
		chromium fonts-dejavu-core >/dev/null; }

picture: demo
	@chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --window-size=900,1120 \
		--screenshot=analysis/report_example.png file://$(CURDIR)/runs/quickstart/report/report.html

lint: .venv/.ready
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

clean:
	rm -rf .venv build dist *.egg-info
