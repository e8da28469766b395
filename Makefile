# topoproxy: all tasks of a clone. `make` alone lists them.
#
# Needs python3 (3.11 or newer) and make; the first target that needs more installs it into .venv.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

BIN := .venv/bin
STAMP := .venv/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
RUNTIME ?=
VECTORS ?= $(wildcard ../shared/vectors) tests/conformance/vectors
PYTEST_ARGS ?=
UNMEASURED = e2e bench fuzz vm simulation engine/test_every_interleaving.py engine/test_device_interleaving.py \
  engine/test_reservation_search.py relay/test_splits.py
SCENARIOS ?=
KUBELET ?= $(TOPOPROXY_KUBELET)
PACKAGE ?= $(or $(ROOM),allocation)
N ?= 60
MUTATE_ARGS ?=
RUNTIMES ?= build/runtimes
BENCH_ARGS ?=
BASE ?=
CRASH_ARGS ?=
FUZZ_ARGS ?=
RELOAD_ARGS ?=
SEED ?=
CHURN_ARGS ?=
EVENTS ?=
WORKERS ?=
PLANT ?=
HOSTILE_ARGS ?=
HOOKS_ARGS ?=
DEVICES_ARGS ?=
CRIO ?=
KOORDINATOR ?=
KUBERNETES ?=
OUTAGE ?=
ARCH ?=
KINDS ?=
BENCH_KIT ?= ../shared/bench

.PHONY: help venv demo e2e-tools vm-tools etcd-tools test coverage test-vm test-runtimes test-crio test-koordinator test-cluster test-outage test-readers bench-cluster bench-fleet lint mutate fuzz bench bench-beside bench-go bench-floor upgrade-figures help-times count create-path crash churn reload-day simulate-faults hostile-day bench-hooks device-chaos drift conformance proto hook-points golden metrics configuration lock package wheel clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(STAMP) ## create .venv with the command topoproxy and all tools
	@:

# Missing programs are reported in one line. PYTHON=... chooses the interpreter.
# Debian has ensurepip in a separate package: it is installed if make runs as root; other users get a message.
# PIP_USE_PEP517: some versions of pip otherwise build the one source package of the lock in an old way, with a warning.
# The packages of requirements-build.lock build it; in an isolated build, pip would fetch the newest build tools, unchecked.
NEW_ENOUGH = -c 'import sys; sys.exit(sys.version_info < (3, 11))'
COMPLETE = -c 'import ensurepip, venv'
PYTHONS = $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python3.11 /usr/bin/python3)

$(STAMP): pyproject.toml requirements.lock requirements-build.lock
	@say() { echo "make venv: $$*" >&2; }; \
	py=; bare=; \
	if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	  for p in $(PYTHONS); do \
	    "$$p" $(NEW_ENOUGH) 2>/dev/null || continue; \
	    if "$$p" $(COMPLETE) 2>/dev/null; then py=$$p; break; else bare=$${bare:-$$p}; fi; \
	  done; \
	  if [ -z "$$py$$bare" ]; then \
	    say "cannot find Python 3.11 or newer among $(PYTHONS): install it, or name it with PYTHON=/path/to/python3"; \
	    exit 1; \
	  fi; \
	  if [ -z "$$py" ]; then \
	    pkg=$$("$$bare" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])'); \
	    if [ "$$(id -u)" = 0 ] && [ -e /etc/debian_version ] && command -v apt-get >/dev/null; then \
	      say "installing $$pkg"; \
	      get() { DEBIAN_FRONTEND=noninteractive apt-get -qq -y "$$@" </dev/null >/dev/null 2>&1; }; \
	      get install "$$pkg" || { get update && get install "$$pkg"; } || say "apt-get could not install $$pkg"; \
	    fi; \
	    if ! "$$bare" $(COMPLETE) 2>/dev/null; then \
	      say "cannot make .venv: $$bare has no ensurepip; install it (Debian, Ubuntu: apt-get install $$pkg)"; \
	      exit 1; \
	    fi; \
	    py=$$bare; \
	  fi; \
	  say "making .venv with $$("$$py" --version)"; \
	  rm -rf .venv; "$$py" -m venv .venv; \
	fi; \
	say "installing what requirements.lock names"
	@$(PIP) install --require-hashes --only-binary :all: -r requirements-build.lock
	@PIP_USE_PEP517=1 $(PIP) install --require-hashes --no-build-isolation -r requirements.lock
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

