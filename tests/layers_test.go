// Package tests holds checks of the whole tree: which package may import which,
// rules of the house, and the launch scripts.
package tests

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const module = "github.com/stepaf/stepaf-go"

// source is one Go file of the tree.
type source struct {
	path string // from the root, with slashes
	pkg  string // its directory, "." for the root
	test bool
	ast  *ast.File
	fset *token.FileSet
}

func (s *source) at(n ast.Node) string {
	return fmt.Sprintf("%s:%d", s.path, s.fset.Position(n.Pos()).Line)
}

// imports lists the imported paths.
func (s *source) imports() []string {
	var l []string
	for _, i := range s.ast.Imports {
		p, err := strconv.Unquote(i.Path.Value)
		if err == nil {
			l = append(l, p)
		}
	}
	return l
}

// tree parses every Go file below the root.
func tree(t *testing.T) []*source {
	t.Helper()
	var all []*source
	err := filepath.WalkDir("..", func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel("..", p)
		if err != nil {
			return err
		}
		rel = filepath.ToSlash(rel)
		if d.IsDir() && (rel != "." && strings.HasPrefix(d.Name(), ".") || rel == "bin" || rel == "build") {
			return filepath.SkipDir
		}
		if d.IsDir() || !strings.HasSuffix(rel, ".go") {
			return nil
		}
		s := &source{path: rel, pkg: path.Dir(rel), test: strings.HasSuffix(rel, "_test.go"), fset: token.NewFileSet()}
		s.ast, err = parser.ParseFile(s.fset, p, nil, parser.SkipObjectResolution)
		all = append(all, s)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(all) < 50 {
		t.Fatalf("found %d Go files: the tree must be elsewhere", len(all))
	}
	return all
}

// layers lists the packages of this module that packages may import. The first rule whose
// pattern fits counts. A pattern or permission ending in / is everything below. Imports that
// a rule does not list are forbidden, so transports do not know each other. See
// docs/design/architecture.md.
var layers = []struct {
	packages string
	may      []string
}{
	{"tools/", []string{"*"}},
	{"tests/testlimit", nil},
	{"tests/", []string{"*"}},
	{"van/env", []string{"internal/hostaddr"}},
	{"internal/cluster", []string{"postoffice/membership", "van", "van/backend", "van/stack", "van/env", "internal/"}},
	{"internal/datamsg", []string{"internal/cluster", "van", "van/backend"}},
	{"internal/gpusync", []string{"van", "van/backend", "internal/"}},
	{"internal/hostaddr", nil},
	{"internal/streamqueue", []string{"van", "van/backend", "van/env", "internal/"}},
	{"internal/", []string{"internal/", "van/env"}},
	{"van/backend/", []string{"van/env", "internal/"}},
	{"van/stack", []string{"van/"}},
	{"van/auth", []string{"van/env", "internal/"}},
	{"van/rdma/", []string{"van/rdma/", "van/rendezvous", "van", "van/auth", "van/backend", "van/engine", "van/env", "internal/"}},
	{"van/engine", []string{"van/env", "internal/"}},
	{"van/landing", []string{"van", "van/backend"}},
	{"van/hostmem", []string{"van/backend", "internal/"}},
	{"van/links", []string{"van", "internal/"}},
	{"van/", []string{"van", "van/auth", "van/backend", "van/engine", "van/env", "van/hostmem", "van/landing", "van/links", "internal/"}},
	{"postoffice/membership", []string{"van", "van/backend", "van/env", "internal/"}},
	{"postoffice/clustertest", []string{"postoffice", "internal/cluster", "tests/inproc"}},
	{"postoffice", []string{"internal/cluster", "van", "van/backend", "van/env"}},
	{"kv/session", []string{"kv", "postoffice", "van", "internal/"}},
	{"kv/", []string{"postoffice", "van", "van/backend", "van/env", "internal/"}},
	{"af/streams", []string{"af", "postoffice", "van", "van/backend", "internal/"}},
	{"af/window", []string{"af", "af/collective", "postoffice", "van", "van/backend", "internal/"}},
	{"af/collective", []string{"af", "postoffice", "van", "van/backend", "internal/"}},
	{"af/", []string{"kv", "postoffice", "van", "van/backend", "van/env", "van/hostmem", "internal/"}},
	{"fserver/module", []string{"fserver/core", "af", "van", "van/backend"}},
	{"fserver/core", []string{"af", "af/collective", "af/streams", "af/window", "kv/session", "postoffice", "van", "van/backend", "van/env", "internal/"}},
}

// atTop are the packages' directories at the top level; the users of the project have
// chosen them.
var atTop = []string{"postoffice", "van", "kv", "af", "fserver", "tools", "tests", "internal"}

// TestTopLevel finds Go code in other directories of the top level.
func TestTopLevel(t *testing.T) {
	for _, s := range tree(t) {
		if top, _, _ := strings.Cut(s.path, "/"); !slices.Contains(atTop, top) {
			t.Errorf("%s: want it below one of %s", s.path, strings.Join(atTop, ", "))
		}
	}
}

// fits tells whether pkg matches the pattern.
func fits(pattern, pkg string) bool {
	below, all := strings.CutSuffix(pattern, "/")
	return pattern == "*" || pkg == below || all && strings.HasPrefix(pkg, below+"/")
}

// allowed tells whether from may import to, and whether any rule speaks of from.
func allowed(from, to string) (ok, known bool) {
	for _, l := range layers {
		if fits(l.packages, from) {
			// A package may be split into parts below it.
			return from == to || strings.HasPrefix(to, from+"/") && from != "van" ||
				slices.ContainsFunc(l.may, func(m string) bool { return fits(m, to) }), true
		}
	}
	return false, false
}

// forTests tells whether pkg serves tests only.
func forTests(pkg string) bool {
	return pkg == "postoffice/clustertest" || pkg == "tests" || strings.HasPrefix(pkg, "tests/")
}

func TestImportsPointDown(t *testing.T) {
	for _, s := range tree(t) {
		if s.test || s.pkg == "." {
			continue
		}
		if _, known := allowed(s.pkg, ""); !known {
			t.Errorf("%s: package %s is in no layer: put it into one here and in docs/design/architecture.md", s.path, s.pkg)
		}
		for _, i := range s.imports() {
			to, ours := strings.CutPrefix(i, module+"/")
			if !ours {
				continue
			}
			if ok, _ := allowed(s.pkg, to); !ok {
				t.Errorf("%s: %s must not import %s", s.path, s.pkg, to)
			}
			// "stepaf bench software" measures without a network or a device.
			if forTests(to) && !forTests(s.pkg) && !(s.pkg == "tools/internal/bench" && slices.Contains([]string{"tests/fakeverbs", "tests/inproc", "postoffice/clustertest"}, to)) {
				t.Errorf("%s: %s is for tests", s.path, to)
			}
		}
	}
}

// TestEveryTestHasALimit finds packages with tests that import tests/testlimit neither directly nor through
// another package. A test that hangs there ends only at the limit of "go test", after minutes.
func TestEveryTestHasALimit(t *testing.T) {
	const limit = "tests/testlimit"
	imports, tests := map[string][]string{}, map[string][]string{}
	for _, s := range tree(t) {
		if strings.Contains(s.path, "/testdata/") {
			continue
		}
		to := imports
		if s.test {
			to = tests
		}
		to[s.pkg] = append(to[s.pkg], s.imports()...)
	}
	for pkg, todo := range tests {
		reached := map[string]bool{}
		for todo = append(todo, imports[pkg]...); len(todo) > 0 && !reached[limit]; {
			next, ours := strings.CutPrefix(todo[0], module+"/")
			if todo = todo[1:]; ours && !reached[next] {
				reached[next] = true
				todo = append(todo, imports[next]...)
			}
		}
		if !reached[limit] && pkg != limit {
			t.Errorf("%s: its tests have no limit: import _ %q in one of them", pkg, module+"/"+limit)
		}
	}
}

func TestAllowed(t *testing.T) {
	for _, c := range []struct {
		from, to string
		want     bool
	}{
		{"af", "kv", true}, {"kv", "af", false}, {"postoffice", "kv", false}, {"postoffice", "van/zmq", false},
		{"van/zmq", "van/inproc", false}, {"van/zmq", "van", true}, {"van", "van/zmq", false}, {"van", "postoffice", false},
		{"van", "van/backend", true}, {"van/backend", "van", false}, {"van/env", "van", false},
		{"internal/logx", "van/env", true}, {"postoffice/membership", "postoffice", false}, {"van/rdma", "van/rdma/verbs", true},
		{"van/rdma/choose", "van/rdma/verbs", true}, {"van/rdma", "van/zmq", false}, {"internal/cluster", "van/rdma/choose", false}, {"internal/cluster", "postoffice", false},
		{"tools/internal/app", "af", true}, {"af", "tools/internal/app", false},
		{"fserver/module", "fserver/core", true}, {"fserver/core", "fserver/module", false}, {"fserver/core", "kv", false}, {"af", "fserver/core", false},
	} {
		if got, _ := allowed(c.from, c.to); got != c.want {
			t.Errorf("%s may import %s: %v, want %v", c.from, c.to, got, c.want)
		}
	}
	if _, known := allowed("newthing", "van"); known {
		t.Error("an unknown package has a layer")
	}
}

// TestMembershipIsPure: the rules of a cluster know no socket, clock or goroutine.
func TestMembershipIsPure(t *testing.T) {
	for _, s := range tree(t) {
		if s.pkg != "postoffice/membership" || s.test {
			continue
		}
		for _, i := range s.imports() {
			if slices.Contains([]string{"net", "os", "sync", "sync/atomic", "context", "runtime"}, i) {
				t.Errorf("%s imports %s", s.path, i)
			}
		}
		ast.Inspect(s.ast, func(n ast.Node) bool {
			if g, ok := n.(*ast.GoStmt); ok {
				t.Errorf("%s: starts a goroutine", s.at(g))
			}
			if name := called(n); name == "time.Now" || name == "time.Since" || name == "time.After" {
				t.Errorf("%s: %s", s.at(n), name)
			}
			return true
		})
	}
}

// called is the name of the function that n calls, "" for others.
func called(n ast.Node) string {
	c, ok := n.(*ast.CallExpr)
	if !ok {
		return ""
	}
	switch f := c.Fun.(type) {
	case *ast.Ident:
		return f.Name
	case *ast.SelectorExpr:
		if x, ok := f.X.(*ast.Ident); ok {
			return x.Name + "." + f.Sel.Name
		}
	}
	return ""
}

// exceptions to the rules of the house, and why.
var exceptions = map[string]map[string]string{
	"panic": {
		"tests/testlimit/testlimit.go": "ends a test binary that hangs, with the stacks, as \"go test\" does",
		"van/backend/backend.go":       "Register called twice, as in database/sql",
		"van/backend/mem.go":           "a range outside the memory, as in slicing",
		"van/message.go":               "a message used after its release",
		"van/van.go":                   "Register called twice, as in database/sql",
	},
	"C": {
		"fserver/module/exports.go":            "the extension module for Python",
		"fserver/module/tensors.go":            "its part for what Python passes",
		"fserver/module/batches.go":            "its part for what get_batch gives to Python",
		"fserver/module/cuda.go":               "its part for signals between GPU and CPU",
		"fserver/module/answer.go":             "its part for answers that are awaited",
		"fserver/module/handles.go":            "its part for the handles of objects of Go",
		"fserver/module/prepared.go":           "its part for prepared exchanges",
		"fserver/module/sessions.go":           "its part for sessions",
		"fserver/module/streams.go":            "its part for exchanges in streams",
		"fserver/module/shared.go":             "its part for memory that processes share",
		"fserver/module/window.go":             "its part for windows",
		"fserver/module/collective.go":         "its part for collectives",
		"fserver/module/putback.go":            "its part for batches that Python could not take",
		"fserver/module/sockets.go":            "its part for forks",
		"fserver/module/threads.go":            "its part for the program's signals",
		"van/zmq/native.go":                    "libzmq and the shim for it",
		"van/backend/gpu_cuda_extra.go":        "what gorgonia.org/cu lacks of the driver API",
		"van/rdma/liveness/responder.go":       "the thread that answers while Go's do not run",
		"van/rdma/verbs/":                      "libibverbs and librdmacm and the shim for them, and nothing else",
		"tools/internal/bench/floor.go":        "the floor that benchmarks are compared with",
		"tools/internal/bench/floor_zmq.go":    "libzmq by itself, as such a floor",
		"tools/internal/bench/floor_shared.go": "the floor in shared memory",
	},
	"math/rand": {
		"van/drop/drop.go":               "losses that a seed decides",
		"tests/fakeverbs/net.go":         "likewise",
		"van/rdma/dial.go":               "how long to wait before the next attempt",
		"tools/internal/doctor/pairs.go": "contents of copies",
		"tools/internal/launch/plan.go":  "ports to try",
	},
	"time.Sleep": {
		"van/engine/loop_test.go":   "plays a slow handler, and waits for nothing to happen",
		"van/engine/budget_test.go": "likewise",
	},
}

// excepted also finds exceptions for the whole package, whose name ends with a slash.
func excepted(rule string, s *source) bool {
	return exceptions[rule][s.path] != "" || exceptions[rule][s.pkg+"/"] != ""
}

func TestHouseRules(t *testing.T) {
	seen := map[string]bool{}
	for _, s := range tree(t) {
		program := strings.HasPrefix(s.pkg, "tools") || strings.HasPrefix(s.pkg, "tests")
		imports := s.imports()
		if slices.Contains(imports, "C") {
			seen["C "+s.path] = true
			if !excepted("C", s) {
				t.Errorf("%s: imports C; C belongs to the files listed here", s.path)
			}
		}
		if slices.Contains(imports, "math/rand/v2") || slices.Contains(imports, "math/rand") {
			seen["math/rand "+s.path] = true
			if !s.test && s.pkg != "tests" && !strings.HasPrefix(s.pkg, "tests/") && !excepted("math/rand", s) {
				t.Errorf("%s: imports math/rand; what tells processes apart is of internal/random", s.path)
			}
		}
		synctest := slices.Contains(imports, "testing/synctest") // where time is not real
		ast.Inspect(s.ast, func(n ast.Node) bool {
			name := called(n)
			seen[name+" "+s.path] = true
			switch name {
			case "os.Getenv", "os.LookupEnv", "os.Environ", "os.ExpandEnv":
				if !program && !s.test && s.pkg != "van/env" {
					t.Errorf("%s: %s; van/env reads the environment", s.at(n), name)
				}
			case "panic":
				if !program && !s.test && !excepted("panic", s) {
					t.Errorf("%s: panic; return an error", s.at(n))
				}
			case "os.Exit", "log.Fatal", "log.Fatalf", "log.Fatalln":
				if !program && !s.test {
					t.Errorf("%s: %s in a library; return an error", s.at(n), name)
				}
			case "time.Sleep":
				if s.test && !synctest && !excepted("time.Sleep", s) {
					t.Errorf("%s: time.Sleep in a test; wait for what is to happen", s.at(n))
				}
			}
			return true
		})
	}
	for rule, files := range exceptions {
		for file := range files {
			if !seen[rule+" "+file] && !slices.ContainsFunc(slices.Collect(maps.Keys(seen)), func(at string) bool {
				return strings.HasSuffix(file, "/") && strings.HasPrefix(at, rule+" "+file)
			}) {
				t.Errorf("the exception of %s for %s is not needed any more", file, rule)
			}
		}
	}
}
