package tests

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
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

// Links between the documents lead somewhere.
func TestDocumentLinks(t *testing.T) {
	docs, err := filepath.Glob("../docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	link := regexp.MustCompile(`\]\(([^)#:]+)(#[^)]*)?\)`)
	program := regexp.MustCompile("(?s)```.*?```|`[^`\n]*`")
	for _, doc := range append(docs, "../README.md", "../SECURITY.md") {
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

// nameable is what the documents may name: the directories in which each test is, and the Python tests.
type nameable struct {
	tests  map[string][]string
	python map[string]bool
}

func readNameable(t *testing.T) nameable {
	t.Helper()
	have := nameable{map[string][]string{}, map[string]bool{}}
	define := regexp.MustCompile(`(?m)^func (Test\w+)\(`)
	python := regexp.MustCompile(`(?m)^(?:async )?def (test_\w+)\(`)
	err := filepath.WalkDir("..", func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, "_test.go") && !strings.HasSuffix(path, ".py") {
			return err
		}
		text, err := os.ReadFile(path)
		dir := filepath.ToSlash(filepath.Dir(path))[len(".."):]
		for _, m := range define.FindAllStringSubmatch(string(text), -1) {
			have.tests[m[1]] = append(have.tests[m[1]], strings.TrimPrefix(dir, "/"))
		}
		for _, m := range python.FindAllStringSubmatch(string(text), -1) {
			have.python[m[1]] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return have
}

var (
	named   = regexp.MustCompile("`(Test\\w+)(?:/([\\w*-]+))?`(?:,? ?\\(?((?:[a-z]+/)*[a-z]+)\\b)?")
	pyNamed = regexp.MustCompile("`(test_\\w+)`")
	plans   = regexp.MustCompile("\\b[Pp]lans? (`[\\w-]+`(?:(?:, | and )`[a-z][\\w-]+`)*)")
)

// names lists what text names, and what of it does not exist.
func (have nameable) names(text string) (all int, wrong []string) {
	exists := func(pattern, name string) {
		if found, err := filepath.Glob(pattern); err != nil || len(found) == 0 {
			wrong = append(wrong, name)
		}
	}
	for _, m := range named.FindAllStringSubmatch(text, -1) {
		all++
		switch dirs := have.tests[m[1]]; {
		case dirs == nil:
			wrong = append(wrong, m[1])
		case m[1] == "TestScripts" && m[2] != "":
			exists("../postoffice/membership/testdata/"+m[2]+".txt", m[1]+"/"+m[2])
		case m[3] != "":
			if _, err := os.Stat("../" + m[3]); err == nil && !slices.Contains(dirs, m[3]) {
				wrong = append(wrong, m[1]+" in "+m[3])
			}
		}
	}
	for _, m := range pyNamed.FindAllStringSubmatch(text, -1) {
		all++
		if !have.python[m[1]] {
			wrong = append(wrong, m[1])
		}
	}
	for _, m := range plans.FindAllStringSubmatch(text, -1) {
		for _, plan := range regexp.MustCompile(`[\w-]+`).FindAllString(strings.ReplaceAll(m[1], " and ", " "), -1) {
			all++
			exists("../tests/plans/"+plan+".json", "plan "+plan)
		}
	}
	return all, wrong
}

// The documents name tests, scripts and plans that exist.
func TestDocumentsNameTests(t *testing.T) {
	have := readNameable(t)
	for _, doc := range []string{"docs/compatibility.md", "docs/architecture.md", "docs/errors.md"} {
		if _, wrong := have.names(read(t, doc)); len(wrong) > 0 {
			t.Errorf("%s: there is no %s", doc, strings.Join(wrong, ", no "))
		}
	}
}

// Whatever compatibility.md and errors.md promise names what tests it, or says that nothing does.
func TestPromisesNameTests(t *testing.T) {
	have := readNameable(t)
	rule := regexp.MustCompile(`^\|[-|]+\|$`)
	// What is no promise: which names of Go stand for which of C++.
	apart := map[string]bool{"## Names": true}
	for _, doc := range []string{"docs/compatibility.md", "docs/errors.md"} {
		promises := 0
		check := func(item string) {
			promises++
			if n, _ := have.names(item); n == 0 && !strings.Contains(item, "not tested") {
				t.Errorf("%s names no test and does not say \"not tested\": %.120s", doc, item)
			}
		}
		section, lines := "", strings.Split(read(t, doc), "\n")
		for i := 0; i < len(lines); i++ {
			switch line := lines[i]; {
			case strings.HasPrefix(line, "#"):
				section = line
			case apart[section]:
			case strings.HasPrefix(line, "* "):
				for i+1 < len(lines) && strings.HasPrefix(lines[i+1], "  ") {
					i++
					line += "\n" + lines[i]
				}
				check(line)
			case strings.HasPrefix(line, "|") && !rule.MatchString(line) && (i+1 == len(lines) || !rule.MatchString(lines[i+1])):
				check(line)
			}
		}
		if promises < 50 {
			t.Errorf("%s: %d promises were found, want 50 or more", doc, promises)
		}
	}
}
