#!/usr/bin/env bash
# Runs the tests that need RDMA devices in a virtual machine of tools/rdma-vm. Everything is compiled here. One machine
# is booted, and runs one package after the other. A package in which no test passed, because all were skipped, has
# failed.
set -euo pipefail
# shellcheck source=env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage='usage: tools/rdma_test.sh [OPTION...] [PACKAGE...] [-- OPTIONS OF THE TEST BINARIES]
  PACKAGE       default: those of van/rdma and tests/rdma that have tests of devices
  --run REGEXP  only these tests
  --race        with the race detector
  --limit S     for each package, in seconds (default 1200)
  --timeout S   for all, with the boot (default 2400)
  --vm OPTIONS  of tools/rdma-vm (default: --cpus 4 --mem 2048 --hosts 2; later ones win)
  -v            show the output of packages that pass, too
  --ready       only say whether the machine is prepared: status 0, or 1 and why not
The tests run in the directories of their packages. Whatever they write is lost; their
output is kept in build/rdma. STEPAF_BIN is the directory of bin/stepaf and the test
programs, which are built if a package of tests/ (but testdata) or tools/ is to run.'

say() { echo "rdma-test: $*"; }
stop() {
  say "$*" >&2
  exit 2
}
number() { [[ $2 =~ ^[1-9][0-9]{0,5}$ ]] || stop "$1 wants a number of seconds, not '$2'"; }

ready() {
  if [ "${USE_RDMA-}" = 0 ]; then
    say "not running: USE_RDMA=0" >&2
  elif ! tools/rdma-vm --ready; then
    say "not running: tools/install_deps.sh rdma-vm prepares the virtual machine" >&2
  else
    return 0
  fi
  return 1
}

run='' devices='' race=() limit=1200 timeout=2400 vm=() verbose='' packages=()
while [ $# -gt 0 ]; do
  case "$1" in
    --run | --limit | --timeout | --vm)
      [ $# -gt 1 ] || stop "$1 wants a value"
      case "$1" in
        --run) run="$2" ;;
        --limit) number "$1" "$2" && limit="$2" ;;
        --timeout) number "$1" "$2" && timeout="$2" ;;
        --vm) read -r -a vm <<<"$2" ;;
      esac
      shift
      ;;
    --race) race=(-race) ;;
    -v) verbose=1 ;;
    --ready)
      ready
      exit
      ;;
    -h | --help)
      echo "$usage"
      exit 0
      ;;
    --)
      shift
      break
      ;;
    -*)
      echo "$usage" >&2
      stop "unknown option: $1"
      ;;
    *) packages+=("$1") ;;
  esac
  shift
done
arguments=("$@")
ready || exit 1

# ---------------------------------------------------------------------------
# Compiling

