package inproc_test

import (
	"testing"

	"github.com/stepaf/stepaf-go/tests/inproc"
	"github.com/stepaf/stepaf-go/tests/vantest"
	"github.com/stepaf/stepaf-go/van"
)

func TestConformance(t *testing.T) {
	make := inproc.NewNetwork().Factory()
	vantest.Run(t, vantest.Suite{BadHost: "no host", New: func(t testing.TB) van.Van {
		v, err := make(van.Options{})
		if err != nil {
			t.Fatal(err)
		}
		return v
	}})
}
