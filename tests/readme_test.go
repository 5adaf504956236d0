package tests

import (
	"os"
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

// Links between the documents lead somewhere.
func TestDocumentLinks(t *testing.T) {
	docs, err := filepath.Glob("../docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	link := regexp.MustCompile(`\]\(([^)#:]+)(#[^)]*)?\)`)
	program := regexp.MustCompile("(?s)```.*?```|`[^`\n]*`")
	for _, doc := range append(docs, "../README.md") {
		text, err := os.ReadFile(doc)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range link.FindAllStringSubmatch(program.ReplaceAllString(string(text), ""), -1) {
			if _, err := os.Stat(filepath.Join(filepath.Dir(doc), m[1])); err != nil {
				t.Errorf("%s: link to %s: %v", filepath.Base(doc), m[1], err)
			}
		}
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

// The documents name tests that exist.
func TestDocumentsNameTests(t *testing.T) {
	have := map[string]bool{}
	define := regexp.MustCompile(`(?m)^func (Test\w+)\(`)
	err := filepath.WalkDir("..", func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		text, err := os.ReadFile(path)
		for _, m := range define.FindAllStringSubmatch(string(text), -1) {
			have[m[1]] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	name := regexp.MustCompile("`(Test\\w+)(/([\\w-]+))?`")
	for _, doc := range []string{"docs/compatibility.md", "docs/architecture.md", "docs/errors.md"} {
		for _, m := range name.FindAllStringSubmatch(read(t, doc), -1) {
			if !have[m[1]] {
				t.Errorf("%s: there is no %s", doc, m[1])
			}
			if m[3] != "" {
				if _, err := os.Stat("../postoffice/membership/testdata/" + m[3] + ".txt"); err != nil {
					t.Errorf("%s: %v", doc, err)
				}
			}
		}
	}
}
