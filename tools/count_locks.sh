#!/usr/bin/env bash
# Runs "stepaf bench software" in a build that counts the lock operations of sync.Mutex and sync.RWMutex. The build has
# copies of two files of Go's package sync, in which locking calls a hook; other builds do not have it. Its times are
# longer than those of an ordinary build: only the lock operations are meaningful.
#   count_locks.sh [OPTION of bench software...]
set -euo pipefail
# shellcheck source=env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
usage_if_asked 'usage: tools/count_locks.sh [OPTION...]
The options are those of "stepaf bench software"; "stepaf help bench software" lists them.' "$@"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

out=build/locks
mkdir -p $out
source="$(tools/go.sh env GOROOT)/src"

# hook FILE FUNCTION...: prints the file with a call of the hook at the start of each function.
hook() {
  local file="$1" expressions=() f
  shift
  for f in "$@"; do
    grep -qF "$f {" "$source/$file" || {
      echo "count_locks: $(tools/go.sh version): no \"$f\" in $file" >&2
      exit 1
    }
    expressions+=(-e "s/^$(printf '%s' "$f" | sed 's/[*]/\\*/g') {\$/& if hook := ${HOOK}; hook != nil { hook() };/")
  done
  sed "${expressions[@]}" "$source/$file"
}

HOOK=OnLock hook internal/sync/mutex.go 'func (m *Mutex) Lock()' 'func (m *Mutex) TryLock() bool' >$out/mutex.txt
echo '// OnLock is called by who takes a lock.
var OnLock func()' >>$out/mutex.txt
HOOK=onLock hook sync/rwmutex.go 'func (rw *RWMutex) RLock()' 'func (rw *RWMutex) TryRLock() bool' >$out/rwmutex.txt
cat >$out/onlock.txt <<'GO'
package sync

import isync "internal/sync"

var onLock func()

// OnLock makes f be called each time that a lock is taken.
func OnLock(f func()) { onLock, isync.OnLock = f, f }
GO
cat >$out/overlay.json <<JSON
{"Replace": {
  "$source/internal/sync/mutex.go": "$out/mutex.txt",
  "$source/sync/rwmutex.go": "$out/rwmutex.txt",
  "$source/sync/onlock.go": "$out/onlock.txt"
}}
JSON
# shellcheck disable=SC2046 # the flags are a list
tools/go.sh build $(tools/build_flags.sh -q countlocks) -overlay $out/overlay.json -o $out/stepaf ./tools/stepaf
exec $out/stepaf bench software "$@"
