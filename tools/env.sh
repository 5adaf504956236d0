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
