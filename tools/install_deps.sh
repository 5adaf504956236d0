#!/usr/bin/env bash
# Installs what building needs and what is missing: a C compiler, pkg-config, make,
# libzmq, Python's headers and, unless USE_RDMA=0, the headers of libibverbs and
# librdmacm, from the packages of Debian or Ubuntu. Run it again at will.
#   install_deps.sh           the above
#   install_deps.sh rdma-vm   prepares the virtual machine of tools/rdma-vm, in which
#                             make rdma-test runs; status 77, and a line that says why,
#                             where that cannot be done
#   install_deps.sh cuda      fetches into build/cuda the two files of Debian's package
#                             nvidia-cuda-dev that building with CUDA needs, unless CUDA
#                             is here; touches nothing else and needs no root; status 77
#                             as above
# With USE_CUDA=1 it installs that package, if apt knows it.
set -euo pipefail
# shellcheck source=env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
usage_if_asked 'usage: [USE_RDMA=0|1] [USE_CUDA=1] tools/install_deps.sh [rdma-vm | cuda]
  no argument  what building needs: a C compiler, pkg-config, make, libzmq, headers
  rdma-vm      the virtual machine of "make rdma-test"
  cuda         cuda.h and a stub of libcuda.so, into build/cuda' "$@"

if [ "${1-}" = rdma-vm ] && [ $# -eq 1 ]; then
  vm="$(dirname "${BASH_SOURCE[0]}")/rdma-vm"
  if [ "${USE_RDMA-}" = 0 ]; then
    echo "install_deps: no virtual machine for RDMA: USE_RDMA=0" >&2
    exit 77
  fi
  if "$vm" --ready 2>/dev/null; then
    echo "install_deps: the virtual machine for RDMA is ready"
    exit 0
  fi
  exec "$vm" --install
elif [ "${1-}" = cuda ] && [ $# -eq 1 ]; then
  exec "$(dirname "${BASH_SOURCE[0]}")/cuda_headers.sh"
elif [ $# -gt 0 ]; then
  echo "install_deps: want no argument, cuda or rdma-vm, not $*" >&2
  exit 2
fi

# header NAME: succeeds if the C compiler finds the header.
header() {
  local compiler="${CC:-cc}" options
  command -v "$compiler" >/dev/null 2>&1 || compiler=gcc
  mapfile -t options < <(words "${CGO_CPPFLAGS-} ${CGO_CFLAGS-}")
  $compiler ${options[@]+"${options[@]}"} -E -o /dev/null - >/dev/null 2>&1 <<<"#include <$1>"
}

missing=()
command -v gcc >/dev/null 2>&1 || command -v cc >/dev/null 2>&1 || missing+=(gcc libc6-dev)
command -v make >/dev/null 2>&1 || missing+=(make)
if ! command -v pkg-config >/dev/null 2>&1; then
  missing+=(pkg-config libzmq3-dev python3-dev)
else
  pkg-config --exists libzmq || missing+=(libzmq3-dev)
  pkg-config --exists python3 || missing+=(python3-dev)
fi
if [ "${USE_CUDA-}" = 1 ] && [ ! -f "${CUDA_HOME:-/usr/local/cuda}/include/cuda.h" ] && ! header cuda.h; then
  known="$(LC_ALL=C apt-cache policy nvidia-cuda-dev 2>/dev/null || true)"
  if [[ "$known" == *'Candidate: '[0-9]* ]]; then
    missing+=(nvidia-cuda-dev)
  else
    echo "install_deps: USE_CUDA=1: apt does not know nvidia-cuda-dev; add the components contrib and non-free" \
      "(Ubuntu: multiverse) to its sources and run apt-get update, or use tools/install_deps.sh cuda, or set CUDA_HOME" >&2
    exit 1
  fi
fi
needed=${#missing[@]}
if [ "${USE_RDMA-}" != 0 ]; then
  header infiniband/verbs.h || missing+=(libibverbs-dev)
  header rdma/rdma_cma.h || missing+=(librdmacm-dev)
fi
if ! command -v go >/dev/null 2>&1; then
  echo "install_deps: Go is not installed; see https://go.dev/dl" >&2
fi
if [ ${#missing[@]} -eq 0 ]; then
  echo "install_deps: nothing is missing"
  exit 0
fi

# stop LINE: ends the script, since packages cannot be installed. Without the RDMA headers a build is still possible.
stop() {
  echo "install_deps: $1: ${missing[*]}" >&2
  if [ "$needed" -gt 0 ] || [ "${USE_RDMA-}" = 1 ]; then
    exit 1
  fi
  echo "install_deps: building without RDMA is possible" >&2
  exit 0
}
command -v apt-get >/dev/null 2>&1 || stop "there is no apt-get here; install by hand what Debian calls"

[ "$(id -u)" -eq 0 ] || command -v sudo >/dev/null 2>&1 || stop "run this as root, there is no sudo; it will install"
echo "install_deps: installing ${missing[*]}"
apt_install "${missing[@]}"
