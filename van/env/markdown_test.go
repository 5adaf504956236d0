package env

// The document docs/env.md, generated from the table, except the columns that only the document has.

import (
	"fmt"
	"strings"
)

// written has the columns of a variable that only the document has.
type written struct {
	unset   string // the default of a variable that has none in the table
	readers string // the roles or transports that read it
	differs string // from C++ StepMesh
}

// writtenIn reads these columns of a document, by variable.
func writtenIn(document string) map[string]written {
	all := map[string]written{}
	for line := range strings.SplitSeq(document, "\n") {
		if c := strings.Split(line, "|"); len(c) == 8 {
			name, _, _ := strings.Cut(strings.TrimPrefix(c[1], "`"), "`")
			all[name] = written{c[3], c[4], c[6]}
		}
	}
	return all
}

// markdown renders the table as the document docs/env.md, with the columns that only the document has.
func markdown(columns map[string]written) string {
	var b strings.Builder
	b.WriteString(intro)
	for _, s := range sections {
		fmt.Fprintf(&b, "\n## %s\n\n", s.topic)
		b.WriteString("|Variable|Values|Default|Read by|Meaning|Unlike the original|\n|---|---|---|---|---|---|\n")
		for i := range s.variables {
			v := &s.variables[i]
			b.WriteString(v.markdown(columns[v.name]))
		}
		switch s.topic {
		case "Transport":
			b.WriteString(aboutTransport)
		case "Devices, threads and queues":
			b.WriteString(aboutCores())
		}
	}
	b.WriteString("\n## Known, but without effect\n\n" +
		"Setting one of these gives one warning, or a line at level 1 where that is said.\n\n|Variables|Why|\n|---|---|\n")
	var reasons []string
	names := map[string][]string{} // by reason
	for _, o := range others {
		why := o.why
		if o.note {
			why += " (level 1)"
		}
		if names[why] == nil {
			reasons = append(reasons, why)
		}
		names[why] = append(names[why], "`"+o.name+"`")
	}
	for _, why := range reasons {
		fmt.Fprintf(&b, "|%s|%s|\n", strings.Join(names[why], ", "), why)
	}
	return b.String()
}

func (v *variable) markdown(w written) string {
	name := "`" + v.name + "`"
	for _, a := range v.aliases {
		name += "<br>or `" + a + "`"
	}
	def := w.unset
	switch {
	case v.needed:
		def = "**required**"
	case v.def != "" && (v.kind == Seconds || v.kind == Milliseconds || v.kind == Percent):
		def = v.def + " " + map[Kind]string{Seconds: "s", Milliseconds: "ms", Percent: "%"}[v.kind]
	case v.def != "":
		def = v.def
	case def == "":
		def = "unset"
	}
	return fmt.Sprintf("|%s|%s|%s|%s|%s|%s|\n", name, v.allowed(), def, w.readers, v.help, w.differs)
}

const intro = `# Environment variables

<!-- Generated from the table in van/env: CONTRIBUTING.md says how. -->

All variables are read once, when a node starts. ` + "`stepaf env`" + ` shows their values and where each came from.

- Unset and empty are the same, but an empty secret is an error. Blanks around a value do not count (except in paths).
- Integers are decimal with an optional sign. A switch is 0 (off) or 1 (on); other integers are on. Words such as
  ` + "`true`" + ` are errors, because the original library reads them as 0.
- An invalid value is an error that names the variable, its value and the allowed values. All errors are reported together.
- A misspelled name gives a warning with the name that was perhaps meant.
- The last column compares with StepMesh; "New" variables exist in this library only.
`

const aboutTransport = `
` + "`DMLC_ENABLE_RDMA`" + ` comes first, then ` + "`DMLC_PS_VAN_TYPE`" + `, then zmq. ` + "`DMLC_ENABLE_UCX=1`" + `, and the transports
` + "`ucx`, `fabric`, `tp` and `multivan`" + ` of the original are errors. A program that has registered a transport of its own names
it in the same place.
`

func aboutCores() string {
	c := Default()
	var b strings.Builder
	b.WriteString(`
**Cores.** With ` + "`STEPMESH_BIND_CPU_CORE=1`" + ` threads get one core each, by their offset o: 1 the server's responses, 2 receiving,
3 RDMA completions, 4 the worker's requests. An o of C or more counts as C-1. With g = ` + "`STEPMESH_GPU`" + ` and base = g*C + B + o the
core is base for g = 0 and 1, base + S/2 - 2C for 2 and 3, base + S - 4C for 4 and 5, base + (S/2)*3 - 6C from 6 up. This suits two
sockets of S cores with four GPUs each. Over ZMQ the threads of libzmq share the cores of o = 2 and 3; there are no separate
threads for o = 1 and 4, since requests and responses leave from the thread that makes them. By default GPU 0`)
	c.GPU = 0
	fmt.Fprintf(&b, "\nhas the cores %d to %d, ", c.Core(CoreResponder), c.Core(CoreSender))
	c.GPU = 7
	fmt.Fprintf(&b, "GPU 7 %d to %d.\n", c.Core(CoreResponder), c.Core(CoreSender))
	return b.String()
}
