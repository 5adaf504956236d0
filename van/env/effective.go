package env

// The settings in force: for display, and for the environment of child processes.

import (
	"cmp"
	"slices"
	"strings"
)

// Effective is one line of the table of settings in force.
type Effective struct {
	Name    string   `json:"name"`
	Aliases []string `json:"aliases,omitempty"`
	Value   string   `json:"value"`   // as it would be written; "" is unset
	Origin  string   `json:"origin"`  // see Config.Origin
	Default string   `json:"default"` // "" has none
	Kind    Kind     `json:"-"`
	Allowed string   `json:"allowed"` // range or words
	Topic   string   `json:"topic"`
	Help    string   `json:"help"`
}

// Table lists every variable that has a field, with the value in force, grouped by
// topic in the order of the documentation.
func (c *Config) Table() []Effective {
	list := make([]Effective, len(table))
	for i := range table {
		v := &table[i]
		list[i] = Effective{
			Name: v.name, Aliases: slices.Clone(v.aliases), Value: v.get(c), Origin: c.Origin(v.name), Default: v.def,
			Kind: v.kind, Allowed: v.allowed(), Topic: v.topic, Help: v.help,
		}
	}
	return list
}

// Origin says where the value of a variable came from: "environment", "default",
// "set by the program", or the name of another variable (an alias, or the other
// one of DMLC_ENABLE_RDMA and DMLC_PS_VAN_TYPE) that was used instead. That a program has
// set a field to the value that it had already is not detected.
func (c *Config) Origin(name string) string {
	v := find(name)
	if v == nil {
		return fromDefault
	}
	before, ok := c.loaded[name]
	if !ok {
		before = v.def
	}
	if v.get(c) != before {
		return fromProgram
	}
	return cmp.Or(c.origins[name], fromDefault)
}

// Strip returns environ, a list of NAME=value, without the variables that have a place in
// Config, and their aliases.
func Strip(environ []string) []string {
	ours := readNames()
	return slices.DeleteFunc(slices.Clone(environ), func(kv string) bool {
		name, _, _ := strings.Cut(kv, "=")
		return slices.Contains(ours, name)
	})
}
