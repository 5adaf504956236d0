package tests

// Finds tests that cannot fail, and loops of tests that wait without a limit.

import (
	"go/ast"
	"go/token"
	"reflect"
	"slices"
	"strings"
	"testing"
)

// unfailing are the methods of testing.T that do not make a test fail.
var unfailing = []string{"Helper", "Log", "Logf", "Skip", "Skipf", "SkipNow", "Parallel", "Cleanup", "Context", "TempDir", "Setenv", "Chdir", "Name", "Failed", "Skipped",
	"Run", "Loop", "ResetTimer", "ReportAllocs", "ReportMetric", "StartTimer", "StopTimer", "SetBytes", "Output", "Attr", "ArtifactDir", "Elapsed", "Deadline"}

// canFail reports whether n can make a test fail: n calls a method of a testing.T, or a function that has one as an argument.
func canFail(n ast.Node, tests map[string]bool) (can bool) {
	ast.Inspect(n, func(n ast.Node) bool {
		switch x := n.(type) {
		case *ast.FuncType: // functions inside have tests of their own
			for name := range testParams(x) {
				tests[name] = true
			}
		case *ast.CallExpr:
			for _, arg := range x.Args {
				if id, ok := arg.(*ast.Ident); ok && tests[id.Name] {
					can = true
				}
			}
			if s, ok := x.Fun.(*ast.SelectorExpr); ok {
				if id, ok := s.X.(*ast.Ident); ok && tests[id.Name] && !slices.Contains(unfailing, s.Sel.Name) {
					can = true
				}
			}
			if id, ok := x.Fun.(*ast.Ident); ok && id.Name == "panic" {
				can = true
			}
		case *ast.CompositeLit: // a fixture that keeps the testing.T
			for _, e := range x.Elts {
				if kv, ok := e.(*ast.KeyValueExpr); ok {
					e = kv.Value
				}
				if id, ok := e.(*ast.Ident); ok && tests[id.Name] {
					can = true
				}
			}
		}
		return !can
	})
	return can
}

// testParams are the parameters of a function whose type is a testing type.
func testParams(f *ast.FuncType) map[string]bool {
	names := map[string]bool{}
	for _, p := range f.Params.List {
		t := p.Type
		if star, ok := t.(*ast.StarExpr); ok {
			t = star.X
		}
		if s, ok := t.(*ast.SelectorExpr); ok && slices.Contains([]string{"T", "B", "F", "TB"}, s.Sel.Name) {
			if pkg, ok := s.X.(*ast.Ident); ok && pkg.Name == "testing" {
				for _, n := range p.Names {
					names[n.Name] = true
				}
			}
		}
	}
	return names
}

// same reports whether two expressions have the same text and contain no call.
func same(a, b ast.Expr) bool {
	calls := false
	ast.Inspect(a, func(n ast.Node) bool {
		switch x := n.(type) {
		case *ast.CallExpr:
			calls = true
		case *ast.UnaryExpr:
			calls = calls || x.Op == token.ARROW
		}
		return true
	})
	return !calls && text(a) == text(b)
}

// text is the text of an expression's syntax tree, without positions.
func text(e ast.Expr) string {
	var b strings.Builder
	_ = ast.Fprint(&b, nil, e, func(name string, _ reflect.Value) bool {
		return !strings.HasSuffix(name, "Pos") && name != "Lparen" && name != "Rparen" && name != "Obj"
	})
	return b.String()
}

// TestTestsCanFail finds tests that cannot fail, and conditions that compare a value with itself.
func TestTestsCanFail(t *testing.T) {
	for _, s := range tree(t) {
		if !s.test || strings.Contains(s.path, "/testdata/") {
			continue
		}
		for _, d := range s.ast.Decls {
			f, ok := d.(*ast.FuncDecl)
			if !ok || f.Recv != nil || f.Body == nil || !strings.HasPrefix(f.Name.Name, "Test") && !strings.HasPrefix(f.Name.Name, "Fuzz") {
				continue
			}
			if tests := testParams(f.Type); len(tests) > 0 && !canFail(f.Body, tests) {
				t.Errorf("%s: %s cannot fail", s.at(f), f.Name.Name)
			}
		}
		ast.Inspect(s.ast, func(n ast.Node) bool {
			if b, ok := n.(*ast.BinaryExpr); ok && slices.Contains([]token.Token{token.EQL, token.NEQ, token.LSS, token.GTR, token.LEQ, token.GEQ, token.LAND, token.LOR}, b.Op) && same(b.X, b.Y) {
				t.Errorf("%s: it compares a value with itself", s.at(b))
			}
			return true
		})
	}
}

// TestSpinsHaveALimit finds loops of tests that yield until a condition holds, and have no limit. tests/testlimit does not
// detect such a loop, since the test keeps running.
func TestSpinsHaveALimit(t *testing.T) {
	for _, s := range tree(t) {
		if !s.test || strings.Contains(s.path, "/testdata/") || slices.Contains(s.imports(), "testing/synctest") {
			continue
		}
		ast.Inspect(s.ast, func(n ast.Node) bool {
			loop, ok := n.(*ast.ForStmt)
			if !ok || loop.Init != nil && loop.Cond != nil && loop.Post != nil && called(post(loop.Post)) == "" {
				return true // the loop counts its rounds
			}
			yields, limited := false, false
			ast.Inspect(loop, func(n ast.Node) bool {
				switch name := called(n); {
				case name == "runtime.Gosched" && (n == post(loop.Post) || in(loop.Body.List, n)):
					yields = true
				case strings.HasPrefix(name, "time."), strings.Contains(name, "Send"), strings.Contains(name, "Poll"):
					limited = true // the loop has a time limit, or makes progress in each round
				}
				return true
			})
			if yields && !limited {
				t.Errorf("%s: it yields until something happens, without a limit: use vantest.Eventually", s.at(loop))
			}
			return true
		})
	}
}

// post is the expression after each round of a loop, nil if there is none.
func post(s ast.Stmt) ast.Node {
	if x, ok := s.(*ast.ExprStmt); ok {
		return x.X
	}
	return nil
}

// in reports whether n is one of the statements.
func in(list []ast.Stmt, n ast.Node) bool {
	return slices.ContainsFunc(list, func(s ast.Stmt) bool { return post(s) == n })
}
