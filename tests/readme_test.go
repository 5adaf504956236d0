package tests

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// The programs in the README are files that compile and run.
func TestReadmePrograms(t *testing.T) {
	readme := read(t, "README.md")
	blocks := regexp.MustCompile("(?s)```go\n(.*?)```").FindAllStringSubmatch(readme, -1)
	files := []string{"tests/examples/af/main.go", "tests/examples/kv/main.go"}
	if len(blocks) != len(files) {
		t.Fatalf("README.md has %d Go programs, want %d", len(blocks), len(files))
	}
	for i, file := range files {
		if blocks[i][1] != read(t, file) {
			t.Errorf("Go program %d of README.md is not %s: copy the file there", i+1, file)
		}
	}
}

func TestExamples(t *testing.T) {
	tests := []struct {
		program          string
		workers, servers int
		want             string
	}{
		{"af", 1, 1, "[1 2 3 4] doubled is [2 4 6 8]"},
		{"kv", 2, 2, "pulled [2 4 6]"},
	}
	for _, tt := range tests {
		t.Run(tt.program, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t, tt.workers, tt.servers, 1)
			c.program(tt.program)
			c.start()
			c.mustSucceed()
			for _, w := range c.role("worker") {
				if out := strings.Join(w.lines(), "\n"); !strings.HasSuffix(out, tt.want) {
					t.Errorf("%s printed %q, want %q at the end", w.name, out, tt.want)
				}
			}
		})
	}
}

// The commands of the README that build and run its programs do so, as they stand there.
func TestReadmeCommands(t *testing.T) {
	bin := t.TempDir()
	run := func(command string) string {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), "sh", "-c", strings.ReplaceAll(command, "bin/", bin+"/"))
		cmd.Dir = ".."
		cmd.Env = append(os.Environ(), "GOFLAGS=-buildvcs=false "+os.Getenv("GOFLAGS"))
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Errorf("%s: %v\n%s", command, err, out)
		}
		return string(out)
	}
	run("go build -o bin/stepaf ./tools/stepaf")
	commands := regexp.MustCompile(`(?m)^    (go build .*)$`).FindAllStringSubmatch(read(t, "README.md"), -1)
	want := []string{"[1 2 3 4] doubled is [2 4 6 8]", "pulled [2 4 6]"}
	if len(commands) != len(want) {
		t.Fatalf("README.md builds and runs %d programs, want %d", len(commands), len(want))
	}
	for i, c := range commands {
		if out := run(c[1]); !strings.Contains(out, want[i]) {
			t.Errorf("%s printed %q, want %q in it", c[1], out, want[i])
		}
	}
}

// What documents and messages say to make is a target: "make" without one lists the targets, and builds nothing.
func TestMakeTargets(t *testing.T) {
	targets := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^([a-z-]+):`).FindAllStringSubmatch(read(t, "Makefile"), -1) {
		targets[m[1]] = true
	}
	// In documents code that begins with make, elsewhere what sets variables of it.
	inDocument := regexp.MustCompile("(?m)(?:^    |`)(?:[A-Z_]+=[^ `]+ )*\\bmake((?: [A-Z_]+=[^ `]+)*)(?: ([a-z-]+)| &&|`|$)")
	inSource := regexp.MustCompile(`\bmake((?: [A-Z_]+=\w+)+)(?: ([a-z-]+))?`)
	found := 0
	err := filepath.WalkDir("..", func(path string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if strings.HasPrefix(d.Name(), ".") && path != ".." || path == "../bin" || path == "../build" {
				return filepath.SkipDir
			}
			return nil
		}
		command := inSource
		switch filepath.Ext(path) {
		case ".md":
			command = inDocument
		case ".go", ".c", ".h", ".sh", ".py":
		default:
			return nil
		}
		for _, m := range command.FindAllStringSubmatch(read(t, path[len("../"):]), -1) {
			found++
			if !targets[m[2]] {
				t.Errorf("%s: %q names no target of the Makefile", path, m[0])
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if found < 50 {
		t.Errorf("%d commands were found, want 50 or more", found)
	}
}

// read reads a file of the repository.
func read(t testing.TB, path string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", filepath.FromSlash(path)))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
