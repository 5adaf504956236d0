package env

// Values by kind: allowed values, parsing, formatting.

import (
	"fmt"
	"math"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/stepaf/stepaf-go/internal/hostaddr"
)

// The four roles.
const (
	roleWorker    = "worker"
	roleServer    = "server"
	roleScheduler = "scheduler"
	roleJoint     = "joint"
)

var roles = []string{roleWorker, roleServer, roleScheduler, roleJoint}

const blanks = " \t\r\n\v\f"

// clean drops blanks around a value, except around a path. An empty value counts as
// unset.
func (v *variable) clean(s string) string {
	if v.kind == Path {
		return s
	}
	return strings.Trim(s, blanks)
}

// parse checks a clean text and returns its canonical form. want is not empty when
// the text was refused; it may say what was probably meant.
func (v *variable) parse(s string) (canon, want string) {
	canon, want = v.parseOnly(s)
	if want == "" {
		return canon, ""
	}
	if u := unquote(s); u != s && u != "" {
		if _, bad := v.parseOnly(u); bad == "" {
			return "", want + "; write it without quotes"
		}
	}
	if v.kind == Seconds || v.kind == Milliseconds {
		if d, err := time.ParseDuration(s); err == nil && d%v.unit() == 0 {
			if n, bad := v.parseOnly(strconv.FormatInt(int64(d/v.unit()), 10)); bad == "" {
				return "", want + "; write " + n
			}
		}
	}
	if strings.Contains(want, "; write ") {
		return "", want
	}
	return "", want + DidYouMean(s, v.words)
}

// parseOnly is parse without advice.
func (v *variable) parseOnly(s string) (canon, want string) {
	switch v.kind {
	case Int, Percent, Seconds, Milliseconds:
		n, err := strconv.ParseInt(s, 10, 64)
		if err != nil || n < int64(v.min) || n > int64(v.max) {
			return "", v.want()
		}
		return strconv.FormatInt(n, 10), ""
	case Size:
		n, ok := parseSize(s)
		if !ok || n < v.min || n > v.max {
			return "", v.want()
		}
		return formatSize(n), ""
	case Switch:
		n, want := parseSwitch(s)
		if want != "" {
			return "", want
		}
		if n == 0 || n < 0 && v.name == "DMLC_USE_KUBERNETES" {
			return "0", ""
		}
		return "1", ""
	case Path:
		if strings.ContainsRune(s, 0) {
			return "", "a path without NUL bytes"
		}
		return s, ""
	}
	if v.check != nil {
		return v.check(s)
	}
	if v.kind == Enum && !slices.Contains(v.words, s) {
		return "", v.want()
	}
	return s, ""
}

// want says in words which values are allowed.
func (v *variable) want() string {
	switch v.kind {
	case Switch:
		return "0 (off) or 1 (on)"
	case Seconds, Milliseconds:
		return fmt.Sprintf("a whole number of %s from %d to %d", v.kind, v.min, v.max)
	case Size:
		return fmt.Sprintf("a number of bytes from %s to %s, such as 64M or 1G", formatSize(v.min), formatSize(v.max))
	case Percent:
		return fmt.Sprintf("a percentage from %d to %d", v.min, v.max)
	case Enum:
		return "one of " + strings.Join(v.words, ", ")
	case Int:
		return fmt.Sprintf("an integer from %d to %d", v.min, v.max)
	default:
		return v.kind.String()
	}
}

// allowed is the short form of want for tables.
func (v *variable) allowed() string {
	switch v.kind {
	case Switch:
		return "0 or 1"
	case Int:
		return fmt.Sprintf("%d to %d", v.min, v.max)
	case Seconds:
		return fmt.Sprintf("%d to %d s", v.min, v.max)
	case Milliseconds:
		return fmt.Sprintf("%d to %d ms", v.min, v.max)
	case Percent:
		return fmt.Sprintf("%d to %d %%", v.min, v.max)
	case Size:
		return fmt.Sprintf("%s to %s", formatSize(v.min), formatSize(v.max))
	case Enum:
		return strings.Join(v.words, ", ")
	default:
		return v.kind.String()
	}
}

// parseSwitch accepts the 32-bit integers. Words are refused because C++ StepMesh reads
// every word as 0.
func parseSwitch(s string) (n int64, want string) {
	n, err := strconv.ParseInt(s, 10, 32)
	if err == nil {
		return n, ""
	}
	switch strings.ToLower(s) {
	case "true", "yes", "on", "t", "y":
		return 0, "0 (off) or 1 (on); write 1"
	case "false", "no", "off", "f", "n":
		return 0, "0 (off) or 1 (on); write 0"
	}
	return 0, "0 (off) or 1 (on)"
}

