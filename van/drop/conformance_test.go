package drop_test

import (
	"testing"

	"github.com/stepaf/stepaf-go/tests/inproc"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/drop"
)

func TestConformance(t *testing.T) {
	make := inproc.NewNetwork().Factory()
	vantest.Run(t, vantest.Suite{BadHost: "no host", New: func(t testing.TB) van.Van {
		inner, err := make(van.Options{})
		if err != nil {
			t.Fatal(err)
		}
		v := drop.New(inner, 0, 1, nil)
		v.Enable()
		return v
	}})
}
