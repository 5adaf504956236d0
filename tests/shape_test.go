package tests

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// ceiling is the number of fields that a type may have, and why it is more than maxFields.
type ceiling struct {
	fields int
	why    string
}

const byEmbedding = "by embedding: its parts are to become held structs or packages, and this ceiling lower"

var wide = map[string]ceiling{
	"van/env.Config":                     {200, "a flat table: a field for each variable"},
	"van.Meta":                           {40, "mirrors the record on the wire, whose fields are the original's"},
	"van.Message":                        {43, "a Meta, and how the process holds it"},
	"tools/internal/bench.latencyReport": {30, byEmbedding},
	"postoffice/membership.Machine":      {36, byEmbedding},
	"van/backend.gpu":                    {52, byEmbedding},
	"van/zmq.zvan":                       {36, byEmbedding},
}

const (
	maxFields  = 25
	maxMethods = 30
)

// nothing imports every package as an empty one: only the calls between files of one package
// are checked.
type nothing struct{}

func (nothing) Import(p string) (*types.Package, error) {
	pkg := types.NewPackage(p, path.Base(p))
	pkg.MarkComplete()
	return pkg, nil
}

// fieldCount returns the number of fields of s. An embedded struct of the same package counts with its own fields.
func fieldCount(s *types.Struct, pkg *types.Package, within ...*types.Named) (n int) {
	for f := range s.Fields() {
		t := f.Type()
		if p, ok := t.(*types.Pointer); ok {
			t = p.Elem()
		}
		named, _ := t.(*types.Named)
		if f.Embedded() && named != nil && named.Obj().Pkg() == pkg && !slices.Contains(within, named) {
			if inner, ok := named.Underlying().(*types.Struct); ok {
				n += fieldCount(inner, pkg, append(within, named)...)
				continue
			}
		}
		n++
	}
	return n
}

// calls returns which file of a package calls a function of which other file, by name, and
// how many fields and methods the package's types have.
func calls(fset *token.FileSet, files []*ast.File) (arrows map[[2]string]string, fields, methods map[string]int) {
	info := &types.Info{Uses: map[*ast.Ident]types.Object{}}
	c := types.Config{Importer: nothing{}, Error: func(error) {}} // most of other packages is unknown
	pkg, _ := c.Check("shaped", fset, files, info)
	file := func(p token.Pos) string { return filepath.Base(fset.Position(p).Filename) }
	arrows, fields, methods = map[[2]string]string{}, map[string]int{}, map[string]int{}
	for id, o := range info.Uses {
		f, ok := o.(*types.Func)
		if !ok || f.Pkg() != pkg {
			continue
		}
		f = f.Origin()
		if r := f.Signature().Recv(); r != nil && types.IsInterface(r.Type()) {
			continue
		}
		if from, to := file(id.Pos()), file(f.Pos()); from != to {
			arrows[[2]string{from, to}] = f.Name()
		}
	}
	for _, name := range pkg.Scope().Names() {
		t, ok := pkg.Scope().Lookup(name).(*types.TypeName)
		if !ok || t.IsAlias() {
			continue
		}
		n, ok := t.Type().(*types.Named)
		if !ok {
			continue
		}
		methods[name] = n.NumMethods()
		if i, ok := n.Underlying().(*types.Interface); ok {
			methods[name] = i.NumExplicitMethods()
		}
		if s, ok := n.Underlying().(*types.Struct); ok {
			fields[name] = fieldCount(s, pkg, n)
		}
	}
	return arrows, fields, methods
}

// circle returns files that call each other in a circle, nil if none do.
func circle(arrows map[[2]string]string) []string {
	const open, done = 1, 2
	state := map[string]int{}
	var way []string
	var visit func(f string) []string
	visit = func(f string) []string {
		state[f] = open
		way = append(way, f)
		for a := range arrows {
			switch to := a[1]; {
			case a[0] != f || state[to] == done:
			case state[to] == open:
				return append(slices.Clone(way[slices.Index(way, to):]), to)
			default:
				if c := visit(to); c != nil {
					return c
				}
			}
		}
		way = way[:len(way)-1]
		state[f] = done
		return nil
	}
	for a := range arrows {
		if state[a[0]] == 0 {
			if c := visit(a[0]); c != nil {
				return c
			}
		}
	}
	return nil
}

func TestShape(t *testing.T) {
	fset := token.NewFileSet()
	packages := map[string][]*ast.File{}
	for _, s := range tree(t) {
		if s.test || s.pkg == "tests" || strings.HasPrefix(s.pkg, "tests/") {
			continue
		}
		f, err := parser.ParseFile(fset, filepath.Join("..", s.path), nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		packages[s.pkg] = append(packages[s.pkg], f)
	}
	used := map[string]bool{}
	for dir, files := range packages {
		say := func(format string, args ...any) { t.Error(dir + ": " + fmt.Sprintf(format, args...)) }
		arrows, fields, methods := calls(fset, files)
		if len(files) > 3 && len(arrows) == 0 {
			t.Errorf("%s: no file calls another: the check sees nothing", dir)
		}
		if c := circle(arrows); c != nil {
			say("files call each other in a circle: %s", strings.Join(c, " -> "))
			for i := range c[1:] {
				say("%s calls %s of %s", c[i], arrows[[2]string{c[i], c[i+1]}], c[i+1])
			}
		}
		for name, n := range fields {
			full := dir + "." + name
			used[full] = n > maxFields
			if most := max(maxFields, wide[full].fields); n > most {
				say("type %s has %d fields, those of embedded structs included, want at most %d", name, n, most)
			}
		}
		for name, n := range methods {
			if n > maxMethods {
				say("type %s has %d methods, want at most %d", name, n, maxMethods)
			}
		}
	}
	for name := range wide {
		if !used[name] {
			t.Errorf("%s: it has no more than %d fields, or is not there: take it off the list", name, maxFields)
		}
	}
}

// TestCircle: a circle is found wherever the search begins.
func TestCircle(t *testing.T) {
	none := map[[2]string]string{{"a", "b"}: "f", {"a", "c"}: "f", {"b", "c"}: "f", {"c", "d"}: "f"}
	if c := circle(none); c != nil {
		t.Errorf("found %v where there is none", c)
	}
	none[[2]string{"d", "b"}] = "g"
	if c := circle(none); len(c) != 4 || c[0] != c[3] {
		t.Errorf("found %v, want the circle of b, c and d", c)
	}
}
