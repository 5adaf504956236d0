# Sourced first by every script of this repository; never run.

# The script starts again, once, without what a user's shell may have exported and what
# changes how bash and grep read a script: CDPATH (cd then prints), POSIXLY_CORRECT,
# BASH_ENV, options such as noclobber, and functions, which "bash -p" does not import.
# "bash -x SCRIPT" still traces.
[[ $- = *p* ]] || exec env -u CDPATH -u POSIXLY_CORRECT -u BASH_ENV -u ENV -u SHELLOPTS -u BASHOPTS -u GREP_OPTIONS \
  bash -p"${-//[!xv]/}" "$0" "$@"

# Go, pip and others keep files below HOME; bash takes it from the list of users where
# the environment has none.
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
