#!/usr/bin/env bash
# Installs what the Python tests need, in the environments of build/python:
#   torch   the system's Python with Debian's PyTorch and NumPy, and a transformers that works with these
#   arrays  the system's Python with NumPy, JAX, uvloop, gevent and pyinstrument of PyPI, no PyTorch
#   old     Python 3.8 or 3.9 of PATH or of pyenv, if there is one, with the same but JAX: their signal handlers have no SA_ONSTACK
#   full    $PYTHON with the current PyTorch, NumPy and JAX of PyPI; only when asked for
# Arguments: names of environments; none means torch, arrays and old.
set -euo pipefail
# shellcheck source=../env.sh
source "$(dirname "${BASH_SOURCE[0]}")/../env.sh"
usage_if_asked 'usage: tools/python/test_deps.sh [NAME...]
  NAME  torch, arrays, old or full: what to make in build/python (default: torch arrays old)' "$@"
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

# One process at a time installs in build/python.
mkdir -p build/python
exec {lock}>build/python/lock
flock "$lock"

say() { echo "python-deps: $*"; }
[ $# -gt 0 ] || set -- torch arrays old

# Debian's PyTorch belongs to this interpreter, which need not be the first python3.
system=/usr/bin/python3

# debian PACKAGE...: installs those that are missing.
debian() {
  local missing=() p
  for p in "$@"; do
    dpkg-query -W -f '${Status}' "$p" 2>/dev/null | grep -q 'ok installed' || missing+=("$p")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  say "installing ${missing[*]}"
  apt_install "${missing[@]}"
}

# environment NAME INTERPRETER OPTIONS... -- PACKAGES...
environment() {
  local dir="build/python/$1" python="$2" options=()
  shift 2
  while [ "$1" != -- ]; do
    options+=("$1")
    shift
  done
  shift
  # Without pip, the command that made the environment was interrupted.
  "$dir/bin/python" -c 'import pip' 2>/dev/null || "$python" -m venv --clear ${options[@]+"${options[@]}"} "$dir"
  "$dir/bin/python" -m pip install -q --disable-pip-version-check "$@"
  say "$dir: $("$dir/bin/python" tools/python/versions.py)"
}

# The packages that the tests of signals use besides NumPy.
beside=(uvloop gevent pyinstrument)

# old_python prints the path of the oldest Python below 3.10, or nothing.
old_python() {
  local minor p
  for minor in 8 9; do
    for p in "$(command -v "python3.$minor")" "${PYENV_ROOT:-$HOME/.pyenv}/versions/3.$minor".*/bin/python3; do
      if [ -x "$p" ] && "$p" -c "import ensurepip, sys, venv; sys.exit(sys.version_info[:2] != (3, $minor))" 2>/dev/null; then
        echo "$p"
        return
      fi
    done
  done
}

for name in "$@"; do
  case "$name" in
    torch)
      debian python3-venv python3-torch python3-numpy
      environment torch "$system" --system-site-packages -- pytest pytest-xdist transformers==4.46.3
      ;;
    arrays)
      debian python3-venv
      environment arrays "$system" -- pytest pytest-xdist numpy jax "${beside[@]}"
      ;;
    old)
      python="$(old_python)"
      if [ -n "$python" ]; then
        environment old "$python" -- pytest pytest-xdist numpy "${beside[@]}"
      else
        say "SKIPPED: old: there is no Python 3.8 or 3.9 in PATH or in pyenv's versions"
      fi
      ;;
    full) environment full "${PYTHON:-python3}" -- pytest pytest-xdist numpy jax torch ;;
    *)
      say "no environment is called $name; want torch, arrays, old or full" >&2
      exit 2
      ;;
  esac
done
