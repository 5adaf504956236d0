package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"

	"github.com/stepaf/stepaf-go/postoffice"
	"github.com/stepaf/stepaf-go/tests/inproc"
	"github.com/stepaf/stepaf-go/van"
)

// A cluster of a scheduler, a server and two workers, all in this process: ranks, a barrier, and the end. Usually
// each runs in its own process and gets its configuration from LoadConfig.
func Example() {
	ctx, network := context.Background(), inproc.NewNetwork()
	var mu sync.Mutex
	names := map[string]bool{}
	var all sync.WaitGroup
	for i, role := range []string{"scheduler", "server", "worker", "worker"} {
		cfg := postoffice.DefaultConfig()
		cfg.Role, cfg.NumWorkers, cfg.NumServers = role, 2, 1
		cfg.RootURI, cfg.RootPort, cfg.NodeHost = "127.0.0.1", 9000, "127.0.0.1"
		cfg.NodeRank = max(i-2, 0)
		all.Go(func() {
			n, err := postoffice.Start(ctx, postoffice.Options{Config: cfg, Van: network.Factory(), Log: slog.New(slog.DiscardHandler)})
			if err != nil {
				panic(err) // names the missing nodes
			}
			if n.Role() == van.Worker {
				if err := n.InstanceBarrier(ctx, 0, van.WorkerGroup); err != nil {
					panic(err)
				}
			}
			mu.Lock()
			names[n.Name()] = true
			mu.Unlock()
			if err := n.Shutdown(ctx); err != nil { // waits for all nodes
				panic(err)
			}
		})
	}
	all.Wait()
	fmt.Println(len(names), names["worker 1 (id 11)"], names["server 0 (id 8)"])
	// Output: 4 true true
}

// The secret of a cluster, set by the program. All nodes need the same one, and the same ClusterID. Start, like Validate,
// refuses a file that other users may read.
func ExampleConfig_secret() {
	dir, err := os.MkdirTemp("", "example-")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	file := filepath.Join(dir, "cluster.secret") // usually made once by "stepaf secret cluster.secret"
	if err := os.WriteFile(file, []byte("at least 16 bytes, better 32 random ones"), 0o600); err != nil {
		panic(err)
	}

	cfg := postoffice.DefaultConfig()
	cfg.Role, cfg.NumWorkers, cfg.NumServers = "worker", 1, 1
	cfg.RootURI, cfg.RootPort = "127.0.0.1", 9000
	cfg.SecretFile, cfg.ClusterID = file, "training-7" // or Secret, the text itself
	fmt.Println(cfg.AuthMode(), cfg.Validate())

	if err := os.Chmod(file, 0o644); err != nil {
		panic(err)
	}
	fmt.Println(errors.Is(cfg.Validate(), van.ErrInvalid))
	// Output:
	// require <nil>
	// true
}
