package tests

// The list of locks in docs/design/locks.md: it is complete, its order has no cycle, and, with the record of
// tools/lock_order.sh, the tests take locks in that order only.

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const locksDocument = "docs/design/locks.md"

// lockSources tells whether the locks of a file belong into the list: not those of tests.
func lockSources(path string) bool {
	return !strings.HasPrefix(path, "tests/") && !strings.HasSuffix(path, "_test.go")
}

// locks finds all fields and variables of Go whose type is a lock, as "van/zmq.conn.holding", and where each is.
func locks(t *testing.T) map[string]string {
	t.Helper()
	found := map[string]string{}
	for _, s := range tree(t) {
		if !lockSources(s.path) {
			continue
		}
		add := func(owner string, names []*ast.Ident, typ ast.Expr) {
			sel, ok := typ.(*ast.SelectorExpr) // not *sync.Mutex, which is another one's
			if !ok || sel.Sel.Name != "Mutex" && sel.Sel.Name != "RWMutex" {
				return
			}
			if pkg, ok := sel.X.(*ast.Ident); !ok || pkg.Name != "sync" {
				return
			}
			if len(names) == 0 {
				names = []*ast.Ident{sel.Sel}
			}
			for _, n := range names {
				found[s.pkg+"."+strings.TrimPrefix(owner+"."+n.Name, ".")] = s.at(n)
			}
		}
		var fields func(owner string, typ ast.Expr)
		fields = func(owner string, typ ast.Expr) {
			st, ok := typ.(*ast.StructType)
			if !ok {
				return
			}
			for _, f := range st.Fields.List {
				add(owner, f.Names, f.Type)
				for _, n := range f.Names {
					fields(owner+"."+n.Name, f.Type)
				}
			}
		}
		for _, d := range s.ast.Decls {
			g, ok := d.(*ast.GenDecl)
			if !ok {
				continue
			}
			for _, spec := range g.Specs {
				switch spec := spec.(type) {
				case *ast.TypeSpec:
					fields(spec.Name.Name, spec.Type)
				case *ast.ValueSpec:
					typ := spec.Type
					if len(spec.Values) == 1 && typ == nil {
						if lit, ok := spec.Values[0].(*ast.CompositeLit); ok {
							typ = lit.Type
						}
					}
					add("", spec.Names, typ)
					for _, n := range spec.Names {
						fields(n.Name, typ)
					}
				}
			}
		}
	}
	return found
}

// cLocks finds the fields and variables of C whose type is a lock, as "van/zmq.shim.h:mu".
func cLocks(t *testing.T) map[string]string {
	t.Helper()
	found := map[string]string{}
	declares := regexp.MustCompile(`(?m)^\s*(?:static\s+)?pthread_(?:mutex|rwlock|spinlock)_t\s+(\w+)`)
	for _, pattern := range []string{"../*/*.[ch]", "../*/*/*.[ch]", "../*/*/*/*.[ch]"} {
		files, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			file = filepath.ToSlash(file)[len("../"):]
			if strings.HasPrefix(file, "tests/") {
				continue
			}
			for _, m := range declares.FindAllStringSubmatch(read(t, file), -1) {
				dir, base := filepath.Split(file)
				found[strings.TrimSuffix(dir, "/")+"."+base+":"+m[1]] = file
			}
		}
	}
	return found
}

