package env

// Names that are set, that nothing reads, and that resemble a variable.

import (
	"slices"
	"strings"
)

// Suggestion is a name that is set, but that nothing reads, and the known name
// that it resembles.
type Suggestion struct{ Name, Nearest string }

// Unknown returns the names that look like misspelt variables, in order. It is empty when
// the source of Load could not list its names.
func (c *Config) Unknown() []Suggestion { return slices.Clone(c.misspelt) }

var prefixes = []string{"DMLC_", "PS_", "STEPMESH_", "STEPAF_", "BYTEPS_"}

func misspelt(names []string) []Suggestion {
	known := map[string]bool{}
	var candidates []string
	for i := range table {
		for _, n := range table[i].spellings() {
			known[n] = true
			candidates = append(candidates, n)
		}
	}
	for _, o := range others {
		known[o.name] = true
	}
	for _, n := range strangers {
		known[n] = true
	}
	names = slices.Sorted(slices.Values(names))
	var found []Suggestion
	for _, n := range slices.Compact(names) {
		ours := slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(n, p) })
		if !ours || known[n] {
			continue
		}
		if near := nearest(n, candidates); near != "" {
			found = append(found, Suggestion{n, near})
		}
	}
	return found
}

// nearest returns the candidate with the fewest typing errors, or the one with
// the same ending behind another prefix; "" if none is close.
func nearest(name string, candidates []string) string {
	best, least := "", 1<<30
	for _, c := range candidates {
		limit := 2
		switch {
		case len(c) < 10:
			limit = 1
		case len(c) > 20:
			limit = 3
		}
		if d := len(c) - len(name); d > limit || -d > limit {
			continue
		}
		if d := distance(name, c); d <= limit && d < least {
			best, least = c, d
		}
	}
	if best != "" {
		return best
	}
	for _, c := range candidates {
		if t := tail(c); len(t) >= 7 && t == tail(name) {
			return c
		}
	}
	return ""
}

// tail is a name without its prefixes; DMLC_PS_ROOT_URI has two.
func tail(name string) string {
	for _, p := range prefixes {
		name = strings.TrimPrefix(name, p)
	}
	return name
}

// distance counts insertions, deletions, substitutions and swaps of neighbours
// that turn a into b.
func distance(a, b string) int {
	rows := [3][]int{make([]int, len(b)+1), make([]int, len(b)+1), make([]int, len(b)+1)}
	old, prev, row := rows[0], rows[1], rows[2]
	for j := range prev {
		prev[j] = j
	}
	for i := 1; i <= len(a); i++ {
		row[0] = i
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			row[j] = min(prev[j]+1, row[j-1]+1, prev[j-1]+cost)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				row[j] = min(row[j], old[j-2]+1)
			}
		}
		old, prev, row = prev, row, old
	}
	return prev[len(b)]
}
