# Every script of this repository sources this file first. It is not run by itself.

# The script restarts itself once without the exported settings of a user's shell that change
# how bash and grep run a script: CDPATH (with it cd prints), POSIXLY_CORRECT, BASH_ENV,
# options such as noclobber, and functions, which "bash -p" does not import.
# "bash -x SCRIPT" still traces.
[[ $- = *p* ]] || exec env -u CDPATH -u POSIXLY_CORRECT -u BASH_ENV -u ENV -u SHELLOPTS -u BASHOPTS -u GREP_OPTIONS \
  bash -p"${-//[!xv]/}" "$0" "$@"

# Go, pip and other programs keep files below HOME. If the environment has no HOME, bash
# takes it from the list of users.
[ -n "${HOME-}" ] || unset HOME
export HOME=~

# usage_if_asked USAGE [ARGUMENT...]: prints the usage and ends the script, if the first
# argument asks for it.
usage_if_asked() {
  case "${2-}" in
    -h | --help)
      printf '%s\n' "$1"
      exit 0
      ;;
  esac
}

# words LIST: prints a line for each option of a list for the C compiler, such as CGO_CFLAGS, in Go's format: a quoted
# part may have blanks.
words() { xargs -r printf '%s\n' <<<"$1"; }

# apt_install PACKAGE...: installs packages of Debian or Ubuntu. A lock serializes concurrent calls on this host, and
# apt-get waits up to 10 minutes for dpkg's locks of other programs.
apt_install() {
  local as_root=() each
  [ "$(id -u)" -eq 0 ] || as_root=(sudo)
  (
    flock 9
    for each in 'update' "install -y --no-install-recommends $*"; do
      # shellcheck disable=SC2086 # a list of words without blanks
      ${as_root[@]+"${as_root[@]}"} env DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=600 $each 9>&-
    done
  ) 9</var/lib/dpkg
}
