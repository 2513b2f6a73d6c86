# Two commands on a fresh machine do everything: `make demo` and `make test`. Each makes the virtual environment it
# needs (Python 3.11 or newer and g++ must be there; tools/venv.sh says what else is missing and mends it if it may).

VENV ?= .venv
PY := $(VENV)/bin/python
SOURCES := pyproject.toml CMakeLists.txt $(wildcard daemon/native/*)
TORCH ?= torch==2.13.0
OPERATIONS ?= 1000000
SEEDS ?= 0:100000
ENGINE_SEEDS ?= 1000:3000
KILLS ?= 300
INPUTS ?= 1000000
SATURATED ?= 600
JAX ?= jax==0.10.2

.PHONY: help demo test soak fuzz check test-native test-frameworks test-rdma test-docker test-systemd test-packaging test-monitoring
.PHONY: bench bench-floods bench-metrics bench-quick bench-rdma bench-security docs format wheel clean

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

$(VENV)/.installed: $(SOURCES) tools/venv.sh
	tools/venv.sh $(VENV)
	@echo "installing the package and its tools into $(VENV): a minute or two"
	$(PY) -m pip install -q -e '.[dev]'
	touch $@

demo: $(VENV)/.installed ## train a small network over three agents, and check the result
	$(VENV)/bin/allreduced demo

test: $(VENV)/.installed ## run the tests
	$(PY) -m pytest --ignore tests/frameworks --ignore tests/rdma --ignore tests/docker --ignore tests/systemd --ignore tests/packaging --ignore tests/monitoring

test-docker: $(VENV)/.installed ## images and nodes as containers, for which it starts a Docker daemon where none runs (as root)
	$(PY) -m pytest tests/docker

soak: $(VENV)/.installed ## long runs: OPERATIONS operations, tensors over 4 GiB, KILLS faults, SEEDS simulated clusters
	SOAK=1 OPERATIONS=$(OPERATIONS) KILLS=$(KILLS) SATURATED=$(SATURATED) $(PY) -m pytest -s tests/soak
	SIMULATION_SEEDS=$(ENGINE_SEEDS) $(PY) -m pytest tests/simulation
	$(PY) -m tests.simulation.sweep $(SEEDS)

fuzz: $(VENV)/.installed ## INPUTS inputs to the readers of both protocols (installs atheris where it can)
	$(PY) -c 'import atheris' 2>/dev/null || $(PY) -m pip install -q atheris || true
	$(PY) -m tests.fuzz --inputs $(INPUTS)
	$(PY) -m tests.fuzz.worst

check: $(VENV)/.installed ## ruff, mypy --strict, import-linter
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

test-native: $(VENV)/.installed ## kernels under the address and undefined-behaviour sanitizers
	$(VENV)/bin/python -c 'import cmake' 2>/dev/null || $(PY) -m pip install -q cmake ninja
	$(VENV)/bin/cmake -G Ninja -S daemon/native/tests -B build/native-tests -DCMAKE_MAKE_PROGRAM=$(abspath $(VENV)/bin/ninja)
	$(VENV)/bin/cmake --build build/native-tests
	$(VENV)/bin/ctest --test-dir build/native-tests --output-on-failure

test-frameworks: $(VENV)/.installed ## torchrun, tensors of PyTorch and JAX (installs both)
	$(PY) -c 'import torch' 2>/dev/null || $(PY) -m pip install -q '$(TORCH)'
	$(PY) -c 'import jax' 2>/dev/null || $(PY) -m pip install -q '$(JAX)'
	$(PY) -m pytest tests/frameworks

RDMA_SECONDS ?= 900
RDMA_GUEST := $(PY) -m tests.rdma.guest run --seconds

test-rdma: $(VENV)/.installed ## links and agents on real verbs, in a guest with soft-RoCE (skipped where there is no QEMU)
	$(RDMA_GUEST) $(RDMA_SECONDS) --env ALLREDUCED_TEST_RDMA_ADDRESS=10.77.0.1 -- \
		$(abspath $(PY)) -m pytest --timeout 300 tests/rdma tests/contract -k 'rdma and not uvloop'

test-systemd: $(VENV)/.installed ## the units of configs/systemd under a real systemd, in namespaces (as root)
	$(PY) -m pytest tests/systemd

test-packaging: $(VENV)/.installed ## build sdist and wheels, install them into clean environments, run a job there
	$(PY) -c 'import build, cibuildwheel' 2>/dev/null || $(PY) -m pip install -q build cibuildwheel
	$(PY) -m pytest tests/packaging

test-monitoring: $(VENV)/.installed ## alerts, board and metrics with Prometheus' own tools (fetches Debian's where there are none)
	$(PY) -m pytest tests/monitoring

LIMITS := $(addprefix build/limits/,memory exchange server)

build/limits/%: benchmarks/limits/%.c benchmarks/limits/common.h
	@mkdir -p $(@D)
	$(CC) -O3 -march=native -Wall -Wextra -o $@ $< -pthread

# Without what the emulated processor of the guest does not have.
build/limits/rdma_ring: benchmarks/limits/rdma_ring.c benchmarks/limits/common.h
	@mkdir -p $(@D)
	$(CC) -O3 -march=x86-64-v2 -Wall -Wextra -o $@ $< -pthread -libverbs

build/limits/tls_exchange: benchmarks/limits/tls_exchange.c benchmarks/limits/common.h
	@mkdir -p $(@D)
	$(CC) -O3 -march=native -Wall -Wextra -o $@ $< -lssl -lcrypto

.PHONY: bench-ready
bench-ready: $(VENV)/.installed $(LIMITS)
	$(PY) -c 'import torch' 2>/dev/null || $(PY) -m pip install -q '$(TORCH)'

bench: bench-ready ## speed beside Gloo and physical limits, under 15 minutes (installs PyTorch)
	$(PY) -m benchmarks.compare

bench-quick: bench-ready ## the same with fewer calls, within 2 minutes
	$(PY) -m benchmarks.compare --quick

bench-security: $(VENV)/.installed build/limits/exchange build/limits/tls_exchange ## what mutual TLS costs (needs libssl-dev)
	$(PY) -m benchmarks.security

bench-floods: $(VENV)/.installed ## what 1,000 silent and 1,000 garbage connections at each door cost a job
	$(PY) -m benchmarks.floods

bench-metrics: $(VENV)/.installed ## what metrics cost at 1 MiB
	$(PY) -m benchmarks.metrics_cost

bench-rdma: $(VENV)/.installed ## speed of RDMA beside ib_write_bw and a bare ring, and many kills, in the guest: 15 minutes
	$(PY) -m tests.rdma.guest --require prepare
	$(MAKE) build/limits/rdma_ring
	$(RDMA_GUEST) 1800 -- $(abspath $(PY)) -m benchmarks.rdma

docs: $(VENV)/.installed ## write from the code what of docs/ is made from it, and the man pages
	$(PY) tools/man_pages.py
	$(PY) tools/configuration_reference.py
	$(PY) tools/failure_tables.py
	$(PY) tools/metrics_reference.py

format: $(VENV)/.installed ## format the Python code
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

wheel: $(VENV)/.installed ## build the sdist, the wheel, and the one without the native part into dist/
	$(PY) -c 'import build' 2>/dev/null || $(PY) -m pip install -q build
	$(PY) -m build
	ALLREDUCED_PURE=1 $(PY) -m build --wheel

clean: ## remove what was built, and the virtual environment
	rm -rf $(VENV) build dist
