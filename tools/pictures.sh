#!/usr/bin/env bash
# Makes the pictures of the documents, docs/pictures/*.svg, from their text sources:
# .dot with Graphviz, .puml with PlantUML, .gp with gnuplot. A picture begins with the
# hash of its sources, which a test compares, so a picture that is older than its
# source is found.
#   pictures.sh [NAME...]   all without names
set -euo pipefail
# shellcheck source=env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
usage_if_asked 'usage: tools/pictures.sh [NAME...]
  NAME  a picture of docs/pictures without its ending; all without one' "$@"
cd "$(dirname "${BASH_SOURCE[0]}")/../docs/pictures"

for tool in dot plantuml gnuplot; do
  command -v $tool >/dev/null || {
    echo "pictures: there is no $tool; apt-get install graphviz plantuml gnuplot-nox fonts-dejavu-core" >&2
    exit 1
  }
done
# finish SOURCE...: writes the picture with its hash, without what differs from machine to machine.
finish() {
  local hash
  hash="$(cat "$@" | sha256sum | cut -d' ' -f1)"
  perl -0pe 's/<!--.*?-->\s*//gs; s/^<\?xml[^>]*\?>\s*//; s/<!DOCTYPE.*?>\s*//s; s/font-family="[^"]*"/font-family="DejaVu Sans, Verdana, sans-serif"/g' |
    perl -0pe "s/^/<!-- Made by make pictures from $1; sources $hash -->\n/"
}
for source in *.dot *.puml *.gp; do
  name="${source%.*}"
  [ $# -eq 0 ] || [[ " $* " == *" $name "* ]] || continue
  case "$source" in
    *.dot) dot -Tsvg "$source" | finish "$source" ;;
    *.puml) # a ground of its own: not every viewer shows the style attribute
      plantuml -tsvg -nometadata -pipe <"$source" | perl -0pe 's/(<svg[^>]*>)/$1<rect width="100%" height="100%" fill="#fbfcfd"\/>/' |
        finish "$source" style.iuml ;;
    *.gp) gnuplot "$source" | finish "$source" performance.txt ;;
  esac >"$name.svg.new"
  mv "$name.svg.new" "$name.svg"
done
