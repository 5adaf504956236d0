package env

// Names that are set, that nothing reads, and that resemble a variable.

import (
	"fmt"
	"slices"
	"strings"
)

// Suggestion is a name that is set, but that nothing reads, and the known name
// that it resembles.
type Suggestion struct{ Name, Nearest string }

// String is a line for the log.
func (s Suggestion) String() string {
	return fmt.Sprintf("%s is not a name that StepAF reads; did you mean %s?", s.Name, s.Nearest)
}

// Unknown returns the names that resemble misspelled variables, in order. It is empty if the source of Load could
// not list its names.
func (c *Config) Unknown() []Suggestion { return slices.Clone(c.misspelt) }

var prefixes = []string{"DMLC_", "PS_", "STEPMESH_", "STEPAF_", "BYTEPS_"}

// plain returns a name in the spelling of variables: in capitals, with words joined by underscores.
// Files of variables may leave a blank at the end of a name.
func plain(name string) string {
	return strings.NewReplacer("-", "_", ".", "_").Replace(strings.ToUpper(strings.TrimSpace(name)))
}

// readNames returns the names of variables with a field. knownNames returns these and all other names
// that are no misspelling.
func readNames() (list []string) {
	for i := range table {
		list = append(list, table[i].spellings()...)
	}
	return list
}

func knownNames() []string {
	known := slices.Concat(readNames(), otherPrograms)
	for _, o := range others {
		known = append(known, o.name)
	}
	return known
}

// ours reports whether a plain name begins with one of the prefixes, or with a misspelling of one.
func ours(name string) bool {
	first, _, _ := strings.Cut(name, "_")
	return slices.ContainsFunc(prefixes, func(p string) bool {
		return strings.HasPrefix(name, p) || len(p) > 4 && distance(first+"_", p) == 1
	})
}

func misspelt(names []string) []Suggestion {
	known, candidates := knownNames(), readNames()
	names = slices.Sorted(slices.Values(names))
	var found []Suggestion
	for _, n := range slices.Compact(names) {
		p := plain(n)
		if slices.Contains(known, n) || !ours(p) && !slices.Contains(candidates, p) {
			continue
		}
		if near := nearest(p, candidates); near != "" {
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
		// Many variables of other programs have the prefix PS_.
		if t := tail(c); t == tail(name) && (len(t) >= 7 || !strings.HasPrefix(name, "PS_")) {
			return c
		}
	}
	return ""
}

// likely returns, for each required variable that is not set, the name among names that was
// probably meant for it. A missing variable is certainly an error, so likely accepts names with less
// resemblance than nearest does: another ending, words in another order, one word too few.
func likely(names []string, isSet func(string) bool) map[string]string {
	known := knownNames()
	found := map[string]string{}
	for _, n := range slices.Sorted(slices.Values(names)) {
		p := plain(n)
		best, least := "", 1<<30
		for i := range table {
			v := &table[i]
			if !v.needed || slices.Contains(known, n) || !resembles(p, v.name) {
				continue
			}
			if d := distance(p, v.name); d < least {
				best, least = v.name, d
			}
		}
		if best == "" || isSet(best) {
			continue
		}
		if before := found[best]; before == "" || least < distance(plain(before), best) {
			found[best] = n
		}
	}
	return found
}

// resembles reports whether a plain name may be meant for the variable want.
func resembles(name, want string) bool {
	a, b := tail(name), tail(want)
	if a == b {
		return true
	}
	if !ours(name) {
		return false
	}
	if distance(a, b) <= len(b)/4+1 {
		return true
	}
	x, y := strings.Split(a, "_"), strings.Split(b, "_")
	shared := 0
	for _, w := range x {
		if slices.Contains(y, strings.TrimSuffix(w, "S")) {
			shared++
		}
	}
	return shared > 0 && len(x)+len(y)-2*shared <= 2 // at most one word differs, is missing or is extra
}

// tail is a name without its prefixes; DMLC_PS_ROOT_URI has two.
func tail(name string) string {
	for _, p := range prefixes {
		name = strings.TrimPrefix(name, p)
	}
	return name
}

// DidYouMean is "; did you mean WORD?" for the one of words that s is like, or "" if there is none.
func DidYouMean(s string, words []string) string {
	s = strings.ToLower(unquote(s))
	best, least := "", 3
	for _, w := range words {
		l := strings.ToLower(w)
		d := distance(s, l)
		switch {
		case len(s) >= 3 && (strings.HasPrefix(l, s) || strings.HasPrefix(s, l)):
			d = min(d, 1)
		case len(l) < 6 && d > 1:
			continue
		}
		if d < least {
			best, least = w, d
		}
	}
	if best == "" {
		return ""
	}
	return "; did you mean " + best + "?"
}

// unquote drops quotes around a value, which a file of variables (docker run --env-file) keeps.
func unquote(s string) string {
	if n := len(s); n >= 2 && (s[0] == '"' || s[0] == '\'') && s[n-1] == s[0] {
		return strings.Trim(s[1:n-1], blanks)
	}
	return s
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
