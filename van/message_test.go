package van

import (
	"reflect"
	"testing"

	"github.com/stepaf/stepaf-go/van/backend"
)

type nothing struct{}

func (nothing) Sent()         {}
func (nothing) Free(*Message) {}

// TestResetForgets: after Reset a message has no values of its last use.
func TestResetForgets(t *testing.T) {
	fresh, used := &Message{}, &Message{}
	fresh.Reset()
	b := backend.Bytes([]byte{1})
	used.Sender, used.Receiver, used.ProcessEpoch, used.Frames, used.Origin = 8, 9, 3, 3, OriginOther
	used.Keys, used.Vals, used.Lens, used.Into = b, b, b, b
	used.Placed, used.InPoll, used.Parts, used.Done = true, true, []Part{{Key: 1}}, nothing{}
	used.Adopt(nothing{}, nil)
	v := reflect.ValueOf(used).Elem()
	for i := range v.NumField() {
		if f := v.Type().Field(i); f.IsExported() && f.Name != "Meta" && v.Field(i).IsZero() {
			t.Errorf("the test does not set %s", f.Name)
		}
	}
	used.Reset()
	for i, want := range reflect.ValueOf(fresh).Elem().Fields() {
		got := v.FieldByIndex(i.Index)
		if i.Type.Kind() == reflect.Slice && got.Len() == 0 { // its capacity is used again
			continue
		}
		if i.IsExported() && i.Name != "Meta" && !reflect.DeepEqual(got.Interface(), want.Interface()) {
			t.Errorf("%s is %v after Reset, want %v", i.Name, got, want)
		}
	}
	if used.Owner() != nil {
		t.Error("the owner is kept")
	}
}

type freed int

func (f *freed) Free(*Message) { *f++ }

// TestHolders: a received message returns to its owner after its last Release. A Retain or Release after that
// panics.
func TestHolders(t *testing.T) {
	var owner freed
	m := &Message{}
	m.Reset()
	m.Adopt(&owner, nil)
	m.Retain().Release()
	if owner != 0 {
		t.Error("freed while somebody holds it")
	}
	panics := func(what string, f func()) {
		t.Helper()
		defer func() {
			if recover() == nil {
				t.Errorf("%s of a released message is not noticed", what)
			}
		}()
		f()
	}
	m.Release()
	if owner != 1 {
		t.Errorf("freed %d times, want once", owner)
	}
	panics("Retain", func() { m.Retain() })
	m.refs.Store(0)
	panics("Release", m.Release)
}
