package env

// Reading the variables.

import (
	"errors"
	"fmt"
	"os"
	"strings"
)

const (
	fromEnvironment = "environment"
	fromDefault     = "default"
	fromProgram     = "set by the program"
)

// Source is where variables come from. In a process of another language, such as Python,
// it must ask the C library: Go's copy of the environment was made when the library was
// loaded.
type Source struct {
	// Lookup returns the value of a name and whether it is set.
	Lookup func(name string) (value string, ok bool)

	// Names lists all names that are set, for finding misspelt ones. Nil means
	// that this is unknown.
	Names func() []string
}

// OS is the environment of this process.
func OS() Source {
	return Source{Lookup: os.LookupEnv, Names: func() []string { return names(os.Environ()) }}
}

// FromList is the environment that list describes, NAME=value each, as in
// os.Environ. Where a name appears twice the last one counts.
func FromList(list []string) Source {
	m := make(map[string]string, len(list))
	for _, kv := range list {
		if name, value, ok := strings.Cut(kv, "="); ok {
			m[name] = value
		}
	}
	return Source{
		Lookup: func(name string) (string, bool) { v, ok := m[name]; return v, ok },
		Names:  func() []string { return names(list) },
	}
}

func names(environ []string) []string {
	list := make([]string, 0, len(environ))
	for _, kv := range environ {
		name, _, _ := strings.Cut(kv, "=")
		list = append(list, name)
	}
	return list
}

// Default returns a Config with every default filled in. Role, the numbers of
// nodes and the scheduler's address have none.
func Default() *Config {
	c := &Config{}
	for i := range table {
		table[i].set(c, table[i].def)
	}
	return c
}

// LoadFrom reads all variables of src. Names that are unset or empty keep their
// default, and nothing is required: see Validate for that.
//
// The error joins an *Error for each invalid value, and then names that are perhaps misspelt. Config is never nil; after an error
// invalid values are replaced by defaults, for display only.
func LoadFrom(src Source) (*Config, error) {
	l := &loader{c: Default(), src: src}
	l.c.origins, l.c.meant = map[string]string{}, map[string]string{}
	for i := range table {
		switch v := &table[i]; v.name {
		case enableRDMA:
			l.chooseVan()
		case vanType: // chooseVan has read it
		default:
			l.read(v)
		}
	}
	l.readOthers()
	l.advise()
	if src.Names != nil {
		l.findMisspelt(src.Names())
	}
	l.c.loaded = make(map[string]string, len(table))
	for i := range table {
		l.c.loaded[table[i].name] = table[i].get(l.c)
	}
	errs := make([]error, len(l.c.problems))
	for i, p := range l.c.problems {
		errs[i] = p.err
	}
	return l.c, l.c.join(errs)
}

// findMisspelt finds set names that were probably meant for variables.
func (l *loader) findMisspelt(names []string) {
	c := l.c
	for v, n := range likely(names, func(v string) bool { return c.origins[v] != "" }) {
		value, _ := l.src.Lookup(n)
		c.meant[v] = fmt.Sprintf("%s=%q is, which nothing reads; did you mean %s?", n, value, v)
	}
	c.misspelt = misspelt(names)
	for _, s := range c.misspelt {
		l.c.Warnings = append(l.c.Warnings, s.String())
	}
}

// join joins errors of settings. Names that are perhaps misspelt follow: one of them may be the cause.
func (c *Config) join(errs []error) error {
	if len(errs) == 0 {
		return nil
	}
	text := errors.Join(errs...).Error()
	for _, s := range c.misspelt {
		if !strings.Contains(text, s.Name+"=") {
			errs = append(errs, errors.New(s.String()))
		}
	}
	return errors.Join(errs...)
}

func (l *loader) readOthers() {
	for _, o := range others {
		if o.name == enabler {
			continue
		}
		s := l.text(o.name, o.kind)
		if s == "" || o.kind == Switch && strings.Trim(s, "0") == "" {
			continue
		}
		if o.note {
			l.note("%s has no effect: %s", o.name, o.why)
		} else {
			l.warn("%s=%q has no effect: %s", o.name, s, o.why)
		}
	}
}

// advise warns of values that are allowed but do not have the effect that they suggest.
func (l *loader) advise() {
	c := l.c
	if c.DropMsg > 0 && !c.Resend {
		l.warn("PS_DROP_MSG=%d without PS_RESEND=1: lost messages are not sent again, so requests and barriers will hang", c.DropMsg)
	}
	if n := max(c.NumWorkers, c.NumServers) * c.GroupSize; c.Resend && n > maxResendRanks {
		l.warn("PS_RESEND=1 with %d instances of a role: messages of ranks from %d up can be mistaken for those of others", n, maxResendRanks)
	}
	if c.Local && c.VanType != "zmq" {
		l.warn("DMLC_LOCAL=1 has no effect: the transport is %s, not zmq", c.VanType)
	}
}

// maxResendRanks is the number of ranks whose ids, 2*rank+8 or +9, fit the 8 bits
// that a message's signature keeps of them.
const maxResendRanks = 124