demo: venv ## show topoproxy at work in the terminal; RUNTIME=containerd: on this machine's containerd
	@$(BIN)/topoproxy demo $(if $(RUNTIME),--runtime $(RUNTIME))

# As root on Debian; elsewhere the tests that need these tools are skipped.
e2e-tools:
	@sh tests/e2e/install.sh

vm-tools:
	@sh tests/e2e/install.sh qemu-system-x86 debootstrap e2fsprogs busybox-static openssl

# In random order, so that no test relies on another one; the first lines name the seed, and SEED=n repeats the order.
# Without PYTEST_ARGS four processes share the tests (tests/testkit/run_all.py).
test: venv e2e-tools ## run all tests; as root on Debian also end to end on containerd: SEED=n repeats an order
	@$(BIN)/python -m $(if $(PYTEST_ARGS),pytest --shuffle=$(or $(SEED),random) $(PYTEST_ARGS),tests.testkit.run_all $(SEED))

# Counts what runs in pytest's own process: programs that the tests start are not measured. Measurements, random sessions
# and the search of interleavings are left out: they run the same lines for minutes.
coverage: venv ## run the tests of the packages and print the coverage of each package: PYTEST_ARGS="..."
	@mkdir -p build/coverage; failed=0; \
	$(BIN)/python -m coverage run -m pytest -q -p no:cacheprovider --timeout 600 $(addprefix --ignore=tests/,$(UNMEASURED)) \
	  $(PYTEST_ARGS) || failed=1; \
	$(BIN)/python -m coverage json -q -o build/coverage/report.json; \
	$(BIN)/python tests/testkit/coverage_table.py build/coverage/report.json; exit $$failed

# Without KVM, a scenario takes one to five minutes, all of them most of an hour: PYTEST_ARGS="-k pools".
test-vm: venv vm-tools ## run scenarios in virtual machines with NUMA nodes: as root on Debian; SCENARIOS=quick; KUBELET=program; CLUSTER=directory
	@TOPOPROXY_VM="$(or $(SCENARIOS),all)" TOPOPROXY_KUBELET="$(KUBELET)" TOPOPROXY_CLUSTER="$(or $(CLUSTER),$(TOPOPROXY_CLUSTER))" \
	  $(BIN)/python -m pytest tests/e2e/test_vm.py -v -s $(PYTEST_ARGS)

test-runtimes: venv e2e-tools ## run the end-to-end tests on newer releases of containerd and runc: RUNTIMES=directory
	@bins=$$(sh tests/e2e/runtimes.sh $(RUNTIMES)) || exit 1; failed=0; \
	for bin in $$bins; do \
	  echo "== $$($$bin/containerd --version), $$(PATH=$$bin:$$PATH runc --version | head -n 1)"; \
	  TOPOPROXY_CONTAINERD=$$bin $(BIN)/python -m pytest tests/e2e $(PYTEST_ARGS) || failed=1; \
	done; exit $$failed

# Go builds CRI-O once, in some minutes. CRIO=v1.34.0 names a release.
test-crio: venv ## run the end-to-end tests on CRI-O, which is built if necessary: needs go
	@sh tests/e2e/install.sh
	@sh tests/e2e/install.sh conmon gcc libc6-dev nftables
	@bin=$$(CRIO="$(CRIO)" sh tests/e2e/build_crio.sh | tail -n 1) || exit 1; \
	TOPOPROXY_CRIO=$$bin $(BIN)/python -m pytest tests/e2e $(PYTEST_ARGS)

