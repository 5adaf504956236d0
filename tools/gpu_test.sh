#!/usr/bin/env bash
# Runs the tests that need GPUs: those of the backend, in Go, and those of the Python module and its programs with
# PyTorch. With Go it builds first; without Go it uses the files in bin/, see docs/gpu.md.
set -euo pipefail
# shellcheck source=env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage='usage: tools/gpu_test.sh [--build | --ready]
  --build  only build what the tests need, into bin/; no GPU is needed
  --ready  only say whether there is a GPU: status 0, or 1 and why not
PYTHON is the interpreter, one with PyTorch for CUDA, pytest and NumPy (default: python3).
Without a GPU nothing is run, and the status is 0.'
usage_if_asked "$usage" "$@"

say() { echo "gpu-test: $*"; }
python="${PYTHON:-python3}"

ready() {
  local gpus
  if ! gpus="$(nvidia-smi -L 2>&1)" || [ -z "$gpus" ]; then
    say "SKIPPED: no GPU: nvidia-smi says: ${gpus:-nothing}" | head -n 1
    return 1
  fi
  printf '%s\n' "$gpus" | sed 's/^/gpu-test: /'
}

build() {
  export USE_CUDA=1
  make --no-print-directory programs fserver
  tools/go.sh test "$(tools/build_flags.sh -q)" -c -o bin/backend.test ./van/backend
}

[ $# -le 1 ] || set -- "$*" # which is none of these
case "${1-}" in
  '') ;;
  --build)
    build
    exit 0
    ;;
  --ready)
    ready
    exit
    ;;
  *)
    printf '%s\n' "$usage" >&2
    exit 2
    ;;
esac

ready || exit 0
if command -v go >/dev/null; then
  build
elif [ ! -x bin/backend.test ] || [ ! -x bin/stepaf ] || [ ! -e bin/python/fserver_lib.abi3.so ]; then
  say "no Go, and bin/ lacks what was built elsewhere: make gpu-build, see docs/gpu.md" >&2
  exit 1
fi
gpus="$(nvidia-smi -L | wc -l)"
status=0
run() {
  say "$*"
  if ! timeout -k 10 600 "$@"; then
    say "FAILED: $*"
    status=1
  fi
}

export PATH="$PWD/bin:$PATH" PYTHON="$python" PYTHONPATH="$PWD/bin/python${PYTHONPATH:+:$PYTHONPATH}" STEPMESH_BAKCEND=GPU
run bin/backend.test -test.v -test.run CUDA -test.bench CUDA -test.benchtime 200x
run bin/stepaf doctor --verbose
run "$python" -m pytest -q -rs -p no:cacheprovider tests/python/test_gpu.py
run "$python" -m pytest -q -rs -p no:cacheprovider tests/python/test_gpu_local.py
run "$python" -m pytest -q -rs -p no:cacheprovider tests/python/test_gpu_collectives.py
run "$python" -m pytest -q -rs -p no:cacheprovider tests/python/test_gpu_streams.py tests/python/test_gpu_hosts.py
run "$python" -m pytest -q -rs -p no:cacheprovider tests/python/test_gpu_windows.py
run "$python" -m pytest -q -rs -p no:cacheprovider tests/python/test_graphs.py tests/python/test_compile.py
run bin/stepaf bench latency --van local --device gpu
run bin/stepaf bench latency --van local --device gpu --prepared
run bin/stepaf bench window --van local --device gpu
for program in test_fserver test_fserver_diff_stage test_fserver_dynamic; do
  for ipc in 0 1; do
    BYTEPS_ENABLE_IPC=$ipc BIN="$program" BENCHMARK_ITER=8 run tests/fserver/run_single_gpu.sh
    if [ "$gpus" -gt 1 ]; then
      BYTEPS_ENABLE_IPC=$ipc ROLE=joint BIN="$program" GROUP_SIZE="$gpus" BENCHMARK_ITER=8 run tests/fserver/run_multi_gpu.sh
    fi
  done
done
# Eight processes a role, instance i on GPU i % count.
shared=
for i in 0 1 2 3 4 5 6 7; do
  shared+="${shared:+,}$((i % gpus))"
done
for ipc in 0 1; do
  BYTEPS_ENABLE_IPC=$ipc ROLE=joint BIN=test_fserver_dynamic GROUP_SIZE=8 GPUS="$shared" STEPAF_START_TIMEOUT=200 STEPAF_STOP_TIMEOUT=200 BENCHMARK_ITER=4 \
    run tests/fserver/run_multi_gpu.sh
done
[ "$gpus" -gt 1 ] || say "SKIPPED: run_multi_gpu.sh and groups with a GPU for each process: one GPU"
[ "$status" -eq 0 ] && say ok
exit "$status"
