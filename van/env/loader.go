package env

// How one variable is read.

import "fmt"

// problem is a refused value and the variable whose field it would have filled.
type problem struct {
	variable string
	err      *Error
}

type loader struct {
	c   *Config
	src Source
}

func (l *loader) warn(format string, args ...any) {
	l.c.Warnings = append(l.c.Warnings, fmt.Sprintf(format, args...))
}

func (l *loader) note(format string, args ...any) {
	l.c.Notes = append(l.c.Notes, fmt.Sprintf(format, args...))
}

func (l *loader) refuse(variable string, err *Error) {
	l.c.problems = append(l.c.problems, problem{variable, err})
}

// text returns the cleaned value of a name, "" when it is unset.
func (l *loader) text(name string, kind Kind) string {
	raw, ok := l.src.Lookup(name)
	if !ok {
		return ""
	}
	s := (&variable{kind: kind}).clean(raw)
	if s == "" {
		l.note("%s is set but empty, which is the same as unset", name)
	}
	return s
}

// read fills v's field. Several spellings may be set as long as they agree.
func (l *loader) read(v *variable) {
	var first, firstText, value string
	for _, name := range v.spellings() {
		s := l.text(name, v.kind)
		if s == "" {
			continue
		}
		canon, want := v.parse(s)
		switch {
		case want != "":
			l.refuse(v.name, &Error{Name: name, Value: s, Want: want})
		case first == "":
			first, firstText, value = name, s, canon
		case canon != value:
			l.refuse(v.name, &Error{Name: name, Value: s, Why: fmt.Sprintf("%s=%q", first, firstText),
				Want: "the same value, or only one of the two"})
		}
	}
	if first == "" {
		if raw, set := l.src.Lookup(v.name); set && v.clean(raw) == "" && (v.name == secret || v.name == secretFile) {
			// An empty secret is a mistake, such as an unset variable of a script. It never means "no secret".
			l.refuse(v.name, &Error{Name: v.name, Why: "it is empty", Want: "a secret, or a file with one; without a secret, unset it"})
		}
		return
	}
	v.set(l.c, value)
	l.c.origins[v.name] = first
	if first == v.name {
		l.c.origins[v.name] = fromEnvironment
	}
}