# Go builds Koordinator once, in some minutes. KOORDINATOR=v1.8.0 names a release.
test-koordinator: venv e2e-tools ## test with Koordinator's own runtime proxy and hook server: as root, needs go
	@bin=$$(KOORDINATOR="$(KOORDINATOR)" sh tests/e2e/koordinator/build.sh | tail -n 1) || exit 1; \
	[ -n "$$bin" ] && TOPOPROXY_KOORDINATOR=$$bin $(BIN)/python -m pytest tests/e2e/koordinator $(PYTEST_ARGS)

# As root on Debian; elsewhere etcd has to be there.
etcd-tools:
	@sh tests/e2e/install.sh etcd-server

CLUSTER_PROGRAMS = kube-apiserver kube-scheduler kube-controller-manager kubelet
test-cluster: venv e2e-tools etcd-tools ## test in a real cluster: API server, scheduler, controllers, kubelet: needs go, etcd
	@bin=$$(KUBERNETES="$(KUBERNETES)" sh tests/cluster/build.sh $(CLUSTER_PROGRAMS) | tail -n 1) || exit 1; \
	[ -n "$$bin" ] && TOPOPROXY_CLUSTER=$$bin $(BIN)/python -m pytest tests/cluster tests/e2e/cluster $(PYTEST_ARGS)

# Go builds each reader once, in some minutes.
test-readers: venv etcd-tools ## test with schedulers of other projects that read what the cluster agent publishes: needs go, etcd
	@bin=$$(KUBERNETES="$(KUBERNETES)" sh tests/cluster/build.sh kube-apiserver | tail -n 1) || exit 1; \
	readers=$$(sh tests/cluster/build_readers.sh | tail -n 1) || exit 1; \
	[ -n "$$bin" ] && TOPOPROXY_CLUSTER=$$bin TOPOPROXY_READERS=$$readers \
	  $(BIN)/python -m pytest tests/cluster/test_readers.py -v -s $(PYTEST_ARGS)

test-outage: venv e2e-tools etcd-tools ## kill the API server for ten minutes under churn, and compare calls with those before: OUTAGE=seconds
	@bin=$$(KUBERNETES="$(KUBERNETES)" sh tests/cluster/build.sh $(CLUSTER_PROGRAMS) | tail -n 1) || exit 1; \
	[ -n "$$bin" ] && TOPOPROXY_CLUSTER=$$bin TOPOPROXY_OUTAGE_S=$(or $(OUTAGE),600) $(BIN)/python -m pytest -s -k outage_delays \
	  tests/cluster/test_disturbances.py tests/e2e/cluster $(PYTEST_ARGS)

bench-cluster: venv etcd-tools ## measure the cluster agent at a real kube-apiserver: latency, writes, memory, sizes: CASES="one two fast idle reading large"
	@bin=$$(KUBERNETES="$(KUBERNETES)" sh tests/cluster/build.sh kube-apiserver | tail -n 1) || exit 1; \
	[ -n "$$bin" ] && TOPOPROXY_CLUSTER=$$bin $(BIN)/python -m tests.cluster.figures $(CASES) 2>/dev/null

bench-fleet: venv ## simulate a fleet of 5,000 nodes and 100,000 pods with both schedulers: FLEET_ARGS="NODES PODS PERCENTAGE"
	@$(BIN)/python bench/fleet.py $(FLEET_ARGS)

# 5,000 nodes take a minute to be read; with the programs some minutes more.
bench-scheduler: venv etcd-tools ## measure the scheduler extender: answers, memory, pods a second; CASES=peers: beside other schedulers: needs go, etcd
	@bin=$$(KUBERNETES="$(KUBERNETES)" sh tests/cluster/build.sh kube-apiserver kube-scheduler | tail -n 1) || exit 1; \
	readers=$(if $(filter peers,$(CASES)),$$(sh tests/cluster/build_readers.sh | tail -n 1)); \
	[ -n "$$bin" ] && TOPOPROXY_CLUSTER=$$bin TOPOPROXY_READERS=$$readers $(BIN)/python -m tests.cluster.extender_figures $(CASES)

