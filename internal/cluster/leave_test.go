package cluster

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

// TestLeaveOnce: a call that ends a node while it is leaving waits until it has left, and gets the result. Virtual
// time continues meanwhile, which it does not while a goroutine waits for a mutex.
func TestLeaveOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &Node{lifetime: lifetime{left: make(chan struct{})}}
		want := errors.New("left with an error")
		begun := make(chan struct{})
		go n.lifetime.leaveOnce(func() error {
			close(begun)
			time.Sleep(time.Second)
			return want
		})
		<-begun
		start := time.Now()
		for range 2 {
			n.lifetime.leaveOnce(func() error {
				t.Error("left twice")
				return nil
			})
			if n.lifetime.finalErr != want {
				t.Errorf("the result is %v, want %v", n.lifetime.finalErr, want)
			}
			if d := time.Since(start); d != time.Second {
				t.Errorf("waited for %s, want 1s", d)
			}
		}
	})
}
