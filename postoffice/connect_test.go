package postoffice_test

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/internal/testcluster"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/inproc"
)

// unconnectable is a van that cannot connect, as when a process has no more
// descriptors.
type unconnectable struct{ van.Van }

func (unconnectable) Connect(context.Context, int, van.Node) error {
	return &van.Error{Op: "connect", Err: syscall.EMFILE}
}

// TestCannotConnect: a node that cannot connect does not wait to start.
func TestCannotConnect(t *testing.T) {
	cfg := postoffice.DefaultConfig()
	cfg.Role, cfg.NumWorkers, cfg.NumServers = "worker", 1, 1
	cfg.RootURI, cfg.RootPort, cfg.NodeHost = "127.0.0.1", testcluster.FreePort(t), "127.0.0.1"
	f := inproc.NewNetwork().Factory()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	n, err := postoffice.Start(ctx, postoffice.Options{Config: cfg, Log: slog.New(slog.DiscardHandler), Van: func(o van.Options) (van.Van, error) {
		v, err := f(o)
		return unconnectable{v}, err
	}})
	if err == nil {
		n.Close()
	}
	if !errors.Is(err, syscall.EMFILE) || !strings.Contains(err.Error(), "too many open files") {
		t.Errorf("a node that cannot connect starts with %v, want %v", err, syscall.EMFILE)
	}
}
