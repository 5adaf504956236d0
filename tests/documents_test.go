package tests

// Tests that read the documents: links, and the tests that docs/design/promises.md names.

import (
	"crypto/sha256"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// documents returns the paths of all documents below the root of the repository.
func documents(t *testing.T) []string {
	t.Helper()
	docs, err := filepath.Glob("../*.md")
	if err != nil {
		t.Fatal(err)
	}
	err = filepath.WalkDir("../docs", func(path string, _ fs.DirEntry, err error) error {
		if filepath.Ext(path) == ".md" {
			docs = append(docs, path)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(docs) < 10 {
		t.Fatalf("%d documents were found, want 10 or more", len(docs))
	}
	for i := range docs {
		docs[i] = filepath.ToSlash(docs[i])[len("../"):]
	}
	return docs
}

// Links between the documents lead to existing files and headings.
func TestDocumentLinks(t *testing.T) {
	link := regexp.MustCompile(`\]\(([^)#:]*)(#[^)]*)?\)`)
	program := regexp.MustCompile("(?s)```.*?```|`[^`\n]*`")
	headings := map[string]map[string]bool{}
	found := 0
	for _, doc := range documents(t) {
		for _, m := range link.FindAllStringSubmatch(program.ReplaceAllString(read(t, doc), ""), -1) {
			target := doc
			if m[1] != "" {
				target = filepath.ToSlash(filepath.Join(filepath.Dir(doc), m[1]))
			}
			found++
			if _, err := os.Stat("../" + target); err != nil {
				t.Errorf("%s: link to %s: %v", doc, m[1], err)
				continue
			}
			if m[2] == "" || filepath.Ext(target) != ".md" {
				continue
			}
			if headings[target] == nil {
				headings[target] = anchors(read(t, target))
			}
			if !headings[target][m[2][1:]] {
				t.Errorf("%s: link to %s%s: no such heading", doc, m[1], m[2])
			}
		}
	}
	if found < 50 {
		t.Errorf("%d links were found, want 50 or more", found)
	}
}

// anchors returns the names under which GitHub shows the headings of text.
func anchors(text string) map[string]bool {
	names := map[string]bool{}
	text = regexp.MustCompile("(?s)```.*?```").ReplaceAllString(text, "")
	for _, m := range regexp.MustCompile(`(?m)^#+ +(.*?) *$`).FindAllStringSubmatch(text, -1) {
		name := regexp.MustCompile(`\]\([^)]*\)`).ReplaceAllString(m[1], "")
		name = regexp.MustCompile(`[^\pL\pN _-]`).ReplaceAllString(strings.ToLower(name), "")
		names[strings.ReplaceAll(name, " ", "-")] = true
	}
	return names
}

// existing is the tests that documents may name: the directories of each Go test, and the Python tests.
type existing struct {
	tests  map[string][]string
	python map[string]bool
}

func readExisting(t *testing.T) existing {
	t.Helper()
	have := existing{map[string][]string{}, map[string]bool{}}
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
	named   = regexp.MustCompile("`(Test[A-Z]\\w+)(?:/([\\w*-]+))?`(?: \\(((?:[a-z]+/)*[a-z]+(?:, (?:[a-z]+/)*[a-z]+)*)\\))?")
	pyNamed = regexp.MustCompile("`(test_\\w+)`")
	// randomPlan is the name of a plan that is drawn from a seed.
	randomPlan = regexp.MustCompile(`^random-\d+$`)
	plans      = regexp.MustCompile("\\b[Pp]lans? (`[\\w-]+`(?:(?:, | and )`[a-z][\\w-]+`)*)")
)

// names counts the tests, scripts and plans that text names, and lists those that do not exist.
func (have existing) names(text string) (all int, wrong []string) {
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
			for dir := range strings.SplitSeq(m[3], ", ") {
				if !slices.Contains(dirs, dir) {
					wrong = append(wrong, m[1]+" in "+dir)
				}
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
			if !randomPlan.MatchString(plan) {
				exists("../tests/plans/"+plan+".json", "plan "+plan)
			}
		}
	}
	return all, wrong
}

// row is one row of a table: its first cell, and the whole line.
type row struct {
	first, line string
}

// tables returns the rows of the tables in text that follow a comment which matches marker, or of all tables if
// marker is nil, without their headers. The marker's first group, if there is one, begins the first cell.
func tables(text string, marker *regexp.Regexp) (rows []row) {
	rule := regexp.MustCompile(`^\|[-|: ]+\|$`)
	marked, prefix := marker == nil, ""
	lines := strings.Split(text, "\n")
	for i, line := range lines {
		switch {
		case strings.HasPrefix(line, "|"):
			if !marked || rule.MatchString(line) || i+1 < len(lines) && rule.MatchString(lines[i+1]) {
				continue
			}
			first, _, _ := strings.Cut(line[len("|"):], "|")
			rows = append(rows, row{prefix + strings.TrimSpace(first), line})
		case marker == nil || line == "":
		default:
			m := marker.FindStringSubmatch(line)
			marked, prefix = m != nil, ""
			if len(m) > 1 && m[1] != "" {
				prefix = m[1] + " "
			}
		}
	}
	return rows
}

// promiseKey returns what a row of promises.md and one of a user's page have in common: the code span with which the
// first cell begins, otherwise the words before a colon.
func promiseKey(cell string) string {
	if m := regexp.MustCompile("^`[^`]+`").FindString(cell); m != "" {
		return m
	}
	key, _, _ := strings.Cut(cell, ":")
	return strings.ToLower(key)
}

const promises = "docs/design/promises.md"

// TestPromises: every promise of docs/design/promises.md names what tests it, or says that nothing does. Every row of
// the marked tables of other pages has such a promise.
func TestPromises(t *testing.T) {
	have := readExisting(t)
	tested := map[string]bool{}
	for _, r := range tables(read(t, promises), nil) {
		n, wrong := have.names(r.line)
		if n == 0 && !strings.Contains(r.line, "not tested") {
			t.Errorf("%s names no test and does not say \"not tested\": %.120s", promises, r.line)
		}
		if len(wrong) > 0 {
			t.Errorf("%s: there is no %s", promises, strings.Join(wrong, ", no "))
		}
		tested[promiseKey(r.first)] = true
	}
	if len(tested) < 250 {
		t.Errorf("%s: %d promises were found, want 250 or more", promises, len(tested))
	}
	marker := regexp.MustCompile(`^<!-- promises(?:: (\w+))? -->$`)
	marked := 0
	for _, doc := range documents(t) {
		for _, r := range tables(read(t, doc), marker) {
			marked++
			if key := promiseKey(r.first); !tested[key] {
				t.Errorf("%s: no row of %s begins with %s, which names its test: %.120s", doc, promises, key, r.line)
			}
		}
	}
	if marked < 100 {
		t.Errorf("%d rows of tables marked with <!-- promises --> were found, want 100 or more", marked)
	}
}

// TestDocumentsNameTests: tests, scripts and plans that documents name exist. Lab notes may name former ones.
func TestDocumentsNameTests(t *testing.T) {
	have := readExisting(t)
	for _, doc := range documents(t) {
		if strings.HasPrefix(doc, "docs/lab/") || doc == "docs/testing.md" {
			continue
		}
		if _, wrong := have.names(read(t, doc)); len(wrong) > 0 {
			t.Errorf("%s: there is no %s", doc, strings.Join(wrong, ", no "))
		}
	}
}

// TestDesignNames: where design documents name a file, or a function of a file as `af/call.go:start`, both are there.
func TestDesignNames(t *testing.T) {
	name := regexp.MustCompile("`((?:[\\w]+/)*[\\w]+\\.(?:go|c|h|md|sh|txt))(?::(\\w+))?`")
	functions := 0
	for _, doc := range documents(t) {
		if !strings.HasPrefix(doc, "docs/design/") {
			continue
		}
		for _, m := range name.FindAllStringSubmatch(read(t, doc), -1) {
			if !strings.Contains(m[1], "/") {
				continue // of a package that the text names
			}
			text, err := os.ReadFile("../" + m[1])
			if err != nil {
				t.Errorf("%s names %s: %v", doc, m[1], err)
				continue
			}
			if m[2] == "" || filepath.Ext(m[1]) != ".go" {
				continue
			}
			functions++
			if !regexp.MustCompile(`(?m)^func (\([^)]*\) )?` + m[2] + `[\[(]`).Match(text) {
				t.Errorf("%s: %s has no function %s", doc, m[1], m[2])
			}
		}
	}
	if functions < 30 {
		t.Errorf("%d functions were found, want 30 or more", functions)
	}
}

// TestPictures: every picture of the documents is shown by one of them, and was made from its present source.
func TestPictures(t *testing.T) {
	shown := map[string]bool{}
	picture := regexp.MustCompile(`\]\(([^)]+\.svg)\)`)
	for _, doc := range documents(t) {
		for _, m := range picture.FindAllStringSubmatch(read(t, doc), -1) {
			shown[filepath.ToSlash(filepath.Join(filepath.Dir(doc), m[1]))] = true
		}
	}
	const dir = "docs/pictures/"
	with := map[string]string{".dot": "", ".puml": read(t, dir+"style.iuml"), ".gp": read(t, dir+"performance.txt")}
	sources := 0
	entries, err := os.ReadDir("../" + dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		name := e.Name()
		base, ext := strings.TrimSuffix(name, filepath.Ext(name)), filepath.Ext(name)
		if ext == ".svg" && !shown[dir+name] {
			t.Errorf("no document shows %s%s", dir, name)
		}
		if ext == ".svg" && !slices.ContainsFunc(entries, func(o os.DirEntry) bool {
			_, source := with[filepath.Ext(o.Name())]
			return source && strings.TrimSuffix(o.Name(), filepath.Ext(o.Name())) == base
		}) {
			t.Errorf("%s%s has no source", dir, name)
		}
		more, source := with[ext]
		if !source {
			continue
		}
		sources++
		want := fmt.Sprintf("<!-- Made by make pictures from %s; sources %x -->\n", name, sha256.Sum256([]byte(read(t, dir+name)+more)))
		if !strings.HasPrefix(read(t, dir+base+".svg"), want) {
			t.Errorf("%s%s.svg is older than its source: run make pictures", dir, base)
		}
	}
	if sources < 8 {
		t.Errorf("%d pictures were found, want 8 or more", sources)
	}
}
