#!/usr/bin/env bash
# Runs the tests in two parts. Each test runs in at least one of them, except some on emulated RDMA devices.
#   test.sh        the part of "make test": all packages, and the Python tests with PyTorch
#   test.sh long   the part of "make test-long": the race detector, and the tests that the first part leaves out. This part
#                  has two halves, which run side by side: "test.sh computed", steps without limits of real time, and
#                  "test.sh real", steps with such limits
#   test.sh list   prints the packages that run with the race detector, and the tests that run in full in the second part only
# A step that fails does not keep the next ones from running, unless nothing can be built.
# The last lines say how each step ended.
#
# Which part a test belongs to:
#   - A test that takes more than about 10 s of a processor, or repeats a shorter test many times, calls
#     testing.Short. "make test" runs it with -short: it skips itself or makes fewer rounds. test-long finds
#     these tests by that call, and runs them in full. Some tests of tests/rdma run only in
#     "make rdma-test", since -short is set in the virtual machine of test-long.
#   - "make test" runs without the race detector, which needs all packages compiled again. In test-long the packages whose
#     code runs in several goroutines run with it, and so do all simulated plans and some plans on real processes.
set -euo pipefail
# shellcheck source=env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
usage_if_asked 'usage: tools/test.sh [long | computed | real | list]
  no argument  what "make test" runs
  long         what "make test" leaves out
  computed     the half of long without limits of real time
  real         the half of long with limits of real time
  list         which package and test runs where' "$@"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Packages that never run with the race detector: rules without goroutines, tables, command lines and documents; programs
# and scripts, which are other processes. Some tests of tests/processes, tests/local and tests/sim run with it in steps of their own.
plain='/(tests|tests/(benchmark|examples|fserver|utests|internal|limits|local|processes|golden|rdma|replay|sim|soak|testdata|testlimit|vansession)(/.*)?|tools(/.*)?'
plain+='|postoffice/membership|van/(auth|drop|env|rdma/choose|stack)|internal/(affinity|clock|datamsg|fifo|freeport|hostaddr|limits))$'

# The packages that take longest are started first, so that no processor is idle at the end.
longest=(tests/processes tests van/zmq internal/cluster van/local van/rdma tests/faults tests/sim af/window af/collective kv/session af kv)

# Their tests wait most of the time, so more packages are tested at once than there are processors.
processors=$(nproc 2>/dev/null || echo 2)

# The limit of "go test" for a package, which takes minutes, and several times as long on a slow machine. tests/testlimit ends a test
# that hangs much earlier.
backstop=60m

module=$(sed -n 's/^module //p' go.mod)

# The Python module is position-independent code. With the same options the packages that it needs are compiled once for it
# and for all programs and tests without the race detector. That detector does not work at every address that the kernel may
# give to such code. Compiling takes a sixth less time without debug information (DWARF), and a fifth less if the compiler
# collects no garbage before it needs 700 MiB.
GOFLAGS="$(tools/go.sh env GOFLAGS) -trimpath -buildmode=pie -gcflags=all=-dwarf=false '-toolexec=env GOGC=off GOMEMLIMIT=700MiB'"
export GOFLAGS
with_race=(-race -buildmode=exe)

# The race detector makes a process wait for a second at its end, unless this is set.
export GORACE="atexit_sleep_ms=0 ${GORACE-}"

work="$(mktemp -d "${TMPDIR:-/tmp}/test.XXXXXX")"
declare -A groups=() # by the first step of each: the process groups of the steps that run beside the others
stop_groups() {
  local group
  for group in "${groups[@]}"; do kill -- "-$group" 2>/dev/null || true; done
}
trap 'stop_groups; rm -rf "$work"' EXIT

