#!/usr/bin/env bash
# Fetches cuda.h and the stub of libcuda.so from Debian's or Ubuntu's nvidia-cuda-dev into build/cuda, where make finds
# them. The whole package would install 5 GB of unused libraries; its 750 MB are downloaded all the same, and apt checks
# them. Nothing outside build/ changes, not even the sources of apt. If there is no such package, the status is 77, and
# a line gives the reason.
set -euo pipefail
# shellcheck source=env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
usage_if_asked 'usage: tools/cuda_headers.sh   (as tools/install_deps.sh cuda calls it)' "$@"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ $# -gt 0 ]; then
  echo "cuda_headers: want no argument, not $*" >&2
  exit 2
fi
target="$PWD/build/cuda"
if [ "${USE_CUDA-}" = 0 ]; then
  echo "install_deps: no CUDA: USE_CUDA=0" >&2
  exit 77
fi
if USE_CUDA=1 make -s cuda-ready >/dev/null 2>&1; then
  echo "install_deps: CUDA is here"
  exit 0
fi
skip() {
  echo "install_deps: CUDA cannot be fetched: $1" >&2
  exit 77
}

command -v apt-get >/dev/null 2>&1 || skip "there is no apt-get here; install CUDA by hand and set CUDA_HOME"
component=non-free
grep -qs '^ID=ubuntu' /etc/os-release && component=multiverse
mkdir -p build
work="$(mktemp -d "$PWD/build/cuda.XXXXXX")"
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial"

key=
for k in debian-archive-keyring ubuntu-archive-keyring; do
  [ ! -f "/usr/share/keyrings/$k.gpg" ] || key="[signed-by=/usr/share/keyrings/$k.gpg] "
done
# The mirrors that apt uses, with another component.
# shellcheck disable=SC2016 # apt's own variables
apt-get indextargets --format '$(SITE) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' |
  awk -v c="$component" -v k="$key" '$3 == "main" && /debian|ubuntu/ { print "deb " k $1 " " $2 " " c }' | sort -u >"$work/sources.list"
[ -s "$work/sources.list" ] || skip "apt has no source of Debian or Ubuntu"
private() {
  apt-get -q -o "Dir::Etc::SourceList=$work/sources.list" -o Dir::Etc::SourceParts=/dev/null -o "Dir::State::Lists=$work/lists" \
    -o Dir::Cache::PkgCache= -o Dir::Cache::SrcPkgCache= -o Debug::NoLocking=1 -o APT::Sandbox::User="$(id -un)" "$@"
}
private update >"$work/log" 2>&1 || {
  cat "$work/log" >&2
  skip "no answer from $(cut -d' ' -f2- "$work/sources.list" | head -n 1)"
}
echo "install_deps: fetching nvidia-cuda-dev ($component)"
(cd "$work" && private download nvidia-cuda-dev) >"$work/log" 2>&1 || {
  cat "$work/log" >&2
  skip "the package nvidia-cuda-dev is not in $component"
}
dpkg-deb --fsys-tarfile "$work"/nvidia-cuda-dev_*.deb |
  tar -x -C "$work" --wildcards ./usr/include/cuda.h './usr/lib/*/stubs/libcuda.so' ./usr/share/doc/nvidia-cuda-dev/copyright
rm -rf "$target"
mkdir -p "$target/include" "$target/lib64/stubs"
cp "$work/usr/include/cuda.h" "$target/include/"
cp "$work"/usr/lib/*/stubs/libcuda.so "$target/lib64/stubs/"
cp "$work/usr/share/doc/nvidia-cuda-dev/copyright" "$target/"
echo "install_deps: CUDA $(sed -nE 's/^#define CUDA_VERSION ([0-9]+)$/\1/p' "$target/include/cuda.h") is in build/cuda"
