package exit

import (
	"errors"
	"fmt"
	"testing"

	_ "github.com/stepaf/stepaf-go/tests/testlimit"
)

// coder is an error of another package with a status.
type coder struct{}

func (coder) Error() string { return "coder" }
func (coder) ExitCode() int { return 7 }

func TestStatus(t *testing.T) {
	cause := errors.New("cause")
	for _, c := range []struct {
		err  error
		want int
	}{
		{nil, 0},
		{cause, Failure},
		{Usage("no %s: %w", "thing", cause), Misuse},
		{With(130, cause), 130},
		{fmt.Errorf("around: %w", With(Timeout, cause)), Timeout},
		{coder{}, 7},
	} {
		if got := Status(c.err); got != c.want {
			t.Errorf("Status(%v) = %d, want %d", c.err, got, c.want)
		}
	}
	if err := Usage("no %s: %w", "thing", cause); !errors.Is(err, cause) || err.Error() != "no thing: cause" {
		t.Errorf("error %q does not wrap its cause", err)
	}
}
