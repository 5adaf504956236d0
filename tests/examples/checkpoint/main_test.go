package main

import (
	"path/filepath"
	"sync"
	"testing"

	"github.com/stepaf/stepaf-go/kv"
	_ "github.com/stepaf/stepaf-go/tests/testlimit"
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
