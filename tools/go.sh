#!/usr/bin/env bash
# Runs the command go ($GO if that is set) in an environment for this module, independent of the user's environment:
# modules and cgo are on, a go.work of a parent directory is ignored, and -mod=vendor applies only if there is a
# directory vendor. Go asks git for the version of a program. If git fails, as in a checkout of another user or in a
# linked worktree without its repository, go.sh disables that.
#   go.sh ARGUMENT OF GO...
set -euo pipefail
# shellcheck source=env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
go="${GO:-go}"
export GO111MODULE=on GOWORK=off CGO_ENABLED=1
flags=" $("$go" env GOFLAGS) "
if [ ! -d "$root/vendor" ]; then
  flags="${flags//-mod=vendor /-mod=readonly }"
fi
if ! git -C "$root" status --porcelain >/dev/null 2>&1; then
  flags+="-buildvcs=false"
fi
export GOFLAGS="${flags# }"
exec "$go" "$@"
