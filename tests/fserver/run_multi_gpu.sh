#!/usr/bin/env bash
# A group of processes, one for each GPU: this machine's share of a cluster, or
# with ROLE=joint all of it.
set -euo pipefail
# shellcheck source=../../tools/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../tools/env.sh"

usage='usage: [ROLE=role] [RNIC=interface] [BIN=test] [NUM_WORKER=n] [NUM_SERVER=n] [NODE_RANK=n] [GROUP_SIZE=n] [GPUS=list]
         tests/fserver/run_multi_gpu.sh [scheduler ip] [argument...]
  ROLE        server        scheduler and first server node (default); all arguments go to the servers
              server-slave  one more server node; needs the scheduler ip, and NODE_RANK from 1
              worker        a worker node; needs the scheduler ip
              joint         scheduler, all servers and all workers on this machine; no arguments
  RNIC        network interface to use (default: brainpf_bond0 if there, else the first that is not loopback)
  BIN         test beside this script, without .py (default: test_fserver)
  NUM_WORKER, NUM_SERVER  nodes in the cluster, the same everywhere (default: 1)
  NODE_RANK   rank of this node within its role (default: 0)
  GROUP_SIZE  processes of a node, the same everywhere (default: 8; joint: one for each GPU, at most 8; 2 without)
  GPUS        GPU of each process of a node, as in 0,1,0,1: some may share one (default: 0,1,... up to GROUP_SIZE)
Variables such as DMLC_ENABLE_RDMA, STEPMESH_BAKCEND and DMLC_PS_ROOT_PORT (8123) are obeyed if set.'
usage_if_asked "$usage" "$@"

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
role="${ROLE:-server}"
case "$role" in
  server | worker | server-slave | joint) ;;
  *)
    printf 'stepaf: ROLE=%s: want server, worker, server-slave or joint\n%s\n' "$role" "$usage" >&2
    exit 2
    ;;
esac
if [ "$role" = worker ] || [ "$role" = server-slave ]; then
  if [ -z "${1-}" ]; then
    printf 'stepaf: ROLE=%s needs the ip of the scheduler as its first argument; the server script prints it first\n%s\n' "$role" "$usage" >&2
    exit 2
  fi
fi
# shellcheck source=../launch.sh
source "$here/../launch.sh"

interface brainpf_bond0
test_program "$here" "${BIN:-test_fserver}"
options=(--role "$role" -n "${NUM_WORKER:-1}" -s "${NUM_SERVER:-1}" "${INTERFACE[@]}" --default-port 8123
  --default DMLC_INTERFACE=auto --default NCCL_DEBUG=warning
  --default STEPMESH_SPLIT_QP_LAG=1 --default STEPMESH_BIND_CPU_CORE=1 --fserver --fail-on ' FAILED ')
case "$role" in
  server)
    options+=(--banner 'Run server and scheduler, scheduler ip {host} ')
    ;;
  worker)
    options+=(--host "$1" --banner 'Run worker with scheduler ip: {host}')
    shift
    ;;
  server-slave)
    options+=(--host "$1" --banner 'Run server with scheduler ip: {host}')
    shift
    ;;
  joint)
    set --
    options+=(--banner 'Run scheduler, server, and worker jointly' --group-size "${GROUP_SIZE:-auto}"
      --default-van auto --default-backend auto)
    ;;
esac
[ -z "${GPUS-}" ] || options+=(--gpus "$GPUS")
if [ "$role" != joint ]; then
  options+=(--node-rank "${NODE_RANK:-0}" --group-size "${GROUP_SIZE:-${DMLC_GROUP_SIZE:-8}}"
    --default-van ibverbs --default-backend GPU)
fi
exec "$STEPAF" launch --default STEPAF_FOREIGN=1 "${options[@]}" ${NOTES[@]+"${NOTES[@]}"} -- "${COMMAND[@]}" "$@"
