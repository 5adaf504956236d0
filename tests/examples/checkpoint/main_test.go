package main

import (
	"cmp"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stepaf/stepaf-go/kv"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/testcluster"
	_ "github.com/stepaf/stepaf-go/tests/testlimit"
	"github.com/stepaf/stepaf-go/tests/vantest"
)

// TestSaveTwice: saves at the same time succeed, and the file is whole after each of them.
func TestSaveTwice(t *testing.T) {
	const keys = 2000
	s := &store{values: map[kv.Key][]float32{}}
	for i := range kv.Key(keys) {
		s.values[i] = []float32{1, 2}
	}
	file := filepath.Join(t.TempDir(), "values")
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 10 {
				read := &store{}
				if err := s.save(file); err != nil {
					t.Errorf("save: %v", err)
				} else if err := read.load(file); err != nil {
					t.Errorf("load: %v", err)
				} else if len(read.values) != keys {
					t.Errorf("the file has %d keys, want %d", len(read.values), keys)
				}
			}
		})
	}
	wg.Wait()
}

// TestHandle: a push with lengths is refused: a key would get a part of another key's values. A pull stores nothing.
func TestHandle(t *testing.T) {
	c := testcluster.Start(t, testcluster.Options{})
	s := &store{values: map[kv.Key][]float32{}}
	server, err := kv.NewServer[float32](c.Servers[0], kv.ServerOptions{})
	if err == nil {
		err = server.Handle(s.handle)
	}
	if err != nil {
		t.Fatal(err)
	}
	w, err := kv.NewWorker[float32](c.Workers[0], kv.WorkerOptions{})
	if err != nil {
		t.Fatal(err)
	}
	push, err := w.Push([]kv.Key{1, 2}, []float32{1, 2, 3, 4}, kv.Lens([]int32{1, 3}))
	vantest.Fails(t, cmp.Or(err, push.Wait(t.Context())), postoffice.ErrRequestRefused, "want 2 values for each of 2 keys, no lengths")
	var got []float32
	pull, err := w.Pull([]kv.Key{1, 2}, &got)
	if err := cmp.Or(err, pull.Wait(t.Context())); err != nil || len(got) != 4 {
		t.Errorf("a pull of new keys gets %v, %v; want 4 values", got, err)
	}
	if len(s.values) > 0 {
		t.Errorf("the server has %v after a pull, want nothing", s.values)
	}
	if push, err = w.Push([]kv.Key{1, 2}, []float32{1, 2, 3, 4}); err == nil {
		err = push.Wait(t.Context())
	}
	if err != nil || len(s.values) != 2 {
		t.Errorf("after a push, which ended with %v, the server has %v; want 2 keys", err, s.values)
	}
}

// TestLoadAnotherWidth: a file with another number of values is refused.
func TestLoadAnotherWidth(t *testing.T) {
	file := filepath.Join(t.TempDir(), "values")
	if err := (&store{values: map[kv.Key][]float32{7: {1}}}).save(file); err != nil {
		t.Fatal(err)
	}
	if err := (&store{}).load(file); err == nil {
		t.Error("load takes a key with one value, want an error")
	}
}
