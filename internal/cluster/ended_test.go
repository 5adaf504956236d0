package cluster_test

import (
	"context"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/internal/freeport"
	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/van/env"
)

// TestEndedBeforeItRegistered: a node ends since its resource limits are too low. The waiting nodes report the cause,
// with a secret too, and if the context of the node's Start has ended.
func TestEndedBeforeItRegistered(t *testing.T) {
	for name, secret := range map[string]env.Secret{"no secret": "", "secret": "correct horse battery staple"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			endedBeforeItRegistered(t, secret, t.Context())
		})
	}
	t.Run("context", func(t *testing.T) {
		t.Parallel()
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		endedBeforeItRegistered(t, "", ended)
	})
}

func endedBeforeItRegistered(t *testing.T, secret env.Secret, worker context.Context) {
	port, err := freeport.Find()
	if err != nil {
		t.Fatal(err)
	}
	config := func(role string) *env.Config {
		cfg := env.Default()
		cfg.Role, cfg.NumWorkers, cfg.NumServers, cfg.RootURI, cfg.RootPort, cfg.Backend = role, 1, 1, "127.0.0.1", port, "CPU"
		cfg.Secret = secret
		return cfg
	}
	const want = "too few sockets of libzmq: BYTEPS_ZMQ_MAX_SOCKET is 1"
	ctx, cancel := context.WithCancel(t.Context())
	var all sync.WaitGroup
	said := make(chan string, 1000)
	for _, role := range []string{"scheduler", "server"} {
		log := slog.New(slog.NewTextHandler(writes(func(line string) {
			if strings.Contains(line, want) {
				said <- role
			}
		}), nil))
		all.Go(func() {
			if n, err := postoffice.Start(ctx, postoffice.Options{Config: config(role), Log: log}); err == nil {
				n.Close()
				t.Errorf("%s has started", role)
			}
		})
	}
	tell := func() {
		cfg := config("worker")
		cfg.ZMQMaxSockets, cfg.RootURI = 1, "localhost" // looked up until the context ends
		if _, err := postoffice.Start(worker, postoffice.Options{Config: cfg}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("the worker's error is %v, want %q", err, want)
		}
	}
	tell()
	missing := map[string]bool{"scheduler": true, "server": true}
	for again := time.Tick(5 * time.Second); len(missing) > 0; {
		select {
		case role := <-said:
			delete(missing, role)
		case <-again: // the scheduler may not have listened yet
			tell()
		case <-t.Context().Done():
			t.Fatal("the test has ended")
		}
	}
	cancel()
	all.Wait()
}

type writes func(string)

func (f writes) Write(b []byte) (int, error) {
	f(string(b))
	return len(b), nil
}
