package testcluster

// Goroutines left when all clusters of a test have ended.

import (
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/tests/vantest"
)

// clusters are those that there are, in tests that run at the same time, too.
var clusters struct {
	sync.Mutex
	n      int
	before map[string][]string // goroutines, when the first of them was made
}

// begun notes that a cluster is made.
func begun() {
	clusters.Lock()
	defer clusters.Unlock()
	if clusters.n++; clusters.n == 1 {
		clusters.before = goroutines()
	}
}

// over fails the test if the library's goroutines do not end with the nodes of the last cluster.
func over(t testing.TB) {
	clusters.Lock()
	defer clusters.Unlock()
	if clusters.n--; clusters.n > 0 {
		return
	}
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for end := time.After(20 * time.Second); ; {
		left := ""
		for what, l := range goroutines() {
			if len(l) > len(clusters.before[what]) {
				left = l[len(l)-1]
			}
		}
		if left == "" {
			return
		}
		select {
		case <-tick.C:
		case <-end:
			t.Errorf("all nodes are closed, and this goroutine is left:\n%s", left)
			return
		}
	}
}

// goroutines are the stacks of the library's goroutines, by their function. Those of tests, and of pretended devices, do not count.
func goroutines() map[string][]string {
	const library = "github.com/stepaf/stepaf-go/"
	found := map[string][]string{}
	for _, s := range vantest.Stacks() {
		at := strings.LastIndex(s, library)
		if at < 0 || strings.Contains(s, "_test.go:") || strings.Contains(s, library+"tests/simgpu.") || strings.Contains(s, "testing.tRunner") {
			continue
		}
		what, _, _ := strings.Cut(s[at:], "\n")
		what, _, _ = strings.Cut(what, " in goroutine")
		found[what] = append(found[what], s)
	}
	return found
}
