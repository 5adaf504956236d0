package tests

import (
	"bytes"
	"go/ast"
	"go/doc"
	"go/parser"
	"go/printer"
	"go/token"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// public are the packages that other modules may import: the four of the API, and the
// packages that a third-party transport, device or test needs.
var public = []string{"af", "af/collective", "af/streams", "af/window", "kv", "kv/session", "postoffice", "postoffice/clustertest", "van", "van/backend", "van/env", "van/engine", "tests/vantest"}

// imported are the packages that a program imports, and mostNames is how many exported names they may have together. Constants
// or variables that share one comment count as one name.
var imported = []string{"af", "af/collective", "af/streams", "af/window", "kv", "kv/session", "postoffice"}

const mostNames = 300

// api is the exported part of a package.
type api struct {
	*doc.Package
	fset  *token.FileSet
	files []*ast.File
}

// packageAPI parses a package without its tests; files for other systems count as well.
func packageAPI(t *testing.T, pkg string) *api {
	t.Helper()
	a := &api{fset: token.NewFileSet()}
	entries, err := os.ReadDir("../" + pkg)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if name := e.Name(); strings.HasSuffix(name, ".go") && !strings.HasSuffix(name, "_test.go") {
			f, err := parser.ParseFile(a.fset, "../"+pkg+"/"+name, nil, parser.ParseComments)
			if err != nil {
				t.Fatal(err)
			}
			a.files = append(a.files, f)
		}
	}
	if a.Package, err = doc.NewFromFiles(a.fset, a.files, module+"/"+pkg, doc.PreserveAST); err != nil {
		t.Fatal(err)
	}
	return a
}

func (a *api) at(n ast.Node) string { return a.fset.Position(n.Pos()).String() }

// name is one exported name: the declaration and its comment.
type name struct {
	name string
	text string // as in Go, on one line
	doc  string
	node ast.Node

	shared bool // doc is that of a group of constants or variables
}

// names are the exported names in the order of the documentation.
func (a *api) names() (all []name) {
	values := func(list []*doc.Value) {
		for _, v := range list {
			for _, spec := range v.Decl.Specs {
				s := spec.(*ast.ValueSpec)
				own := strings.TrimSpace(s.Doc.Text() + " " + s.Comment.Text())
				if own == "" {
					own = v.Doc
				}
				for _, n := range s.Names {
					if n.IsExported() {
						all = append(all, name{n.Name, v.Decl.Tok.String() + " " + n.Name, own, n, len(v.Decl.Specs) > 1 && own == v.Doc})
					}
				}
			}
		}
	}
	funcs := func(list []*doc.Func) {
		for _, f := range list {
			if ast.IsExported(f.Name) {
				full := f.Name
				if f.Recv != "" {
					full = strings.Trim(f.Recv, "*") + "." + f.Name
				}
				d := *f.Decl
				d.Doc, d.Body = nil, nil
				all = append(all, name{full, a.print(&d), f.Doc, f.Decl, false})
			}
		}
	}
	values(a.Consts)
	values(a.Vars)
	funcs(a.Funcs)
	for _, x := range a.Types {
		all = append(all, name{x.Name, "type " + x.Name + a.kind(x), x.Doc, x.Decl, false})
		values(x.Consts)
		values(x.Vars)
		funcs(x.Funcs)
		funcs(x.Methods)
	}
	return all
}

// kind is the text after the name of a type in its declaration, if it is short.
func (a *api) kind(x *doc.Type) string {
	for _, spec := range x.Decl.Specs {
		s := spec.(*ast.TypeSpec)
		if s.Name.Name != x.Name {
			continue
		}
		switch s.Type.(type) {
		case *ast.StructType:
			return " struct"
		case *ast.InterfaceType:
			return " interface"
		}
		eq := " "
		if s.Assign.IsValid() {
			eq = " = "
		}
		return eq + a.print(s.Type)
	}
	return ""
}

func (a *api) print(n ast.Node) string {
	var b bytes.Buffer
	if err := printer.Fprint(&b, a.fset, n); err != nil {
		return err.Error()
	}
	return strings.Join(strings.Fields(b.String()), " ")
}

// TestPublicNamesAreDocumented: each exported name of a public package has a comment.
func TestPublicNamesAreDocumented(t *testing.T) {
	for _, pkg := range public {
		a := packageAPI(t, pkg)
		if a.Doc == "" {
			t.Errorf("package %s has no comment", pkg)
		}
		for _, n := range a.names() {
			if strings.TrimSpace(n.doc) == "" {
				t.Errorf("%s: %s.%s has no comment", a.at(n.node), a.Name, n.name)
			}
		}
		for _, x := range a.Types {
			for _, spec := range x.Decl.Specs {
				i, ok := spec.(*ast.TypeSpec).Type.(*ast.InterfaceType)
				if !ok {
					continue
				}
				for _, m := range i.Methods.List {
					if len(m.Names) > 0 && m.Names[0].IsExported() && x.Doc+m.Doc.Text()+m.Comment.Text() == "" {
						t.Errorf("%s: %s.%s.%s has no comment", a.at(m), a.Name, x.Name, m.Names[0].Name)
					}
				}
			}
		}
	}
}

