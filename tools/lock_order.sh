#!/usr/bin/env bash
# Runs tests in a build that records the order in which goroutines take locks, and
# compares it with docs/design/locks.md. The build has copies of three files of Go's
# package sync that report each new pair "a lock was taken while another one was
# held"; nothing of it is in other builds.
#   lock_order.sh [PACKAGE...]   the packages to test, ./af/... ./kv/... and so on without
set -euo pipefail
# shellcheck source=env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
usage_if_asked 'usage: tools/lock_order.sh [PACKAGE...]
  PACKAGE  what go test tests; without one af, kv, postoffice, van, fserver/core and tests' "$@"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

out=build/lockorder
mkdir -p $out
source="$(tools/go.sh env GOROOT)/src"

# edit FILE EXPRESSION...: prints the file of Go's library after each expression of sed has changed it.
edit() {
  local file="$source/$1" text changed e
  shift
  text="$(cat "$file")"
  for e in "$@"; do
    changed="$(sed "$e" <<<"$text")"
    [ "$changed" != "$text" ] || {
      echo "lock_order: $(tools/go.sh version): $file has nothing for $e" >&2
      exit 1
    }
    text="$changed"
  done
  echo "$text"
}

edit sync/mutex.go \
  's/^func (m \*Mutex) Lock() {$/& taking(unsafe.Pointer(m), true)/' \
  's/^\treturn m.mu.TryLock()$/\tok := m.mu.TryLock(); if ok { taking(unsafe.Pointer(m), false) }; return ok/' \
  's/^func (m \*Mutex) Unlock() {$/& released(unsafe.Pointer(m))/' \
  's/^import (/import ("unsafe";/' >$out/mutex.txt
edit sync/rwmutex.go \
  's/\brw\.w\.\(Lock\|TryLock\|Unlock\)()/rw.w.mu.\1()/' \
  's/^func (rw \*RWMutex) R\?Lock() {$/& taking(unsafe.Pointer(rw), true)/' \
  's/^func (rw \*RWMutex) R\?Unlock() {$/& released(unsafe.Pointer(rw))/' >$out/rwmutex.txt
# The pool unlocks its mutex where its goroutine must not be suspended.
edit sync/pool.go 's/allPoolsMu\.\(Lock\|Unlock\)()/allPoolsMu.mu.\1()/' >$out/pool.txt
cat >$out/goid.txt <<'GO'
package runtime

func LockOrderGoid() uint64 { return getg().goid }
GO
cat >$out/order.txt <<'GO'
package sync

import (
	"runtime"
	"sync/atomic"
	"unsafe"
)

type heldLock struct {
	lock unsafe.Pointer
	at   [4]uintptr
}

var order struct {
	busy   atomic.Bool
	held   map[uint64][]heldLock
	holder map[unsafe.Pointer]uint64
	seen   map[[2][4]uintptr]bool
}

func orderBegin() {
	for !order.busy.CompareAndSwap(false, true) {
		runtime.Gosched()
	}
	if order.held == nil {
		order.held, order.holder = map[uint64][]heldLock{}, map[unsafe.Pointer]uint64{}
		order.seen = map[[2][4]uintptr]bool{}
	}
}

func place(pcs [4]uintptr) (string, int) {
	for frames, more := runtime.CallersFrames(pcs[:]), true; more; {
		var f runtime.Frame
		f, more = frames.Next()
		if len(f.Function) < 5 || f.Function[:5] != "sync." {
			return f.File, f.Line
		}
	}
	return "sync", 0
}

func taking(lock unsafe.Pointer, blocks bool) {
	var at [4]uintptr
	runtime.Callers(3, at[:])
	g := runtime.LockOrderGoid()
	orderBegin()
	for _, h := range order.held[g] {
		if key := [2][4]uintptr{h.at, at}; blocks && !order.seen[key] {
			order.seen[key] = true
			f1, l1 := place(h.at)
			f2, l2 := place(at)
			same := 0
			if h.lock == lock {
				same = 1
			}
			print("LOCKORDER\t", f1, "\t", l1, "\t", f2, "\t", l2, "\t", same, "\n")
		}
	}
	order.held[g] = append(order.held[g], heldLock{lock, at})
	order.holder[lock] = g
	order.busy.Store(false)
}

func released(lock unsafe.Pointer) {
	g := runtime.LockOrderGoid()
	orderBegin()
	if !drop(g, lock) {
		drop(order.holder[lock], lock) // taken by another goroutine
	}
	order.busy.Store(false)
}

func drop(g uint64, lock unsafe.Pointer) bool {
	held := order.held[g]
	for i := len(held) - 1; i >= 0; i-- {
		if held[i].lock != lock {
			continue
		}
		held = append(held[:i], held[i+1:]...)
		if order.held[g] = held; len(held) == 0 {
			delete(order.held, g)
		}
		return true
	}
	return false
}
GO
cat >$out/overlay.json <<JSON
{"Replace": {
  "$source/sync/mutex.go": "$out/mutex.txt",
  "$source/sync/rwmutex.go": "$out/rwmutex.txt",
  "$source/sync/pool.go": "$out/pool.txt",
  "$source/sync/order.go": "$out/order.txt",
  "$source/runtime/lockorder.go": "$out/goid.txt"
}}
JSON
[ $# -gt 0 ] || set -- ./af/... ./kv/... ./postoffice/... ./van/... ./fserver/core/...
# shellcheck disable=SC2046 # the flags are a list
tools/go.sh test $(tools/build_flags.sh -q) -overlay $out/overlay.json -count=1 -v "$@" >$out/test.txt 2>&1 || true
grep -h '^LOCKORDER' $out/test.txt | sort -u >$out/pairs.txt || true
grep -E '^(ok|FAIL|--- FAIL)' $out/test.txt | tail -50 || true
if grep -aE '^(fatal error|panic): ' $out/test.txt >&2; then
  echo "lock_order: a test program crashed, see $out/test.txt" >&2
  exit 1
fi
echo "lock_order: $(wc -l <$out/pairs.txt) pairs of places; tests that count allocations fail in this build"
LOCK_ORDER_RECORD=$PWD/$out/pairs.txt tools/go.sh test -count=1 -run '^TestLockOrder$' ./tests
