package postoffice

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stepaf/stepaf-go/van"
)

// TestProfileDiskFull: a profile that cannot be written says so, once, and how much of it there is.
func TestProfileDiskFull(t *testing.T) {
	path := filepath.Join(t.TempDir(), "p")
	if err := os.Symlink("/dev/full", path+"_van_worker"); err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	p, err := openProfile(&Config{Profiling: true, ProfilePath: path}, van.Worker, slog.New(slog.NewTextHandler(&log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		p.received(&van.Meta{Key: 7, Push: true})
	}
	if err := p.close(); err != nil {
		t.Errorf("close: %v", err)
	}
	if n := strings.Count(log.String(), "\n"); n != 1 {
		t.Errorf("%d lines in the log, want 1: %s", n, &log)
	}
	for _, want := range []string{"level=WARN", "_van_worker", "no space left on device", "lines=0"} {
		if !strings.Contains(log.String(), want) {
			t.Errorf("no %q in the log: %s", want, &log)
		}
	}
}
