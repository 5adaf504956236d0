#!/usr/bin/env bash
# Installs what building needs and what is missing: a C compiler, pkg-config, make,
# libzmq and Python's headers, from the packages of Debian or Ubuntu. Run it again
# at will.
set -euo pipefail

missing=()
command -v gcc >/dev/null 2>&1 || command -v cc >/dev/null 2>&1 || missing+=(gcc libc6-dev)
command -v make >/dev/null 2>&1 || missing+=(make)
if ! command -v pkg-config >/dev/null 2>&1; then
  missing+=(pkg-config libzmq3-dev python3-dev)
else
  pkg-config --exists libzmq || missing+=(libzmq3-dev)
  pkg-config --exists python3 || missing+=(python3-dev)
fi
if ! command -v go >/dev/null 2>&1; then
  echo "install_deps: Go is not installed; see https://go.dev/dl" >&2
fi
if [ ${#missing[@]} -eq 0 ]; then
  echo "install_deps: nothing is missing"
  exit 0
fi
if ! command -v apt-get >/dev/null 2>&1; then
  echo "install_deps: there is no apt-get here; install by hand what Debian calls: ${missing[*]}" >&2
  exit 1
fi

as_root=()
if [ "$(id -u)" -ne 0 ]; then
  if ! command -v sudo >/dev/null 2>&1; then
    echo "install_deps: run this as root, there is no sudo; it will install: ${missing[*]}" >&2
    exit 1
  fi
  as_root=(sudo)
fi
echo "install_deps: installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
${as_root[@]+"${as_root[@]}"} apt-get update -q
${as_root[@]+"${as_root[@]}"} apt-get install -q -y --no-install-recommends "${missing[@]}"
