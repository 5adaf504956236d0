# Shared by the launch scripts; sourced, never run. It finds or builds what they
# start. Everything else is the work of "stepaf launch". The programs may be those of
# the C++ library (STEPAF_FOREIGN=1), which knows no secret: none is made. One that the
# environment names is used.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
STEPAF="$ROOT/bin/stepaf"
NOTES=() # lines that the launcher prints behind the first one

# say LINE: a message for the user.
say() { printf 'stepaf: %s\n' "$1" >&2; }

# misuse LINE USAGE: ends the script with status 2.
misuse() {
  say "$1"
  printf '%s\n' "$2" >&2
  exit 2
}

# build NAME PACKAGE: makes bin/NAME up to date. Without Go an existing one will do.
build() {
  if ! command -v go >/dev/null 2>&1; then
    [ -x "$ROOT/bin/$1" ] && return
    say "bin/$1 is not built and there is no Go: install Go, or build it elsewhere with 'make af'"
    exit 1
  fi
  # shellcheck disable=SC2046 # the flags are a list
  (cd "$ROOT" && tools/go.sh build $(tools/build_flags.sh -q) -o "bin/$1" "$2") >&2 || {
    say "building bin/$1 failed; tools/install_deps.sh installs what it needs"
    exit 1
  }
}

# goal KNOB VALUE: sets PROGRAM for a knob that names a program. One that is not
# there but is a Go program of ours, as ./cmake_build/tests/utests/ut_server, is
# built.
goal() {
  local name="${2##*/}"
  if [ -x "$2" ] && [ ! -d "$2" ] && [ "$2" != "$ROOT/bin/$name" ]; then
    PROGRAM="$2"
  elif [ -d "$ROOT/tests/utests/$name" ]; then
    build "$name" "./tests/utests/$name"
    PROGRAM="$ROOT/bin/$name"
  else
    say "$1=$2: no such program, and none of tests/utests either"
    exit 2
  fi
  PROGRAM="$(printf '%q' "$PROGRAM")"
}

# python_ready: sets PYTHON to one that can run the tests: the one it says, else
# the first python3, else the system's, to which Debian's PyTorch belongs. The
# module may be installed, or built by "make fserver".
python_ready() {
  local python candidates=("${PYTHON:-python3}")
  [ -n "${PYTHON-}" ] || candidates+=(/usr/bin/python3)
  if [ -f "$ROOT/bin/python/fserver_lib.abi3.so" ]; then
    export PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}$ROOT/bin/python"
  fi
  for python in "${candidates[@]}"; do
    if "$python" -c 'import torch, fserver_lib' >/dev/null 2>&1; then
      PYTHON="$python"
      export PYTHONUNBUFFERED=1 # lines appear when they are printed
      unset PYTHONSAFEPATH      # the programs import what is in their directory
      return
    fi
  done
  return 1
}

# test_program DIRECTORY BIN: sets COMMAND to the Python test BIN.py, or to the Go
# program of the same name.
test_program() {
  local directory="$1" bin="$2" package name="${2##*/}"
  if [ -f "$directory/$bin.py" ] && python_ready; then
    COMMAND=("$PYTHON" "$directory/$bin.py")
    return
  fi
  if ! package="$(cd "$directory/$bin" 2>/dev/null && pwd)" || [ "${package#"$ROOT"/}" = "$package" ]; then
    say "BIN=$bin: want one of the programs in ${directory#"$ROOT"/}: $(cd "$directory" && echo */ | tr -d /)"
    exit 2
  fi
  package="${package#"$ROOT"/}"
  build "$name" "./$package"
  COMMAND=("$ROOT/bin/$name")
  NOTES+=(--note "no Python with torch and fserver_lib: running the Go program $package")
}

# interface DEFAULT: sets INTERFACE to options for RNIC.
interface() {
  if [ -n "${RNIC-}" ]; then
    INTERFACE=(--interface "$RNIC")
  else
    INTERFACE=(--prefer-interface "$1")
  fi
}

build stepaf ./tools/stepaf
