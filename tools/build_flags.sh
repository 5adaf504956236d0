#!/usr/bin/env bash
# Prints the options of go build for this machine: USE_CUDA and USE_RDMA (0, 1, or
# unset for what the machine has) become build tags, and so do the arguments. What
# was chosen goes to standard error, unless the option -q is given.
#   build_flags.sh [-q] [TAG...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { [ "$quiet" ] || echo "build: $1" >&2; }
stop() {
  echo "build: $1" >&2
  exit 2
}
quiet=
if [ "${1-}" = -q ]; then
  quiet=1
  shift
fi

for name in USE_FABRIC USE_UCX USE_TP; do
  case "${!name-}" in
    '' | 0) ;;
    *) stop "$name=${!name}: not yet; the transports are zmq and, where it is built, ibverbs" ;;
  esac
done
for name in USE_CUDA USE_RDMA; do
  case "${!name-}" in
    '' | 0 | 1) ;;
    *) stop "$name=${!name}: want 0 or 1" ;;
  esac
done

tags=("$@")

# has TAG: is there source that TAG switches?
has() { grep -rqsE --include='*.go' "^//go:build.*\b$1\b" af kv postoffice van internal; }

cuda_home="${CUDA_HOME:-/usr/local/cuda}"
if [ "${USE_CUDA-}" = 0 ]; then
  say "GPU support: off (USE_CUDA=0)"
elif ! has cuda; then
  [ "${USE_CUDA-}" != 1 ] || stop "USE_CUDA=1: not yet; this version has no GPU backend"
  say "GPU support: not in this version"
elif [ ! -f "$cuda_home/include/cuda.h" ]; then
  [ "${USE_CUDA-}" != 1 ] || stop "USE_CUDA=1: no $cuda_home/include/cuda.h; set CUDA_HOME"
  say "GPU support: off, no CUDA in $cuda_home (set CUDA_HOME)"
else
  say "GPU support: on, CUDA in $cuda_home"
  tags+=(cuda)
fi

# Only the headers are needed: the libraries are opened when a program uses RDMA.
rdma_headers() {
  local compiler="${CC:-$(go env CC 2>/dev/null || echo cc)}"
  # shellcheck disable=SC2086 # these are lists
  printf '#include <infiniband/verbs.h>\n#include <rdma/rdma_cma.h>\n' |
    $compiler ${CGO_CPPFLAGS-} ${CGO_CFLAGS-} -E -o /dev/null - >/dev/null 2>&1
}

rdma_packages='Debian: libibverbs-dev librdmacm-dev; Fedora: rdma-core-devel; tools/install_deps.sh installs them'
if [ "${USE_RDMA-}" = 0 ]; then
  say "RDMA: off (USE_RDMA=0)"
  tags+=(nordma)
elif rdma_headers; then
  say "RDMA: on"
elif [ "${USE_RDMA-}" = 1 ]; then
  stop "USE_RDMA=1: the C compiler does not find infiniband/verbs.h and rdma/rdma_cma.h ($rdma_packages)"
else
  say "RDMA: off, no headers ($rdma_packages)"
  tags+=(nordma)
fi

if [ ${#tags[@]} -gt 0 ]; then
  (IFS=, && echo "-tags=${tags[*]}")
fi
