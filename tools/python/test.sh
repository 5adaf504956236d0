#!/usr/bin/env bash
# Runs the Python tests with each environment of test_deps.sh.
#   test.sh [--ready] [NAME...] [-- arguments of pytest]
# No name means torch and arrays. --ready only tells whether they are there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

ready= names=()
while [ $# -gt 0 ]; do
  case "$1" in
    --ready) ready=1 ;;
    --)
      shift
      break
      ;;
    *) names+=("$1") ;;
  esac
  shift
done
[ ${#names[@]} -gt 0 ] || names=(torch arrays)

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
status=0
for name in "${names[@]}"; do
  python="$PWD/build/python/$name/bin/python"
  echo "python-test: $name: $("$python" tools/python/versions.py)"
  # The programs that tests start by name find the same interpreter.
  PATH="$(dirname "$python"):$PATH" PYTHONPATH="$PWD/bin/python" \
    timeout -k 10 2400 "$python" -m pytest -q --durations=15 -p no:cacheprovider tests/python "$@" || status=$?
done
exit "$status"
