package cluster

import (
	"bytes"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stepaf/stepaf-go/van"
)

// TestProfileDiskFull: a profile that cannot be written logs that, once, and the number of written lines.
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
	if n := strings.Count(log.String(), "level=WARN"); n != 1 {
		t.Errorf("%d warnings in the log, want 1: %s", n, &log)
	}
	for _, want := range []string{"level=WARN", "_van_worker", "no space left on device", "lines=0"} {
		if !strings.Contains(log.String(), want) {
			t.Errorf("no %q in the log: %s", want, &log)
		}
	}
}

// TestProfilesOfOneHost: each node of one role on a host writes its own file. The file of the first node has the name that
// C++ nodes use, even if a file of that name exists from an earlier run.
func TestProfilesOfOneHost(t *testing.T) {
	path := filepath.Join(t.TempDir(), "p")
	if err := os.WriteFile(path+"_van_worker", []byte("of an earlier run, which wrote more than this one\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	var profiles []*profile
	for i := range 3 {
		p, err := openProfile(&Config{Profiling: true, ProfilePath: path}, van.Worker, slog.New(slog.NewTextHandler(&log, nil)))
		if err != nil {
			t.Fatal(err)
		}
		profiles = append(profiles, p)
		p.received(&van.Meta{Key: uint64(i), Push: true})
	}
	for i, suffix := range []string{"", fmt.Sprintf("_%d", os.Getpid()), fmt.Sprintf("_%d_2", os.Getpid())} {
		if err := profiles[i].close(); err != nil {
			t.Errorf("close: %v", err)
		}
		name := path + "_van_worker" + suffix
		text, err := os.ReadFile(name)
		if err != nil || !strings.HasPrefix(string(text), fmt.Sprintf("%d\tworker_van_recv_push\t", i)) || strings.Count(string(text), "\n") != 1 {
			t.Errorf("%s: %q, %v; want the line of node %d alone", name, text, err, i)
		}
		if !strings.Contains(log.String(), "file="+name+"\n") {
			t.Errorf("the log does not say %s: %s", name, &log)
		}
	}
	p, err := openProfile(&Config{Profiling: true, ProfilePath: path}, van.Worker, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer p.close()
	if got := p.f.Name(); got != path+"_van_worker" {
		t.Errorf("when the others have ended the next one writes %s, want %s_van_worker", got, path)
	}
}
