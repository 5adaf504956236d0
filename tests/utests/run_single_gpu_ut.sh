#!/usr/bin/env bash
# The unit-test programs as one scheduler, one server and one worker on GPU 0.
set -euo pipefail
# shellcheck source=../../tools/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../tools/env.sh"

usage='usage: [SCHEDULER_BIN=program] [SERVER_BIN=program] [WORKER_BIN=program] [DMLC_NUM_WORKER=n] [RNIC=interface]
         tests/utests/run_single_gpu_ut.sh [text to print first]
  SCHEDULER_BIN, SERVER_BIN, WORKER_BIN  default: bin/ut_scheduler, bin/ut_server, bin/ut_tensor_worker, built if missing
  DMLC_NUM_WORKER  worker groups (default: 1)
  RNIC             network interface to use (default: brainpf_bond0 if there)
Variables such as DMLC_ENABLE_RDMA, STEPMESH_BAKCEND and DMLC_PS_ROOT_PORT (12278) are obeyed if set.'
usage_if_asked "$usage" "$@"

# shellcheck source=launch_ut.sh
source "$(dirname "${BASH_SOURCE[0]}")/launch_ut.sh"
launch_ut 1 1 "$usage" "$@"
