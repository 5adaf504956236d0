#!/usr/bin/env bash
# Prints the options of go build for this machine. USE_CUDA and USE_RDMA (0, 1, or unset to detect) become build tags,
# and so do the arguments. The choices are printed to standard error, unless -q is given.
#   build_flags.sh [-q] [TAG...]
set -euo pipefail
# shellcheck source=env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
usage_if_asked 'usage: [USE_CUDA=0|1] [USE_RDMA=0|1] tools/build_flags.sh [-q] [TAG...]
  -q   do not say on standard error what was chosen
  TAG  a build tag, printed with the others' "$@"
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
    *) stop "$name=${!name}: not supported; the transports are zmq and, if it is built, ibverbs" ;;
  esac
done
for name in USE_CUDA USE_RDMA; do
  case "${!name-}" in
    '' | 0 | 1) ;;
    *) stop "$name=${!name}: want 0 or 1" ;;
  esac
done

for tag in "$@"; do
  [[ $tag =~ ^[A-Za-z0-9_.]+$ ]] || stop "want build tags, not '$tag'; see --help"
done
tags=("$@")

mapfile -t cflags < <(words "${CGO_CPPFLAGS-} ${CGO_CFLAGS-}")
mapfile -t ldflags < <(words "${CGO_LDFLAGS-}")
read -r -a compiler <<<"${CC:-$(tools/go.sh env CC 2>/dev/null || echo cc)}"

# Only cuda.h and a libcuda.so to link with are needed; a stub is enough, since a program opens the driver's library
# when it uses a GPU. The directories are those of gorgonia.org/cu; set CGO_CFLAGS and CGO_LDFLAGS for others, see
# cuda_env.mk.
cuda_headers() {
  "${compiler[@]}" ${cflags[@]+"${cflags[@]}"} -I/usr/local/cuda/include -x c - -o /dev/null ${ldflags[@]+"${ldflags[@]}"} \
    -L/usr/local/cuda/lib64 -lcuda >/dev/null 2>&1 <<<$'#include <cuda.h>\nint main(void) { return (int)cuInit(0); }'
}

cuda_packages='Debian: nvidia-cuda-dev of non-free; or "tools/install_deps.sh cuda"; elsewhere set CUDA_HOME and use make'
if [ "${USE_CUDA-}" = 0 ]; then
  say "GPU support: off (USE_CUDA=0)"
elif cuda_headers; then
  say "GPU support: on"
  tags+=(cuda)
elif [ "${USE_CUDA-}" = 1 ]; then
  stop "USE_CUDA=1: the C compiler does not find cuda.h and libcuda.so${CUDA_HOME:+ (CUDA_HOME=$CUDA_HOME)} ($cuda_packages)"
else
  say "GPU support: off, no CUDA ($cuda_packages)"
fi

# Only the headers are needed: a program opens the libraries when it uses RDMA.
rdma_headers() {
  "${compiler[@]}" ${cflags[@]+"${cflags[@]}"} -E -o /dev/null - >/dev/null 2>&1 \
    <<<$'#include <infiniband/verbs.h>\n#include <rdma/rdma_cma.h>'
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
