package logx_test

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"strings"
	"testing"

	"github.com/stepaf/stepaf-go/internal/logx"
	_ "github.com/stepaf/stepaf-go/tests/testlimit"
	"github.com/stepaf/stepaf-go/van/env"
)

// changing is a value that becomes known later.
type changing struct{ v *int }

func (c changing) LogValue() slog.Value { return slog.IntValue(*c.v) }

// TestWith: changing values are resolved for each line, with every handler.
func TestWith(t *testing.T) {
	var b bytes.Buffer
	for _, x := range []struct {
		l    *slog.Logger
		want []string
	}{
		{logx.New(&b, env.Default()), []string{"r1/-", "r2/-", "a=1", "k=3"}},
		{slog.New(slog.NewTextHandler(&b, nil)), []string{"rank=1", "rank=2", "a=1", "g.k=3"}},
	} {
		b.Reset()
		v := 1
		l := logx.With(x.l, slog.Any(logx.Rank, changing{&v})).With("a", 1)
		l.Warn("first")
		v = 2
		l.WithGroup("g").Warn("second", "k", 3)
		for _, want := range x.want {
			if !strings.Contains(b.String(), want) {
				t.Errorf("no %q in\n%s", want, b.String())
			}
		}
	}
}

// said is a value that changes after it was logged.
type said struct{ text string }

func (s *said) LogValue() slog.Value { return slog.StringValue(s.text) }

// kept keeps records, like a handler that writes them later.
type kept struct {
	slog.Handler
	records []slog.Record
}

func (k *kept) Handle(_ context.Context, r slog.Record) error {
	k.records = append(k.records, r)
	return nil
}

// TestNow: a record has the value at the time of the log call.
func TestNow(t *testing.T) {
	k := &kept{Handler: slog.NewTextHandler(io.Discard, nil)}
	s := &said{"first"}
	logx.With(slog.New(k)).Info("text", "value", s)
	s.text = "second"
	k.records[0].Attrs(func(a slog.Attr) bool {
		if got := a.Value.Resolve().String(); got != "first" {
			t.Errorf("%s is %q, want what it was", a.Key, got)
		}
		return true
	})
}