// suffixes of sizes, the largest first.
var suffixes = []struct {
	letter string
	n      int
}{{"G", 1 << 30}, {"M", 1 << 20}, {"K", 1 << 10}}

// parseSize reads a number of bytes: digits, and K, M or G behind them, in any case.
func parseSize(s string) (n int, ok bool) {
	unit := 1
	for _, x := range suffixes {
		if rest, cut := strings.CutSuffix(strings.ToUpper(s), x.letter); cut {
			s, unit = rest, x.n
			break
		}
	}
	n64, err := strconv.ParseUint(s, 10, 63)
	if err != nil || n64 > math.MaxInt/uint64(unit) {
		return 0, false
	}
	return int(n64) * unit, true
}

// formatSize writes n with the largest suffix that leaves a whole number.
func formatSize(n int) string {
	for _, x := range suffixes {
		if n != 0 && n%x.n == 0 {
			return strconv.Itoa(n/x.n) + x.letter
		}
	}
	return strconv.Itoa(n)
}

// set stores a canonical form in c; the empty one is unset.
func (v *variable) set(c *Config, canon string) {
	n, _ := strconv.Atoi(canon) // canonical numbers parse; 0 for the rest
	if v.kind == Size {
		n, _ = parseSize(canon)
	}
	switch p := v.field(c).(type) {
	case *int:
		if *p = n; canon == "" {
			*p = v.none
		}
	case *bool:
		*p = n != 0
	case *string:
		*p = canon
	case *Secret:
		*p = Secret(canon)
	case *[]string:
		if *p = nil; canon != "" {
			*p = strings.Split(canon, ",")
		}
	case *time.Duration:
		if *p = time.Duration(n) * v.unit(); canon == "" {
			*p = time.Duration(v.none)
		}
	case *BusyPoll:
		switch canon {
		case "":
			*p = SpinThenBlock
		case "0":
			*p = AlwaysBlock
		default:
			*p = SpinForever
		}
	}
}

// get returns the canonical form of c's value, "" for unset. Durations between
// two units are rounded up. Of a secret it says only that it is set.
func (v *variable) get(c *Config) string {
	switch p := v.field(c).(type) {
	case *int:
		if v.def == "" && *p == v.none {
			return ""
		}
		if v.kind == Size {
			return formatSize(*p)
		}
		return strconv.Itoa(*p)
	case *bool:
		if *p {
			return "1"
		}
		return "0"
	case *string:
		return *p
	case *Secret:
		return p.String()
	case *[]string:
		return strings.Join(*p, ",")
	case *time.Duration:
		if v.def == "" && *p == time.Duration(v.none) {
			return ""
		}
		n := *p / v.unit()
		if *p%v.unit() > 0 {
			n++
		}
		return strconv.FormatInt(int64(n), 10)
	case *BusyPoll:
		switch *p {
		case SpinForever:
			return "1"
		case AlwaysBlock:
			return "0"
		}
	}
	return ""
}

func (v *variable) unit() time.Duration {
	if v.kind == Milliseconds {
		return time.Millisecond
	}
	return time.Second
}

func checkHost(s string) (value, want string) {
	switch {
	case strings.ContainsAny(s, blanks+"/,\x00"):
		return "", "one host name or address"
	case strings.Count(s, ":") == 1:
		return "", "a host name or address without port"
	}
	return s, ""
}

func checkInterface(s string) (value, want string) {
	if strings.EqualFold(s, "auto") {
		return "auto", ""
	}
	if strings.ContainsAny(s, blanks+"/,\x00") {
		return "", "the name of one network interface, or auto"
	}
	return s, ""
}

func checkBackend(s string) (value, want string) {
	if strings.ContainsAny(s, blanks+"\x00") {
		return "", "CPU, GPU or the name of a registered backend"
	}
	return strings.ToUpper(s), ""
}

// checkHosts accepts ip[:port],ip[:port] with every host once.
func checkHosts(s string) (value, want string) {
	const form = "host[:port],host[:port],..."
	var hosts, list []string
	for part := range strings.SplitSeq(s, ",") {
		part = strings.Trim(part, blanks)
		host, port := part, ""
		if strings.Count(part, ":") == 1 || strings.HasPrefix(part, "[") {
			var err error
			if host, port, err = net.SplitHostPort(part); err != nil {
				return "", form
			}
			if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
				return "", form + " with ports from 1 to 65535"
			}
		}
		if host == "" || strings.ContainsAny(host, blanks+"/\x00") {
			return "", form
		}
		if _, err := netip.ParseAddr(host); err == nil && hostaddr.Check(host) != nil {
			return "", form + ", but " + host + " names no host"
		}
		if slices.Contains(hosts, host) {
			return "", form + " with every host once, but " + host + " is there twice"
		}
		hosts, list = append(hosts, host), append(list, part)
	}
	return strings.Join(list, ","), ""
}