# packages: those with tests, the longest first.
packages() {
  local all first
  # shellcheck disable=SC2046 # the flags are a list
  all=$(tools/go.sh list $(tools/build_flags.sh -q) -f '{{if or .TestGoFiles .XTestGoFiles}}{{.ImportPath}}{{end}}' ./...)
  first=$(printf "$module/%s\n" "${longest[@]}")
  grep -Fx -e "$all" <<<"$first"
  grep -vFx -e "$first" <<<"$all"
}
race_packages() { packages | grep -vE "$plain"; }

# long_tests: a line "DIRECTORY TEST|TEST..." for each directory with tests that call testing.Short. tests/rdma and tests
# named TestDevice... need RDMA devices; the step machine runs them.
long_tests() {
  grep -rl 'testing\.Short()' --include='*_test.go' . | grep -v '^\./tests/rdma/' | sort | xargs awk '
    /^func Test/ { name = $2; sub(/\(.*/, "", name) }
    /^}/ { name = "" }
    /testing\.Short\(\)/ && name != "" && name !~ /^TestDevice/ {
      directory = FILENAME
      sub(/^\.\//, "", directory)
      sub(/\/[^\/]*$/, "", directory)
      if (!(directory in tests)) order[++n] = directory
      if (!((directory, name) in seen)) tests[directory] = tests[directory] (tests[directory] == "" ? "" : "|") name
      seen[directory, name] = 1
    }
    END { for (i = 1; i <= n; i++) print order[i], tests[order[i]] }'
}

# go_test OPTION...: runs "go test" with the options of this machine. Packages were vetted by "make check".
go_test() {
  local flags
  flags=$(tools/build_flags.sh)
  # shellcheck disable=SC2086 # the flags are a list
  (set -x && tools/go.sh test -vet=off $flags "$@")
}

# The steps. Each is run by "step NAME".
install() { tools/install_deps.sh; }
check() { make --no-print-directory fmtcheck vet; }
go_tests() {
  local list && mapfile -t list < <(packages)
  go_test -short -p $((processors * 2)) -timeout "$backstop" "${list[@]}" && tools/go.sh test -C tests/thirdparty -vet=off -timeout "$backstop" ./...
}
python() { # the check compiles the packages that the module needs
  tools/python/test_deps.sh torch || return
  until [ -e "$work/check.ended" ]; do sleep 0.5; done
  tools/python/test.sh torch -- --short
}

variants() { GOGC=400 make --no-print-directory lint check-variants; }
race() { # none is shortened
  local list && mapfile -t list < <(race_packages)
  go_test "${with_race[@]}" -p $((processors * 2)) -timeout "$backstop" "${list[@]}"
}
full() { # what -short shortens in the packages that never run with the race detector, but for tests/processes, which processes runs
  local directory tests names='' directories=()
  while read -r directory tests; do
    if [ "$directory" != tests/processes ] && grep -qE "$plain" <<<"/$directory"; then
      directories+=("./$directory") names+="|$tests"
    fi
  done < <(long_tests)
  go_test -timeout "$backstop" -run "^(${names#|})\$" "${directories[@]}"
}
processes() { # the race detector triples the processor time of a plan, so it watches the brief ones; "make test" runs the other tests
  local status=0
  go_test -timeout "$backstop" -run '^TestPlans$' ./tests/processes || status=1
  go_test "${with_race[@]}" -short -timeout "$backstop" -run '^TestPlans$' ./tests/processes -leg=shm || status=1
  go_test "${with_race[@]}" -timeout "$backstop" ./tests/local || status=1
  return $status
}
simulated() { go_test "${with_race[@]}" -timeout "$backstop" -run '^Test(Plans|Collectives|RDMA)$' ./tests/sim; }
seeds() { make --no-print-directory sim SEEDS=300; }
faults() { make --no-print-directory simfaults; }
machine() { tools/rdma_test.sh -- -test.short; }
pythons() {
  local status=0
  tools/python/test.sh arrays old || status=1
  tools/python/test.sh torch -- -m long || status=1
  return $status
}

computed=(simulated seeds faults variants) # the steps that only compute
results=() failed=''
# run NAME: runs a step in a shell of its own. NAME.ended gets its status, seconds, and seconds of processor time.
run() (
  status=0 begun=$SECONDS
  "$1" || status=$?
  times >"$work/$1.times" # of this shell, then of its children: user and system time
  echo "$status $((SECONDS - begun)) $(awk -F '[ms ]+' 'NR == 2 { printf "%.0f", 60 * ($1 + $3) + $2 + $4 }' "$work/$1.times")" >"$work/$1.ended"
)
# note NAME [HOW]: notes how a step ended.
note() {
  local status=unknown took=? used=?
  read -r status took used <"$work/$1.ended" || true
  if [ "$status" = 0 ]; then
    results+=("test: ok   $1 $took s, $used s of processors${2-}")
    return 0
  fi
  results+=("test: FAIL $1 $took s, $used s of processors${2-}: status $status")
  failed+=" $1"
  return 1
}
# step NAME: runs a step, and notes how it ended.
step() {
  echo "--- test: $1"
  run "$1" || true
  note "$1"
}
# begin NICENESS NAME...: starts these steps, one after the other, beside the others. They have a process group, which
# this script kills if it ends before.
begin() {
  set -m
  (
    renice -n $(($(nice) + $1)) -p "$BASHPID" >/dev/null || true
    for name in "${@:2}"; do run "$name" >"$work/$name.log" 2>&1 || true; done
  ) </dev/null &
  set +m
  groups[$2]=$!
}
# collect NAME...: waits for the steps that one begin started, prints their output, and notes how they ended.
collect() {
  local name
  wait "${groups[$1]}" || true
  unset "groups[$1]"
  for name; do
    echo "--- test: $name"
    cat "$work/$name.log" || true
    note "$name" ', beside others' || true
  done
}
# real_steps runs the half of long that has limits of real time. Each step waits a third of its time, so two of them
# run at a time: one in front, the others beside it, one after the other.
real_steps() {
  local why beside=(processes full)
  if why="$(tools/python/test.sh --ready 2>&1)"; then beside+=(pythons); else skip pythons "$why"; fi
  begin 0 "${beside[@]}"
  if why="$(tools/rdma_test.sh --ready 2>&1)"; then step machine || true; else skip machine "$why"; fi
  step race || true
  collect "${beside[@]}"
}
# skip NAME REASON
skip() { results+=("test: SKIPPED $1: $2"); }

case "${1-}" in
  '')
    # All tests wait a part of their time, and Python's are installed while others compile. After a failed check nothing
    # else runs.
    if step install; then
      begin 0 python
      if step check; then
        step go_tests || true
        collect python
      fi
    fi
    ;;
  long)
    begin 15 "${computed[@]}"
    real_steps
    collect "${computed[@]}"
    ;;
  computed)
    for name in "${computed[@]}"; do step "$name" || true; done
    ;;
  real) real_steps ;;
  list)
    race_packages | sed "s|^$module/|race   |"
    long_tests | sed 's/^/full   /'
    exit
    ;;
  *)
    echo "test: want no argument, long, computed, real or list, not $*" >&2
    exit 2
    ;;
esac

echo '--- test: summary'
printf '%s\n' "${results[@]}"
if [ -z "${1-}" ]; then
  cat <<END
test: left out, run by "make test-long":
  the race detector: go test -race PACKAGE (tools/test.sh list has the packages)
  tests that -short shortens, in full: $(long_tests | sed 's/^[^ ]* //' | tr '\n|' '  ')
  all plans on real processes: go test -run TestPlans ./tests/processes
  300 seeds: make sim SEEDS=300; planted faults: make simfaults
  staticcheck, and vet with the build tag nordma: make lint check-variants
  RDMA devices in a virtual machine: make rdma-deps rdma-test
  Python tests that are marked long, with NumPy and JAX, and with Python below 3.10: make python-deps python-test
END
fi
[ -z "$failed" ] || { echo "test: FAIL:$failed"; exit 1; }
echo 'test: ok'
