# StepAF in Go. "make" lists the targets.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

GO ?= go
FUZZTIME ?= 10s
PROGRAMS := ./tools/stepaf ./tests/utests/... ./tests/fserver/... ./tests/benchmark/...
export USE_CUDA USE_RDMA USE_FABRIC USE_UCX USE_TP CUDA_HOME

# sources are the Go files of the repository, those not yet committed too.
sources = $$(find . -name '*.go' -not -path './.*' -not -path './bin/*' -not -path './build/*')

.PHONY: help deps build run af test check testrace vet lint fmt fmtcheck tidy fuzz bench clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

deps: ## install missing packages of Debian or Ubuntu (asks sudo if need be)
	@tools/install_deps.sh

build: ## build bin/stepaf
	@flags=$$(tools/build_flags.sh -q); mkdir -p bin; $(GO) build $$flags -o bin/ ./tools/stepaf

run: deps build ## install what is missing, build, and run a demo on this machine
	bin/stepaf launch -n 1 -s 1 -- bin/stepaf demo

af: ## build everything, as StepMesh's target: bin/stepaf and the test programs; USE_CUDA=0, USE_RDMA=0
	@flags=$$(tools/build_flags.sh); mkdir -p bin; \
	$(GO) build $$flags ./...; $(GO) build $$flags -o bin/ $(PROGRAMS); echo "build: in bin/: $$(ls bin | xargs)"

test: check testrace ## everything that CI runs: check and testrace

check: fmtcheck vet lint ## fmtcheck, vet and lint

testrace: ## all tests with the race detector
	$(GO) test -race -timeout 14m ./...

vet: ## go vet
	$(GO) vet ./...

lint: ## staticcheck, at the version of go.mod
	$(GO) tool staticcheck ./...

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
