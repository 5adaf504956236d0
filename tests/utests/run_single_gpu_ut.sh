#!/usr/bin/env bash
# The unit-test programs as one scheduler, one server and one worker on GPU 0.
set -euo pipefail

usage='usage: [SCHEDULER_BIN=program] [SERVER_BIN=program] [WORKER_BIN=program] [DMLC_NUM_WORKER=n] [RNIC=interface]
         tests/utests/run_single_gpu_ut.sh [text to print first]
  SCHEDULER_BIN, SERVER_BIN, WORKER_BIN  default: bin/ut_scheduler, bin/ut_server, bin/ut_tensor_worker, built if missing
  DMLC_NUM_WORKER  worker groups (default: 1)
  RNIC             network interface to use (default: brainpf_bond0 if there)
Variables such as DMLC_ENABLE_RDMA, STEPMESH_BAKCEND and DMLC_PS_ROOT_PORT (12278) are obeyed if set.'

if [ $# -gt 1 ]; then
  printf 'stepaf: %s arguments, want at most 1\n%s\n' "$#" "$usage" >&2
  exit 2
fi
if [ $# -eq 1 ]; then
  printf '%s\n' "$1"
fi
# shellcheck source=../launch.sh
source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh"
if [ -n "${CUDA_HOME-}" ]; then
  export LD_LIBRARY_PATH="$CUDA_HOME/lib64${LD_LIBRARY_PATH+:$LD_LIBRARY_PATH}"
fi

interface brainpf_bond0
goal SCHEDULER_BIN "${SCHEDULER_BIN:-ut_scheduler}" && scheduler="$PROGRAM"
goal SERVER_BIN "${SERVER_BIN:-ut_server}" && server="$PROGRAM"
goal WORKER_BIN "${WORKER_BIN:-ut_tensor_worker}" && worker="$PROGRAM"
exec "$STEPAF" launch --role joint -n "${DMLC_NUM_WORKER:-1}" -s 1 --group-size 1 "${INTERFACE[@]}" --default-port 12278 \
  --default-van auto --default-backend auto \
  --default DMLC_INTERFACE=auto --default STEPMESH_SPLIT_QP_LAG=1 \
  --banner 'SCHEDULER_IP is {host}' --fail-on ' FAILED ' \
  --scheduler-command "$scheduler" --server-command "$server" --worker-command "$worker"