// listedLocks reads the tables of locks.md: for each lock those that may be taken while it is held. A section names the
// package of its locks; those of other packages are written with theirs.
func listedLocks(t *testing.T) map[string][]string {
	t.Helper()
	rule := regexp.MustCompile(`^\|[-|: ]+\|$`)
	name := regexp.MustCompile("`([^`]+)`")
	listed, pkg := map[string][]string{}, ""
	lines := strings.Split(read(t, locksDocument), "\n")
	full := func(s string) string {
		if s == anyLock || strings.Contains(s, "/") || strings.HasPrefix(s, "af.") || strings.HasPrefix(s, "kv.") || strings.HasPrefix(s, "postoffice.") || strings.HasPrefix(s, "van.") {
			return s
		}
		return pkg + "." + s
	}
	for i, line := range lines {
		if h, ok := strings.CutPrefix(line, "### "); ok {
			pkg = strings.TrimSpace(h)
		}
		if strings.HasPrefix(line, "## ") {
			pkg = ""
		}
		if !strings.HasPrefix(line, "|") || rule.MatchString(line) || i+1 < len(lines) && rule.MatchString(lines[i+1]) || pkg == "" {
			continue
		}
		cells := strings.Split(strings.Trim(line, "|"), "|")
		if len(cells) != 3 {
			t.Errorf("%s: want a lock, what it guards, and what is taken under it: %s", locksDocument, line)
			continue
		}
		var under []string
		for _, m := range name.FindAllStringSubmatch(cells[2], -1) {
			under = append(under, full(m[1]))
		}
		for _, m := range name.FindAllStringSubmatch(cells[0], -1) {
			if _, again := listed[full(m[1])]; again {
				t.Errorf("%s lists %s twice", locksDocument, full(m[1]))
			}
			listed[full(m[1])] = under
		}
	}
	return listed
}

// closure adds to each lock what may be taken under those that may be taken under it. Under a lock that says any these
// are all but itself and those under which it is taken.
func closure(listed map[string][]string) map[string]map[string]bool {
	all := map[string]map[string]bool{}
	for l := range listed {
		all[l] = map[string]bool{}
		for todo := slices.Clone(listed[l]); len(todo) > 0; todo = todo[1:] {
			if !all[l][todo[0]] {
				all[l][todo[0]] = true
				todo = append(todo, listed[todo[0]]...)
			}
		}
	}
	for _, l := range slices.Sorted(maps.Keys(listed)) {
		if !all[l][anyLock] {
			continue
		}
		for u := range listed {
			if u != l && !all[u][l] {
				all[l][u] = true
			}
		}
	}
	return all
}

// anyLock says that the handler of a program runs while the lock is held.
const anyLock = "any"

// TestLocksAreListed: docs/design/locks.md lists every lock of the production code, and the order in which they are
// taken has no cycle.
func TestLocksAreListed(t *testing.T) {
	have, listed := locks(t), listedLocks(t)
	maps.Copy(have, cLocks(t))
	for _, l := range slices.Sorted(maps.Keys(have)) {
		if _, ok := listed[l]; !ok {
			t.Errorf("%s: %s does not list the lock %s", have[l], locksDocument, l)
		}
	}
	for _, l := range slices.Sorted(maps.Keys(listed)) {
		if have[l] == "" {
			t.Errorf("%s lists %s, which there is not", locksDocument, l)
		}
		for _, u := range listed[l] {
			if have[u] == "" && u != anyLock {
				t.Errorf("%s: under %s: there is no %s", locksDocument, l, u)
			}
		}
	}
	for l, under := range closure(listed) {
		if under[l] {
			t.Errorf("%s: %s may be taken while it is held itself", locksDocument, l)
		}
	}
	if len(have) < 100 {
		t.Errorf("%d locks were found, want 100 or more", len(have))
	}
}

// TestLockOrder: the pairs of places that tools/lock_order.sh has recorded are in the order of docs/design/locks.md.
func TestLockOrder(t *testing.T) {
	record := os.Getenv("LOCK_ORDER_RECORD")
	if record == "" {
		t.Skip("runs as part of make lockorder, which records the order in which the tests take locks")
	}
	text, err := os.ReadFile(record)
	if err != nil {
		t.Fatal(err)
	}
	at := lockCalls(t)
	under := closure(listedLocks(t))
	seen := map[string]bool{}
	pairs := 0
	for line := range strings.Lines(string(text)) {
		f := strings.Split(strings.TrimSpace(line), "\t")
		if len(f) != 6 {
			continue
		}
		held, taken := at[place(f[1], f[2])], at[place(f[3], f[4])]
		if held == "" || taken == "" || seen[held+" "+taken] {
			continue // a place outside of the production code
		}
		seen[held+" "+taken] = true
		pairs++
		if !under[held][taken] && (held != taken || held != "van/links.Node.sends") {
			t.Errorf("%s is taken while %s is held (%s:%s, %s:%s): %s does not say so", taken, held, f[3], f[4], f[1], f[2], locksDocument)
		}
	}
	t.Logf("%d pairs of locks", pairs)
}

