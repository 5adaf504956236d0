package doctor

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
)

// Status is how a finding is to be taken.
type Status int

// Statuses. Fail is for what the configured transport needs; Warn for what works
// badly or would fail with another transport; Skip for what is not there to be looked
// at.
const (
	OK Status = iota
	Warn
	Fail
	Skip
)

var statuses = [...]string{OK: "ok", Warn: "warn", Fail: "fail", Skip: "skip"}

// String is the status as it is printed.
func (s Status) String() string { return statuses[s] }

// MarshalText writes the status as String does.
func (s Status) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText reads what MarshalText has written.
func (s *Status) UnmarshalText(b []byte) error {
	i := slices.Index(statuses[:], string(b))
	if i < 0 {
		return fmt.Errorf("status %q: want one of %s", b, strings.Join(statuses[:], ", "))
	}
	*s = Status(i)
	return nil
}

// Finding is what a check has found.
type Finding struct {
	Name    string   `json:"name"`
	Status  Status   `json:"status"`
	Text    string   `json:"finding"`
	Remedy  string   `json:"remedy,omitempty"` // what to do; there is one unless the status is OK
	Details []string `json:"details,omitempty"`
	Data    any      `json:"data,omitempty"` // numbers of Text, for programs
}

// Report is a whole examination.
type Report struct {
	Healthy  bool      `json:"healthy"` // nothing has failed
	Van      string    `json:"van"`     // the configured transport
	Failed   int       `json:"failed"`
	Warnings int       `json:"warnings"`
	Findings []Finding `json:"findings"`
}

func (r *Report) count() {
	r.Failed, r.Warnings = 0, 0
	for _, f := range r.Findings {
		switch f.Status {
		case Fail:
			r.Failed++
		case Warn:
			r.Warnings++
		}
	}
	r.Healthy = r.Failed == 0
}

// JSON writes the report.
func (r *Report) JSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(r)
}

// PrintFinding writes one finding as text: a line, one for the remedy, and with
// verbose the details.
func PrintFinding(w io.Writer, f Finding, verbose bool) {
	fmt.Fprintf(w, "%-4s  %-24s  %s\n", f.Status, f.Name, f.Text)
	const indent = "      "
	if f.Remedy != "" {
		fmt.Fprintf(w, "%sremedy: %s\n", indent, f.Remedy)
	}
	if verbose {
		for _, d := range f.Details {
			fmt.Fprintf(w, "%s%s\n", indent, d)
		}
	}
}

// PrintSummary writes the last line of the text.
func (r *Report) PrintSummary(w io.Writer) {
	verdict := "nothing stands in the way of a node with transport " + r.Van
	if !r.Healthy {
		verdict = Count(r.Failed, "check") + " failed: do not expect a node with transport " + r.Van + " to work"
	}
	if r.Warnings > 0 {
		verdict += ", " + Count(r.Warnings, "warning")
	}
	fmt.Fprintf(w, "\n%s\n", verdict)
}

// Count is a number of things, as it is written.
func Count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}
