package limits

import (
	"bufio"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/tests/internal/nodetest"
	"github.com/stepaf/stepaf-go/tests/testcluster"
)

// shared returns the bytes of the library's shared memory that this process has mapped and touched, each once.
func shared(t testing.TB) (bytes int) {
	t.Helper()
	f, err := os.Open("/proc/self/smaps")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	ours := false
	for lines := bufio.NewScanner(f); lines.Scan(); {
		var kib int
		switch line := lines.Text(); {
		case strings.Contains(line, "-") && strings.Contains(line, " rw-s "), strings.Contains(line, " r--s "):
			ours = strings.Contains(line, "memfd:stepaf")
		case ours && strings.HasPrefix(line, "Pss:"):
			if _, err := fmt.Sscanf(line, "Pss: %d kB", &kib); err != nil {
				t.Fatalf("%q: %v", line, err)
			}
			bytes += kib << 10
		case strings.HasPrefix(line, "VmFlags:"):
			ours = false
		}
	}
	return bytes
}

// TestSharedMemoryGrows: nodes of one host share no memory for data until they send data, and share little memory for little data.
func TestSharedMemoryGrows(t *testing.T) {
	const n = 8 // the number of workers, and of servers
	c := testcluster.Start(t, testcluster.Options{Workers: n, Servers: n, Over: testcluster.AsSet})
	if got, want := shared(t), 2*n<<12; got > want {
		t.Errorf("%d + %d nodes share %d KiB before the first tensor, want at most %d", n, n, got>>10, want>>10)
	}
	for _, s := range c.Servers {
		nodetest.Server(t, s, nodetest.Echoes(t))
	}
	for _, node := range c.Workers {
		w := nodetest.Worker(t, node)
		pull := make([]af.KeyTensor, n)
		for s := range pull {
			pull[s] = af.KeyTensor{Key: 0, Val: tensor(t)}
		}
		call, err := w.PushPull([]af.KeyTensor{{Key: 0, Val: tensor(t)}}, testcluster.PerServer(pull, n))
		if err == nil {
			err = call.Wait(nodetest.Within(t, time.Minute))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if !testcluster.SharesMemory(c.Workers[0], int(c.Servers[0].ID())) {
		t.Skip("nodes of this machine share no memory")
	}
	if got, want := shared(t), 2*n<<12+2*n*n*(64<<10); got > want {
		t.Errorf("%d + %d nodes share %d KiB after tensors of %d bytes, want at most %d", n, n, got>>10, size, want>>10)
	}
}
