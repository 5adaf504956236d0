package resend_test

import (
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tests/inproc"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/drop"
	"github.com/stepaf/stepaf-go/van/resend"
)

func TestConformance(t *testing.T) {
	make := inproc.NewNetwork().Factory()
	vantest.Run(t, vantest.Suite{BadHost: "no host", New: func(t testing.TB) van.Van {
		inner, err := make(van.Options{})
		if err != nil {
			t.Fatal(err)
		}
		v := resend.New(inner, resend.Options{Timeout: 500 * time.Millisecond})
		v.Enable()
		return v
	}})
}

func TestConformanceWithLoss(t *testing.T) {
	make := inproc.NewNetwork().Factory()
	seed := uint64(0)
	vantest.Run(t, vantest.Suite{BadHost: "no host", Lossy: true, New: func(t testing.TB) van.Van {
		inner, err := make(van.Options{})
		if err != nil {
			t.Fatal(err)
		}
		seed++
		lossy := drop.New(inner, 20, seed, nil)
		lossy.Enable()
		const timeout = 20 * time.Millisecond
		// With ten tries one of ten million messages would be lost, and thousands are sent.
		v := resend.New(lossy, resend.Options{Timeout: timeout, MaxTries: 100, CloseWait: 10 * timeout})
		v.Enable()
		return v
	}})
}
