package freeport_test

import (
	"fmt"
	"net"
	"sync"
	"testing"

	"github.com/stepaf/stepaf-go/internal/freeport"
	_ "github.com/stepaf/stepaf-go/internal/testlimit"
)

// TestFind: those who ask at once get different ports, on which nobody listens.
func TestFind(t *testing.T) {
	var mu sync.Mutex
	got := map[int]bool{}
	var all sync.WaitGroup
	for range 200 {
		all.Go(func() {
			port, err := freeport.Find()
			if err != nil {
				t.Error(err)
				return
			}
			l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
			if err != nil {
				t.Error(err)
				return
			}
			defer l.Close()
			mu.Lock()
			defer mu.Unlock()
			if got[port] {
				t.Errorf("port %d twice", port)
			}
			got[port] = true
		})
	}
	all.Wait()
}
