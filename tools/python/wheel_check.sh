#!/usr/bin/env bash
# Tests a wheel as on a machine without Go, compiler and libzmq: installs it into a new environment, then runs a cluster
# of three processes with only that environment in PATH. If the script has the rights, it hides the system's copies of
# the libraries inside the wheel; in any case none of them may be loaded.
#   wheel_check.sh WHEEL
set -euo pipefail
# shellcheck source=../env.sh
source "$(dirname "${BASH_SOURCE[0]}")/../env.sh"
usage='usage: [PYTHON=interpreter] tools/python/wheel_check.sh WHEEL'
usage_if_asked "$usage" "$@"
if [ $# -ne 1 ] || [ ! -f "$1" ]; then
  echo "wheel: want one wheel, not '$*'" >&2
  printf '%s\n' "$usage" >&2
  exit 2
fi
wheel="$(realpath "$1")"
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
"${PYTHON:-python3}" -m venv "$place/env"
python="$place/env/bin/python"
"$python" -m pip install -q --disable-pip-version-check numpy
"$python" -m pip install -q --disable-pip-version-check --no-index "$wheel"

# Names of the libraries inside the wheel; auditwheel has added a number to them.
inside="$("$python" -m zipfile -l "$wheel" | sed -nE 's|^[Ff][Ss]erver\.libs/([^ ]+) .*|\1|p' | sed -E 's/-[0-9a-f]{8}\././')"
if ! grep -q '^libzmq\.so' <<<"$inside"; then
  echo "wheel: no libzmq inside $wheel" >&2
  exit 1
fi

cp tools/python/wheel_check.py "$place/"
run=("$python" "$place/wheel_check.py")
script='
  for file in $(ldconfig -p | sed -n "s|.*=> ||p" | xargs realpath | sort -u); do
    if grep -qxF "$(basename "$file")" <<<"$1"; then
      echo "wheel: hiding $file"
      mount --bind /dev/null "$file"
    fi
  done
  shift
  cd /
  exec env -i HOME=/nonexistent PATH="$(dirname "$1")" "$@"'
if [ "$(id -u)" -eq 0 ] && unshare -m true 2>/dev/null; then
  PATH="$PATH:/sbin:/usr/sbin" unshare -m bash -c "$script" hide "$inside" "${run[@]}" hidden
else
  echo "wheel: no right to hide the system's libraries; checking only the loaded libraries" >&2
  (cd / && env -i HOME=/nonexistent PATH="$place/env/bin" "${run[@]}")
fi
