package auth

import (
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
)

// TestGuard: a guard refuses or admits, counts every unauthenticated peer, and logs each cause sparsely.
func TestGuard(t *testing.T) {
	for _, required := range []bool{true, false} {
		k, err := New(secret, "", required)
		if err != nil {
			t.Fatal(err)
		}
		var log strings.Builder
		g := Guard{Keys: k, Log: slog.New(slog.NewTextHandler(&log, nil))}
		for i := range 100 {
			for _, why := range []error{ErrNoSecret, ErrOtherSecret} {
				if err := g.Unauthenticated(why, "process", i); (err != nil) != required || required && !errors.Is(err, why) {
					t.Errorf("required %t: %v", required, err)
				}
			}
		}
		want := 2 * 7 // the 1st, 2nd, 4th, ... 64th of each cause
		if required {
			want = 0
		}
		if n := g.Count(); n != 200 {
			t.Errorf("counted %d, want 200", n)
		}
		if n := strings.Count(log.String(), "is admitted"); n != want {
			t.Errorf("required %t: %d lines, want %d", required, n, want)
		}
	}
}

// TestExplain: the text for a refused peer names its own end; other errors are sent unchanged.
func TestExplain(t *testing.T) {
	for _, why := range []error{ErrNoSecret, ErrOtherSecret, ErrSecretThere} {
		err := fmt.Errorf("refused: %w", why)
		if text := Explain(err); !IsUnproved(err) || !strings.Contains(text, "this node") || strings.Contains(text, "the peer") {
			t.Errorf("%v is told as %q", err, text)
		}
	}
	if err := errors.New("other"); IsUnproved(err) || Explain(err) != "other" {
		t.Errorf("%v is about a secret, or told as %q", err, Explain(err))
	}
}
