package doctor

import (
	"encoding/json"
	"fmt"
	"io"
)

// Status is the result of a check.
type Status string

// The statuses. Fail: the configured transport does not work. Warn: something works badly, or would fail with another
// transport. Skip: the subject of the check does not exist.
const (
	OK   Status = "ok"
	Warn Status = "warn"
	Fail Status = "fail"
	Skip Status = "skip"
)

// Finding is the result of a check.
type Finding struct {
	Name    string   `json:"name"`
	Status  Status   `json:"status"` // Run replaces an empty one by OK
	Text    string   `json:"finding"`
	Remedy  string   `json:"remedy,omitempty"` // a remedy; empty only if the status is OK
	Details []string `json:"details,omitempty"`
	Data    any      `json:"data,omitempty"` // numbers of Text, for programs
}

// Report has the findings of all checks.
type Report struct {
	Healthy  bool      `json:"healthy"` // no check has failed
	Van      string    `json:"van"`     // the configured transport
	Failed   int       `json:"failed"`
	Warnings int       `json:"warnings"`
	Findings []Finding `json:"findings"`
}

func (r *Report) add(f Finding) {
	switch r.Findings = append(r.Findings, f); f.Status {
	case Fail:
		r.Failed++
	case Warn:
		r.Warnings++
	}
	r.Healthy = r.Failed == 0
}

// JSON writes the report.
func (r *Report) JSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(r)
}

// PrintFinding writes one finding as text: a line, a line with the remedy, and if verbose the details.
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
	summary := "no check failed: a node with transport " + r.Van + " should work"
	if !r.Healthy {
		summary = Count(r.Failed, "check") + " failed: do not expect a node with transport " + r.Van + " to work"
	}
	if r.Warnings > 0 {
		summary += ", " + Count(r.Warnings, "warning")
	}
	fmt.Fprintf(w, "\n%s\n", summary)
}

// Count returns a number with its noun.
func Count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}
