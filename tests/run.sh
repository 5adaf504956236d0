#!/usr/bin/env bash
# Runs one of the programs stepmesh_*_test with one server and one worker on GPU 0.
set -euo pipefail
# shellcheck source=../tools/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/../tools/env.sh"

usage='usage: [ROLE=role] [BINARY=program] [RNIC=interface] tests/run.sh [scheduler ip]
  ROLE    server  scheduler and server (default)
          worker  the worker; needs the scheduler ip
          joint   all three on this machine
  BINARY  default: bin/stepmesh_echo_test, built if missing; also stepmesh_push_test, _pull_test, _register_test
  RNIC    network interface to use (default: brainpf_bond0 if there, else the first that is not loopback)
Variables such as DMLC_ENABLE_RDMA, STEPMESH_BAKCEND and DMLC_PS_ROOT_PORT (12278) are obeyed if set.'
usage_if_asked "$usage" "$@"

role="${ROLE:-server}"
options=()
case "$role" in
  server)
    options+=(--banner 'Run server and scheduler, scheduler ip {host} ' --default-van ibverbs --default-backend GPU)
    ;;
  worker)
    if [ -z "${1-}" ]; then
      printf 'stepaf: ROLE=worker needs the ip of the scheduler as its argument; the server script prints it first\n%s\n' "$usage" >&2
      exit 2
    fi
    options+=(--host "$1" --banner 'Run worker with scheduler ip: {host}' --default-van ibverbs --default-backend GPU)
    ;;
  joint)
    options+=(--banner 'Run scheduler, server, and worker jointly' --default-van auto --default-backend auto)
    ;;
  *)
    printf 'stepaf: ROLE=%s: want server, worker or joint\n%s\n' "$role" "$usage" >&2
    exit 2
    ;;
esac
# shellcheck source=launch.sh
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
if [ -n "${CUDA_HOME-}" ]; then
  export LD_LIBRARY_PATH="$CUDA_HOME/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
fi

interface brainpf_bond0
goal BINARY "${BINARY:-stepmesh_echo_test}"
exec "$STEPAF" launch --default STEPAF_FOREIGN=1 --role "$role" -n 1 -s 1 --group-size 1 "${INTERFACE[@]}" --default-port 12278 \
  --default DMLC_INTERFACE=auto --default STEPMESH_SPLIT_QP_LAG=1 --fail-on ' FAILED ' "${options[@]}" \
  --server-command "$PROGRAM" --worker-command "$PROGRAM"