lint: venv ## check style, types, and the layers of packages
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check . || { $(BIN)/ruff format --check .; exit 1; }
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/mypy --no-error-summary hooks/*.py examples/*.py
	@MYPYPATH=bench:tests/e2e $(BIN)/mypy --no-error-summary --disable-error-code misc bench/*.py
	@output=$$($(BIN)/lint-imports --no-logo 2>&1) || { echo "$$output"; exit 1; }
	@$(BIN)/python -m tests.testkit.layer_rules
	@echo "lint: clean"

mutate: venv ## change code on purpose to check its tests: PACKAGE=allocation N=60 (N=0: all), MUTATE_ARGS="..."
	@$(BIN)/python tests/mutation/mutate.py $(PACKAGE) -n $(N) $(MUTATE_ARGS)

# Without SEED, each run has another seed. A failure is printed with the command that repeats it.
fuzz: venv ## run random sessions and random bodies without end: SEED=n, FUZZ_ARGS="--only bodies"
	@$(BIN)/python -m tests.fuzz --forever $(if $(SEED),--seed $(SEED)) $(FUZZ_ARGS)

conformance: venv ## run the tables of cases: VECTORS="file or directory ..."
	@$(BIN)/python -m tests.conformance $(VECTORS)

bench: venv ## compare with a direct connection and a plain proxy: BENCH_ARGS="..."
	@$(BIN)/python bench/run.py $(BENCH_ARGS)
	@$(BIN)/python bench/simulate.py
	@$(BIN)/python bench/ledger_figures.py
	@$(BIN)/python bench/device_figures.py
	@$(BIN)/python bench/moving_figures.py
	@$(BIN)/python bench/reconcile_figures.py --seconds 20

bench-beside: venv ## compare every call with another commit, in one run: BASE=commit BENCH_ARGS="..."
	@[ -n "$(BASE)" ] || { echo "make bench-beside: name a commit or a directory: BASE=main" >&2; exit 2; }
	@$(BIN)/python bench/commit_comparison.py "$(BASE)" $(BENCH_ARGS)

help-times: venv ## print how long --help of each command takes (bound 150 ms)
	@$(BIN)/python -m bench.help_times

count: venv ## count code, modules, and imports in functions: BASE=commit
	@$(BIN)/python bench/count.py $(BASE)

create-path: venv ## print the files that a CreateContainer crosses, in order
	@$(BIN)/python -m tests.testkit.create_path

crash: venv ## kill the daemon at every step and at 500 random moments: CRASH_ARGS="--moments 50"
	@$(BIN)/python bench/crash.py $(CRASH_ARGS)

churn: venv ## make 20,000 calls while the runtime and the kernel fail at times: CHURN_ARGS="--calls 2000"
	@$(BIN)/python bench/churn.py $(CHURN_ARGS)

reload-day: venv ## reload 1,000 configurations under load, half of them bad: RELOAD_ARGS="--reloads 100"
	@$(BIN)/python bench/reload_day.py $(RELOAD_ARGS)

simulate-faults: venv ## simulate nodes with faults of all kinds, all from one seed: SEED=n EVENTS=1000000 WORKERS=2
	@$(BIN)/python -m tests.simulation $(if $(SEED),--seed $(SEED)) $(if $(EVENTS),--events $(EVENTS)) \
	  $(if $(WORKERS),--workers $(WORKERS)) $(if $(PLANT),--plant $(PLANT))

hostile-day: venv e2e-tools ## run 200 hostile and 50 honest pods on containerd, with a kill -9: as root on Debian, HOSTILE_ARGS="..."
	@$(BIN)/python bench/hostile_calls.py
	@$(BIN)/python bench/hostile_day.py $(HOSTILE_ARGS)

bench-hooks: venv ## measure the cost of hooks, and make 10,000 calls while hooks misbehave: HOOKS_ARGS="--calls 1000"
	@$(BIN)/python bench/hooks_figures.py
	@$(BIN)/python bench/hooks_chaos.py $(HOOKS_ARGS)

device-chaos: venv ## time lists of devices, and create 10,000 containers while device plugins misbehave: DEVICES_ARGS="--calls 1000"
	@$(BIN)/python bench/device_list_figures.py
	@$(BIN)/python bench/device_chaos.py $(DEVICES_ARGS)

drift: venv e2e-tools ## measure how soon a foreign write to a cpuset is repaired: as root on Debian, a minute
	@$(BIN)/python bench/drift_figures.py

upgrade-figures: venv ## replace the daemon by another version and back beside 300 pods and a stream of calls
	@$(BIN)/python bench/upgrade_figures.py

bench-go: venv ## measure beside a proxy in Go, not part of this repository: needs go and BENCH_KIT=directory
	@$(BIN)/python bench/go_kit.py $(BENCH_KIT) $(BENCH_ARGS)

bench-floor: venv ## measure what a relay in Python costs at least, beside Go: needs go and BENCH_KIT=directory
	@$(BIN)/python bench/floor_figures.py $(BENCH_KIT) $(BENCH_ARGS)

proto: venv ## generate proxy/api/ from proto/*/*.proto
	@for peer in cri kubelet containerd koordinator; do \
	  from=proto/$$peer; to=proxy/api/$$peer; \
	  $(BIN)/python -m grpc_tools.protoc -I $$from --python_out=$$to --pyi_out=$$to $$(cd $$from && ls *.proto); \
	done

