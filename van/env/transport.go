package env

// Which transport the variables choose.

import (
	"fmt"
	"slices"
	"strings"
)

const (
	enableRDMA = "DMLC_ENABLE_RDMA"
	vanType    = "DMLC_PS_VAN_TYPE"
)

// dataWords are the values of STEPAF_DATA.
var dataWords = []string{DataTCP, DataZMQ}

// vanWords are the transports that a user can name. Programs may register more, so other
// lower-case words pass here and van.New checks them.
var vanWords = []string{"zmq", "ibverbs"}

// absent are transports of C++ StepMesh that this library does not have.
var absent = []string{"ucx", "fabric", "tp", "multivan"}

var wantVan = strings.Join(vanWords, " or ")

// checkVan accepts a transport's name in any case, and the old 0 and 1.
func checkVan(s string) (value, want string) {
	s = strings.ToLower(s)
	switch s {
	case "0":
		return "zmq", ""
	case "1":
		return "ibverbs", ""
	case "true", "yes", "on", "rdma", "verbs":
		return "", wantVan + "; write ibverbs"
	case "false", "no", "off", "tcp":
		return "", wantVan + "; write zmq"
	}
	if slices.Contains(absent, s) {
		return "", fmt.Sprintf("%s (%s is not supported)", wantVan, s)
	}
	word := func(r rune) bool { return r < 'a' || r > 'z' }
	rest := func(r rune) bool { return word(r) && (r < '0' || r > '9') && r != '_' && r != '-' }
	if s == "" || word(rune(s[0])) || strings.IndexFunc(s, rest) >= 0 {
		return "", wantVan
	}
	return s, ""
}

// chooseVan follows C++ StepMesh's order: DMLC_ENABLE_UCX, DMLC_ENABLE_RDMA,
// DMLC_PS_VAN_TYPE, then the default.
func (l *loader) chooseVan() {
	v := find(enableRDMA)
	if s := l.text(enabler, Switch); s != "" {
		n, want := parseSwitch(s)
		if n != 0 {
			want = fmt.Sprintf("0 or nothing (%s); choose %s with %s", whyUCX, wantVan, enableRDMA)
		}
		if want != "" {
			l.refuse(v.name, &Error{Name: enabler, Value: s, Want: want})
			return
		}
	}
	rdma, other := l.text(enableRDMA, Enum), l.text(vanType, Enum)
	name, s := enableRDMA, rdma
	if s == "" {
		name, s = vanType, other
	}
	if s == "" {
		return
	}
	canon, want := v.parse(s)
	if want != "" {
		l.refuse(v.name, &Error{Name: name, Value: s, Want: want})
		return
	}
	v.set(l.c, canon)
	l.c.origins[enableRDMA], l.c.origins[vanType] = name, name
	l.c.origins[name] = fromEnvironment
	if s == "1" {
		l.warn("%s=1 is deprecated and means ibverbs; write %s=ibverbs", name, name)
	}
	if rdma != "" && other != "" {
		if loser, _ := checkVan(other); loser != canon {
			l.warn("%s=%q wins over %s=%q: the transport is %s", enableRDMA, rdma, vanType, other, canon)
		}
	}
}
