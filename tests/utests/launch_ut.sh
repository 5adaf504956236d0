# Shared by the launch scripts of the unit-test programs; sourced, never run.

# shellcheck source=../launch.sh
source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh"

# launch_ut GROUP_SIZE LAG USAGE [TEXT]: one scheduler and groups of servers and workers.
launch_ut() {
  local group_size="$1" lag="$2" usage="$3" scheduler server worker
  shift 3
  if [ $# -gt 1 ]; then
    misuse "$# arguments, want at most 1" "$usage"
  fi
  if [ $# -eq 1 ]; then
    printf '%s\n' "$1"
  fi
  if [ -n "${CUDA_HOME-}" ]; then
    export LD_LIBRARY_PATH="$CUDA_HOME/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
  fi
  interface brainpf_bond0
  goal SCHEDULER_BIN "${SCHEDULER_BIN:-ut_scheduler}" && scheduler="$PROGRAM"
  goal SERVER_BIN "${SERVER_BIN:-ut_server}" && server="$PROGRAM"
  goal WORKER_BIN "${WORKER_BIN:-ut_tensor_worker}" && worker="$PROGRAM"
  exec "$STEPAF" launch --default STEPAF_FOREIGN=1 --role joint -n "${DMLC_NUM_WORKER:-1}" -s 1 --group-size "$group_size" "${INTERFACE[@]}" --default-port 12278 \
    --default-van auto --default-backend auto \
    --default DMLC_INTERFACE=auto --default STEPMESH_SPLIT_QP_LAG="$lag" \
    --banner 'SCHEDULER_IP is {host}' --fail-on ' FAILED ' \
    --scheduler-command "$scheduler" --server-command "$server" --worker-command "$worker"
}