hook-points: venv ## generate docs/hook-points.md from the dataclasses of hooks
	@$(BIN)/topoproxy hooks points --markdown > docs/hook-points.md.new && mv docs/hook-points.md.new docs/hook-points.md

golden: venv ## write the status pages of tests/admin/golden again; look at the difference
	@UPDATE_GOLDEN=1 $(BIN)/python -m pytest -q tests/admin/test_golden_pages.py

metrics: venv ## write docs/metrics.md from the declarations of metrics
	@$(BIN)/python -m proxy.telemetry.reference > docs/metrics.md.new && mv docs/metrics.md.new docs/metrics.md

configuration: venv ## write docs/configuration.md from the declarations of settings
	@$(BIN)/python -m proxy.config.reference > docs/configuration.md.new && mv docs/configuration.md.new docs/configuration.md

# A node installs requirements-runtime.lock (requirements-cluster.lock where the cluster agent runs) and builds with
# requirements-build.lock; they name the versions of requirements.lock, with which the tests run. The files contain no
# index addresses, so that they do not depend on the machine on which they are generated.
LOCKS := requirements.lock requirements-runtime.lock requirements-cluster.lock requirements-build.lock
COMPILE = uv pip compile --quiet --no-header --generate-hashes --universal --python-version 3.11 --no-emit-index-url
lock: ## renew the files requirements*.lock from pyproject.toml (needs uv)
	@command -v uv >/dev/null || { echo "make lock: uv is not installed; see https://docs.astral.sh/uv/" >&2; exit 1; }
	@$(COMPILE) --extra dev --extra cluster --group build -o requirements.lock pyproject.toml
	@$(COMPILE) -c requirements.lock -o requirements-runtime.lock pyproject.toml
	@$(COMPILE) -c requirements.lock --extra cluster -o requirements-cluster.lock pyproject.toml
	@$(COMPILE) -c requirements.lock --group build -o requirements-build.lock
	@! grep -nE '^(-|--)|://' $(LOCKS) || { echo "make lock: an address got into a lock file" >&2; exit 1; }

# As root on Debian, installs rpmbuild where it is missing. ARCH=amd64 builds for one architecture, KINDS="deb image" some
# of python, deb, rpm, image, helm. SOURCE_DATE_EPOCH, by default the time of the last commit, is the time of all files.
package: venv ## build wheel, sdist, deb, RPM, OCI image, charts, SBOM and checksums in dist/: ARCH=amd64 KINDS="deb"
	@$(if $(or $(filter rpm,$(KINDS)),$(if $(strip $(KINDS)),,all)),sh tests/e2e/install.sh rpm,:)
	@$(BIN)/python packages/build.py $(addprefix --arch ,$(ARCH)) $(KINDS)

wheel: venv ## build the wheel in dist/
	@$(BIN)/python -m hatchling build -t wheel

clean: ## remove all files of the other targets, including .venv
	@rm -rf .venv dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find . -name .git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