// TestPublicNamesNeedNothingInternal: functions that other modules can call or implement use
// no types that those modules cannot name.
func TestPublicNamesNeedNothingInternal(t *testing.T) {
	for _, pkg := range public {
		a := packageAPI(t, pkg)
		for _, f := range a.files {
			internal := map[string]string{}
			for _, i := range f.Imports {
				p, err := strconv.Unquote(i.Path.Value)
				if err != nil {
					t.Fatal(err)
				}
				if slices.Contains(strings.Split(p, "/"), "internal") {
					local := path.Base(p)
					if i.Name != nil {
						local = i.Name.Name
					}
					internal[local] = p
				}
			}
			check := func(of string, nodes ...ast.Node) {
				for _, n := range nodes {
					ast.Inspect(n, func(n ast.Node) bool {
						if s, ok := n.(*ast.SelectorExpr); ok {
							if x, ok := s.X.(*ast.Ident); ok && internal[x.Name] != "" {
								t.Errorf("%s: %s.%s has %s.%s in it, which others cannot name", a.at(s), a.Name, of, internal[x.Name], s.Sel.Name)
							}
						}
						return true
					})
				}
			}
			for _, d := range f.Decls {
				switch d := d.(type) {
				case *ast.FuncDecl:
					if d.Name.IsExported() && exportedReceiver(d) {
						check(d.Name.Name, d.Type)
					}
				case *ast.GenDecl:
					for _, spec := range d.Specs {
						switch s := spec.(type) {
						case *ast.TypeSpec:
							if _, of := s.Type.(*ast.SelectorExpr); of && !s.Assign.IsValid() {
								continue // a type of its own, whose methods are declared here
							}
							if s.Name.IsExported() {
								check(s.Name.Name, exposed(s.Type)...)
							}
						case *ast.ValueSpec:
							if s.Type != nil && slices.ContainsFunc(s.Names, (*ast.Ident).IsExported) {
								check(s.Names[0].Name, s.Type)
							}
						}
					}
				}
			}
		}
	}
}

// exportedReceiver tells whether d is a function, or a method of an exported type.
func exportedReceiver(d *ast.FuncDecl) bool {
	if d.Recv == nil {
		return true
	}
	exported := false
	ast.Inspect(d.Recv.List[0].Type, func(n ast.Node) bool {
		if id, ok := n.(*ast.Ident); ok && !exported {
			exported = id.IsExported()
			return false
		}
		return true
	})
	return exported
}

// exposed is the part of a type that other packages see: of a struct its exported fields, else all of it.
func exposed(x ast.Expr) (nodes []ast.Node) {
	s, ok := x.(*ast.StructType)
	if !ok {
		return []ast.Node{x}
	}
	for _, f := range s.Fields.List {
		if len(f.Names) == 0 || slices.ContainsFunc(f.Names, (*ast.Ident).IsExported) {
			nodes = append(nodes, f.Type)
		}
	}
	return nodes
}

// TestPublicNamesEndInOneWay: a type that a program must end has Close() error, and Shutdown(context.Context) error if it can be
// ended in order, as package postoffice says. No other method ends anything.
func TestPublicNamesEndInOneWay(t *testing.T) {
	forms := map[string]string{"Close": "Close() error", "Shutdown": "Shutdown(ctx context.Context) error"}
	for _, pkg := range append([]string{"postoffice/clustertest"}, imported...) {
		a := packageAPI(t, pkg)
		for _, x := range a.Types {
			for _, m := range x.Methods {
				want, ends := forms[m.Name]
				switch _, form, _ := strings.Cut(a.print(&ast.FuncDecl{Recv: m.Decl.Recv, Name: m.Decl.Name, Type: m.Decl.Type}), ") "); {
				case ends && form != want:
					t.Errorf("%s: %s.%s has %s, want %s", a.at(m.Decl), a.Name, x.Name, form, want)
				case slices.Contains([]string{"Stop", "Finalize", "Finish", "End", "CloseNow", "Terminate", "Exit", "Destroy"}, m.Name):
					t.Errorf("%s: %s.%s has %s, want Close or Shutdown", a.at(m.Decl), a.Name, x.Name, m.Name)
				}
			}
		}
	}
}

// TestPublicNamesAreFew: a program's author can read all names that there are.
func TestPublicNamesAreFew(t *testing.T) {
	all, by := 0, map[string]int{}
	for _, pkg := range imported {
		names := packageAPI(t, pkg).names()
		for i, n := range names {
			if i == 0 || !n.shared || names[i-1].doc != n.doc {
				by[pkg]++
				all++
			}
		}
	}
	t.Logf("%d exported names: %v", all, by)
	if all > mostNames {
		t.Errorf("%d exported names, want at most %d: %v", all, mostNames, by)
	}
}
