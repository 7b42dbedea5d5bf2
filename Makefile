# make demo      profile, plan, train and report on this machine, with real data and real DDP (about a minute)
# make unit      run after every change the quick tests, which start no processes (about a minute on two cores)
# make test      run every test that this machine can run, except for variations of other tests
# make thorough  before a release, run these variations, and the tests that need the machine to themselves (minutes)
# make gpu       on a GPU: its tests, checks of process groups, streams and memory, whole sweeps, the cost of the
#                optimizer and of checkpoints, the memory estimate's error; results in tests/benchmarks/results (25 minutes)
# make slurm     install Slurm from Debian's packages for the real-Slurm tests (root)
# make browser   install chromium from Debian's packages for the tests of the report's page (root)
# make picture   renew the README's picture, the first page of the demo's report (chromium; on an idle machine)
# make lint      run ruff and mypy
# make .venv     only set up .venv

PYTHON ?= python3
BIN := .venv/bin

# let Python keep compiled modules, so that processes do not compile them again at every start
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo unit test thorough gpu slurm browser picture lint .venv clean

.venv: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "tula_hpc needs python3 >= 3.11"; exit 1; }
	@echo "setting up .venv: torch and its libraries, about 5 GB, two to five minutes ..."
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile \
		--only-binary :all: --require-hashes --requirement constraints.txt
	@$(BIN)/python -m compileall -qq -j 0 .venv/lib || true # on all cores, unlike pip; templates are no Python
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@
	@echo ".venv is ready"

demo: .venv/.ready
	@$(BIN)/python -m tula_hpc.sweep sweeps/quickstart.toml

# one pytest worker per core, six at most: none of these tests waits for a process
unit: .venv/.ready
	@cores=$$(nproc); $(BIN)/python -m pytest -q --numprocesses $$((cores < 6 ? cores : 6)) \
		--dist loadscope -m "not thorough and not processes" \
		--ignore tests/attach --ignore tests/local --ignore tests/slurm

# Tests with jobs on the test cluster, with jobs on this machine and with a user's scripts run one after another within
# each of these groups. The tests that start no jobs run at the same time, on what is left of the processors.
test: .venv/.ready
	@cores=$$(nproc); $(BIN)/python -m pytest --numprocesses $$((cores < 4 ? cores + 1 : 6)) \
		--dist loadscope --no-loadscope-reorder -m "not thorough"

# the tests that compare measured times come last and run alone
thorough: .venv/.ready
	@$(BIN)/python -m pytest -m "thorough and not alone" --numprocesses 2 --dist loadscope
	@$(BIN)/python -m pytest -m alone tests/slurm

# all parts run even if one fails; the exit code is 0 only if all passed
RESULTS := tests/benchmarks/results
gpu: .venv/.ready
	@failed=; part() { echo "== $$1"; shift; "$$@" || failed=1; }; \
	part "tests that need a GPU" \
		env TULA_REQUIRE_GPU=1 $(BIN)/python -m pytest -m gpu --ignore tests/local --ignore tests/slurm; \
	part "process groups, streams, synchronizations, memory that runs out" \
		$(BIN)/python -m tests.benchmarks.gpu_checks --out $(RESULTS)/gpu_checks.json; \
	part "whole sweeps, of the loop and of scripts" \
		$(BIN)/python -m tests.benchmarks.gpu_sweeps build/gpu_sweeps --out $(RESULTS)/gpu_sweeps.json; \
	part "the cost of scaling gradients in a step" \
		$(BIN)/python -m tests.benchmarks.optimizer_overhead --device cuda --seconds 20 --out $(RESULTS)/optimizer_overhead_cuda.json; \
	part "the error of the memory estimate" \
		$(BIN)/python -m tests.benchmarks.memory_estimate --device cuda --out $(RESULTS)/memory_estimate_cuda.json; \
	part "the cost of checkpoints" \
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
