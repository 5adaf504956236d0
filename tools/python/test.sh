#!/usr/bin/env bash
# Runs the Python tests with environments of test_deps.sh, several tests at a time.
#   test.sh [--ready] [NAME...] [-- arguments of pytest]
# No name means torch and arrays, and old if it exists. --ready only reports whether they exist.
# Each environment runs:
#   torch, full  all tests
#   arrays       the tests that depend on the array library, on uvloop or on gevent
#   old          the tests that depend on the interpreter: signals, forks, descriptors, calls
set -euo pipefail
# shellcheck source=../env.sh
source "$(dirname "${BASH_SOURCE[0]}")/../env.sh"
usage_if_asked 'usage: tools/python/test.sh [--ready] [NAME...] [-- ARGUMENT OF PYTEST...]
  NAME     torch, arrays, old or full: an environment of tools/python/test_deps.sh (default: all but full)
  --ready  only say whether they are there: status 0, or 1 and what is missing' "$@"
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

ready= names=()
while [ $# -gt 0 ]; do
  case "$1" in
    --ready) ready=1 ;;
    --)
      shift
      break
      ;;
    torch | arrays | old | full) names+=("$1") ;;
    *)
      echo "python-test: no environment is called $1; want torch, arrays, old or full, and arguments of pytest after --" >&2
      exit 2
      ;;
  esac
  shift
done
without_old=
if [ ${#names[@]} -eq 0 ]; then
  names=(torch arrays)
  if [ -x build/python/old/bin/python ]; then names+=(old); else without_old=1; fi
fi

for name in "${names[@]}"; do
  if [ ! -x "build/python/$name/bin/python" ]; then
    hint="make python-deps"
    [ "$name" != full ] || hint="make python-test-full"
    echo "python-test: there is no build/python/$name: $hint" >&2
    exit 1
  fi
done
[ -z "$ready" ] || exit 0

make --no-print-directory fserver build
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT

# These tests use fserver_lib alone, and arrays only as bytes: they have run with PyTorch.
any_library=(before_fork consumers copies core_review descriptors ends failures limits loop misuse order packaging secret session signals subsets waits)

# The tests wait half of their time, so more of them run at a time than there are processors.
jobs=$((($(nproc 2>/dev/null || echo 2) * 3 / 2 + ${#names[@]} - 1) / ${#names[@]}))

# tests NAME [ARGUMENTS] ends the shell; the programs that tests start by name find the same interpreter.
tests() {
  local python="$PWD/build/python/$1/bin/python" files=(tests/python) part
  case "$1" in
    arrays)
      files=(--each-library tests/python/test_signals.py::test_{uvloop,gevent,pyinstrument})
      for part in tests/python/test_*.py; do
        [[ " ${any_library[*]} " == *" $(basename "$part" .py | cut -c 6-) "* ]] || files+=("$part")
      done
      ;;
    old) files=(tests/python/test_{signals,descriptors,ends,waits,calls}.py) ;;
  esac
  echo "python-test: $1: $("$python" tools/python/versions.py)"
  PATH="$(dirname "$python"):$PATH" PYTHONPATH="$PWD/bin/python" \
    exec timeout -k 10 3600 "$python" -m pytest -q -n "$jobs" --dist worksteal --durations=15 -p no:cacheprovider "${files[@]}" "${@:2}"
}

# The environments run at the same time. The output of the first one is shown while it runs. The output of each other
# one is written to build/python/NAME.log, and shown when it has ended.
declare -A others
for name in "${names[@]:1}"; do
  tests "$name" "$@" >"build/python/$name.log" 2>&1 </dev/null &
  others[$name]=$!
done
status=0
(tests "${names[0]}" "$@") || status=$?
for name in "${names[@]:1}"; do
  wait "${others[$name]}" || status=$?
  cat "build/python/$name.log"
done
[ -z "$without_old" ] || echo "python-test: old: SKIPPED: there is no build/python/old: make python-deps, with Python 3.8 or 3.9 in PATH or in pyenv's versions"
exit "$status"