// place is a place as the runtime of Go names it, from the root of the repository.
func place(file, line string) string {
	return strings.TrimPrefix(file, module+"/") + ":" + line
}

// lockCalls finds the calls that take a lock, and which lock each takes. It needs types, and so the export data of go list.
func lockCalls(t *testing.T) map[string]string {
	t.Helper()
	compiles(t)
	cmd := exec.CommandContext(t.Context(), "go", "list", "-e", "-export", "-deps", "-json=ImportPath,Dir,Export,GoFiles,CgoFiles,Standard", "./...")
	cmd.Dir = ".."
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	type pack struct {
		ImportPath, Dir, Export string
		GoFiles, CgoFiles       []string
		Standard                bool
	}
	exports := map[string]string{}
	var ours []pack
	for d := json.NewDecoder(bytes.NewReader(out)); ; {
		var p pack
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		exports[p.ImportPath] = p.Export
		if strings.HasPrefix(p.ImportPath, module+"/") && lockSources(strings.TrimPrefix(p.ImportPath, module+"/")+"/") {
			ours = append(ours, p)
		}
	}
	declared := map[string]string{} // by the place of the declaration
	for lock, at := range locks(t) {
		declared[at] = lock
	}
	at := map[string]string{}
	for _, p := range ours {
		fset := token.NewFileSet()
		dir := strings.TrimPrefix(p.ImportPath, module+"/")
		var files []*ast.File
		for _, name := range append(p.GoFiles, p.CgoFiles...) {
			f, err := parser.ParseFile(fset, filepath.Join(p.Dir, name), nil, parser.SkipObjectResolution)
			if err != nil {
				t.Fatal(err)
			}
			files = append(files, f)
		}
		where := func(pos token.Pos) string {
			q := fset.Position(pos)
			return fmt.Sprintf("%s/%s:%d", dir, filepath.Base(q.Filename), q.Line)
		}
		info := &types.Info{Selections: map[*ast.SelectorExpr]*types.Selection{}, Uses: map[*ast.Ident]types.Object{}, Types: map[ast.Expr]types.TypeAndValue{}}
		conf := types.Config{FakeImportC: true, Error: func(error) {}, Importer: importer.ForCompiler(fset, "gc", func(path string) (io.ReadCloser, error) {
			return os.Open(exports[path])
		})}
		_, _ = conf.Check(p.ImportPath, fset, files, info) // names of C cause errors
		lockOf := func(call *ast.SelectorExpr) string {
			if s := info.Selections[call]; s != nil && len(s.Index()) > 1 { // of an embedded lock
				typ := s.Recv()
				var field *types.Var
				for _, i := range s.Index()[:len(s.Index())-1] {
					if ptr, ok := typ.Underlying().(*types.Pointer); ok {
						typ = ptr.Elem()
					}
					st, ok := typ.Underlying().(*types.Struct)
					if !ok {
						return ""
					}
					field = st.Field(i)
					typ = field.Type()
				}
				return declared[where(field.Origin().Pos())]
			}
			var obj types.Object
			switch x := ast.Unparen(call.X).(type) {
			case *ast.SelectorExpr:
				if s := info.Selections[x]; s != nil {
					obj = s.Obj()
				}
			case *ast.Ident:
				obj = info.Uses[x]
			}
			if v, ok := obj.(*types.Var); ok {
				return declared[where(v.Origin().Pos())]
			}
			return ""
		}
		for _, f := range files {
			ast.Inspect(f, func(n ast.Node) bool {
				call, ok := n.(*ast.CallExpr)
				if !ok {
					return true
				}
				if sel, ok := call.Fun.(*ast.SelectorExpr); ok && slices.Contains([]string{"Lock", "RLock", "TryLock", "TryRLock"}, sel.Sel.Name) {
					if lock := lockOf(sel); lock != "" {
						at[where(call.Pos())] = lock
						at[where(sel.Sel.Pos())] = lock
					}
				}
				return true
			})
		}
	}
	if len(at) < 300 {
		t.Fatalf("%d calls that take locks were found, want 300 or more", len(at))
	}
	return at
}
