package tests

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestReadmePrograms: a Go program in a document is the file of tests/examples that its first line names.
func TestReadmePrograms(t *testing.T) {
	block := regexp.MustCompile("(?s)```go\n(// Command (\\w+) .*?)```")
	shown := map[string]string{}
	for _, doc := range documents(t) {
		for _, m := range block.FindAllStringSubmatch(read(t, doc), -1) {
			file := "tests/examples/" + m[2] + "/main.go"
			if m[1] != read(t, file) {
				t.Errorf("program %s of %s is not %s: copy the file there", m[2], doc, file)
			}
			shown[m[2]] = doc
		}
	}
	for program, doc := range map[string]string{"af": "README.md", "retry": "docs/getting-started.md", "checkpoint": "docs/kv.md"} {
		if shown[program] != doc {
			t.Errorf("%s does not show tests/examples/%s/main.go", doc, program)
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

// TestExampleCheckpoint: servers continue from the values that their predecessors have saved.
func TestExampleCheckpoint(t *testing.T) {
	file := filepath.Join(t.TempDir(), "values")
	for _, want := range []string{"values [-0.1 -0.2 -0.3 -0.4]", "values [-0.2 -0.4 -0.6 -0.8]"} {
		c := newCluster(t, 1, 2, 1)
		c.program("checkpoint")
		c.args = []string{file}
		c.start()
		c.mustSucceed()
		if out := strings.Join(c.role("worker")[0].lines(), "\n"); out != want {
			t.Errorf("the worker printed %q, want %q", out, want)
		}
	}
}

// TestReadmeCommands: the commands of the documents that build and run an example print the expected text.
func TestReadmeCommands(t *testing.T) {
	compiles(t)
	bin := t.TempDir()
	run := func(command string) string {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), "sh", "-c", strings.ReplaceAll(command, "bin/", bin+"/"))
		cmd.Dir = ".."
		cmd.Env = append(os.Environ(), "GOFLAGS="+strings.Join(append(tags(), "-buildvcs=false", os.Getenv("GOFLAGS")), " "))
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Errorf("%s: %v\n%s", command, err, out)
		}
		return string(out)
	}
	run("go build -o bin/stepaf ./tools/stepaf")
	commands := regexp.MustCompile(`(?m)^    (go build .* && bin/stepaf launch .*)$`).FindAllStringSubmatch(read(t, "README.md")+read(t, "docs/kv.md"), -1)
	want := []string{"[1 2 3 4] doubled is [2 4 6 8]", "pulled [2 4 6]"}
	if len(commands) != len(want) {
		t.Fatalf("README.md and docs/kv.md build and run %d programs, want %d", len(commands), len(want))
	}
	for i, c := range commands {
		if out := run(c[1]); !strings.Contains(out, want[i]) {
			t.Errorf("%s printed %q, want %q in it", c[1], out, want[i])
		}
	}
}

// Make targets in documents and messages exist. "make" without a target lists the targets, and builds nothing.
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