begun=$SECONDS
flags="$(USE_RDMA=1 tools/build_flags.sh -q)"
list='{{if or .TestGoFiles .XTestGoFiles}}{{.ImportPath}} {{.Dir}}{{end}}'
if [ ${#packages[@]} -eq 0 ]; then
  # Tests on simulated devices run with the other tests.
  [ "$run" ] || devices='^TestDevice'
  # shellcheck disable=SC2086 # the flags are a list
  found="$(tools/go.sh list $flags -f "$list" ./van/rdma/... ./tests/... | grep -E '/(van|tests)/rdma(/| )' || true)"
else
  # shellcheck disable=SC2086
  found="$(tools/go.sh list $flags -f "$list" "${packages[@]}")"
fi
[ -n "$found" ] || stop "there are no tests in ${packages[*]:-van/rdma and tests/rdma}"

work="$(mktemp -d "${TMPDIR:-/tmp}/rdma-test.XXXXXX")"
trap 'rm -rf "$work"' EXIT
mkdir "$work/bin" "$work/results"
mkdir -p build/rdma
programs="$PWD/bin"
[ ${#race[@]} -eq 0 ] || programs="$PWD/build/rdma/race"

declare -A paths # of packages, by their names here
names=() want_programs=''
while read -r path dir; do
  short="${path#*/*/*/}"
  name="${short//\//_}"
  paths[$name]="$short"
  rm -f "build/rdma/$name.log"
  case "$short" in
    tests/testdata/*) ;;
    tests/* | tools/*) want_programs=1 ;;
  esac
  # shellcheck disable=SC2086
  tools/go.sh test -c $flags ${race[@]+"${race[@]}"} -o "$work/bin/$name" "$path"
  names+=("$name")
  only=''
  [ "$short" != van/rdma ] || only="$devices"
  echo "$name $dir $only" >>"$work/list"
done <<<"$found"
if [ "$want_programs" ]; then
  make --no-print-directory programs USE_RDMA=1 BIN="$programs" BUILDFLAGS="${race[*]-}"
fi
say "compiled ${#names[@]} packages in $((SECONDS - begun)) s"

# ---------------------------------------------------------------------------
# Running

# The text of this function is sent to the machine. For each package it prints a line "ran NAME STATUS SECONDS
# PROCESSES-LEFT".
in_guest() { # DIRECTORY LIMIT OPTION...
  local work=$1 limit=$2 name dir only group begun status left try
  shift 2
  echo "on Linux $(uname -r) $(cd /sys/class/infiniband && echo *)"
  while read -r name dir only; do
    begun=$SECONDS status=0
    group=/sys/fs/cgroup$(sed -n 's/^0:://p' /proc/self/cgroup)/$name
    mkdir "$group"
    (
      echo "$BASHPID" >"$group/cgroup.procs"
      cd "$dir"
      exec timeout -k 5 $((limit + 20)) "$work/bin/$name" -test.v=test2json -test.paniconexit0 \
        -test.timeout "${limit}s" ${only:+-test.run "$only"} "$@" </dev/null >"$work/results/$name" 2>&1
    ) || status=$?
    left=$(wc -l <"$group/cgroup.procs")
    echo 1 >"$group/cgroup.kill"
    for ((try = 0; try < 50; try++)); do
      grep -q '^populated 0' "$group/cgroup.events" && break
      sleep 0.1
    done
    echo "ran $name $status $((SECONDS - begun)) $left"
  done <"$work/list"
}

# count FILE: a line "PASSED FAILED SKIPPED" from the output of a test binary, counting
# tests that have no subtests; then those that did not pass, and why they were skipped.
count() {
  [ -e "$1" ] || set -- /dev/null
  awk '
    sub(/.*\026=== RUN +/, "") { begun[++runs] = $0; why = ""; next }
    match($0, /\026--- (PASS|FAIL|SKIP): /) {
      result = substr($0, RSTART + 5, 4)
      name = $0
      sub(/.*\026--- (PASS|FAIL|SKIP): /, "", name)
      sub(/ \([0-9.]+s\)$/, "", name)
      results[name] = result
      if (result == "SKIP") notes[++n] = "skipped: " name (why == "" ? "" : ": " why)
      if (result == "FAIL") notes[++n] = "failed: " name
      while (sub(/\/[^\/]*$/, "", name)) parent[name] = 1
    }
    /\026/ { why = ""; next }
    why == "" && match($0, /^ *[^ ]+\.go:[0-9]+: /) { why = substr($0, RLENGTH + 1) }
    END {
      for (name in results) if (!(name in parent)) sum[results[name]]++
      print sum["PASS"] + 0, sum["FAIL"] + 0, sum["SKIP"] + 0
      for (i = 1; i <= n; i++) print notes[i]
      for (i = 1; i <= runs; i++) if (!(begun[i] in results)) print "did not end: " begun[i]
    }' "$1"
}

passed=0 failed=0 skipped=0 bad=()

# report NAME SECONDS PROBLEM: prints the result of a package; an empty problem means success.
report() {
  local name=$1 seconds=$2 problem=$3 p f s verdict=ok notes log="build/rdma/$1.log"
  {
    read -r p f s
    notes="$(cat)"
  } < <(count "$work/results/$name")
  tr -d '\026' 2>/dev/null <"$work/results/$name" >"$log" || true
  passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
  if [ -z "$problem" ] && [ "$p" -eq 0 ]; then
    if [ "$s" -gt 0 ]; then
      problem='nothing but skipped tests'
    elif [ -z "$run" ]; then
      problem='no tests'
    else
      notes="no test is called $run"
    fi
  fi
  [ -z "$problem" ] || verdict=FAIL bad+=("${paths[$name]}")
  printf '%-4s %s: %d passed, %d failed, %d skipped, %d s%s\n' "$verdict" "${paths[$name]}" "$p" "$f" "$s" "$seconds" "${problem:+: $problem}"
  [ -z "$notes" ] || echo "       ${notes//$'\n'/$'\n'       }"
  if [ "$problem" ]; then
    echo "--- the end of $log"
    [ "$(wc -l <"$log")" -le 150 ] || grep -m 1 -A 12 '^panic: ' "$log" || true
    tail -n 150 "$log"
    echo '---'
  elif [ "$verbose" ]; then
    cat "$log"
  fi
}

begun=$SECONDS
[ -z "$run" ] || arguments=(-test.run "$run" ${arguments[@]+"${arguments[@]}"})
export STEPAF_BIN="$programs"
exec 3< <(exec tools/rdma-vm --cpus 4 --mem 2048 --hosts 2 --timeout "$timeout" --share "$work/results" ${vm[@]+"${vm[@]}"} -- \
  bash -c "$(declare -f in_guest); in_guest \"\$@\"" in_guest "$work" "$limit" ${arguments[@]+"${arguments[@]}"})
machine=$!
trap 'kill "$machine" 2>/dev/null || true; wait "$machine" 2>/dev/null || true; rm -rf "$work"' EXIT
while read -r what name rest; do
  case "$what" in
    on) say "booted in $((SECONDS - begun)) s: $name $rest" ;;
    ran)
      read -r status seconds left <<<"$rest"
      problem=
      case "$status" in
        0) ;;
        124 | 137) problem="no end after $seconds s" ;;
        *) problem="status $status" ;;
      esac
      report "$name" "$seconds" "$problem"
      [ "$left" -eq 0 ] || echo "       note: processes still running: $left"
      names=("${names[@]:1}")
      ;;
    *) echo "$what $name $rest" ;;
  esac
done <&3
status=0
wait "$machine" || status=$?
trap 'rm -rf "$work"' EXIT

for name in ${names[@]+"${names[@]}"}; do
  if [ -e "$work/results/$name" ]; then
    report "$name" $((SECONDS - begun)) "the virtual machine ended, status $status"
  else
    echo "FAIL ${paths[$name]}: did not run, the virtual machine ended before, status $status"
    bad+=("${paths[$name]}")
  fi
done
[ "$status" -eq 0 ] || [ ${#bad[@]} -gt 0 ] || bad+=("virtual machine, status $status")
if [ $((passed + failed + skipped)) -eq 0 ] && [ ${#bad[@]} -eq 0 ]; then
  bad+=("nothing has run")
fi
totals="$passed passed, $failed failed, $skipped skipped, $((SECONDS - begun)) s in the virtual machine"
if [ ${#bad[@]} -gt 0 ]; then
  say "FAIL (${bad[*]}): $totals"
  exit 1
fi
say "ok: $totals"
