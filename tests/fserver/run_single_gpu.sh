#!/usr/bin/env bash
# One scheduler, one server and one worker on this machine, all on GPU 0.
# See usage below; tests/fserver/run_multi_gpu.sh does more.
set -euo pipefail
# shellcheck source=../../tools/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../tools/env.sh"

usage='usage: [RNIC=interface] [BIN=test] [ROLE=joint] tests/fserver/run_single_gpu.sh [argument...]
  RNIC  network interface to use (default: loopback without RDMA, else the first other one)
  BIN   test beside this script, without .py (default: test_fserver)
  arguments go to server and worker
Variables such as DMLC_ENABLE_RDMA, STEPMESH_BAKCEND and DMLC_PS_ROOT_PORT (8123) are obeyed if set.'
usage_if_asked "$usage" "$@"

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=../launch.sh
source "$here/../launch.sh"

[ "${ROLE:-joint}" = joint ] || misuse "ROLE=$ROLE: this script starts all roles; use tests/fserver/run_multi_gpu.sh for one of them" "$usage"
interface ''
test_program "$here" "${BIN:-test_fserver}"

# Memory near the GPU, where the machine has NUMA and permits it.
near=()
if numactl -m 0 true >/dev/null 2>&1; then
  near=(numactl -m 0)
fi

exec "$STEPAF" launch --default STEPAF_FOREIGN=1 --role joint -n 1 -s 1 --group-size 1 "${INTERFACE[@]}" --default-port 8123 \
  --default-van auto --default-backend auto \
  --default DMLC_INTERFACE=auto --default STEPMESH_SPLIT_QP_LAG=0 --default STEPMESH_BIND_CPU_CORE=1 \
  --default server:STEPMESH_CPU_START_OFFSET=10 --default worker:STEPMESH_CPU_START_OFFSET=15 --default PS_VERBOSE=1 \
  --fserver --fail-on ' FAILED ' ${NOTES[@]+"${NOTES[@]}"} -- ${near[@]+"${near[@]}"} "${COMMAND[@]}" "$@"
