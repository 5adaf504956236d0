package tests

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/van/env"
)

// smallCheckout makes a checkout that has the scripts and the Makefile of this repository, and a stepaf that prints its
// arguments. It is a repository of git if there is one.
func smallCheckout(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "a check", "out")
	copied := []string{"../Makefile", "../tools/cuda_env.mk", "../tools/*.sh", "../tests/*.sh", "../tests/*/*.sh"}
	for _, pattern := range copied {
		files, err := filepath.Glob(pattern)
		if err != nil || len(files) == 0 {
			t.Fatalf("%s: %d files, %v", pattern, len(files), err)
		}
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			write(t, filepath.Join(dir, strings.TrimPrefix(file, "../")), string(text), 0o755)
		}
	}
	// The program needs cgo and a package of the module, like the real one.
	const prints = `//go:build cgo

package main

import (
	"fmt"

	"example.com/small/words"
)

func main() { fmt.Printf("%q\n", words.All()) }
`
	const nothing = "package main\n\nfunc main() {}\n"
	for name, text := range map[string]string{
		"go.mod": "module example.com/small\n\ngo 1.21\n", "tools/stepaf/main.go": prints,
		"words/words.go": "package words\n\nimport \"os\"\n\nfunc All() []string { return os.Args }\n", "tests/benchmark/b/main.go": nothing, "tests/fserver/test_fserver/main.go": nothing,
		"tests/utests/stepmesh_echo_test/main.go": nothing,
	} {
		write(t, filepath.Join(dir, name), text, 0o644)
	}
	if _, err := exec.LookPath("git"); err == nil {
		for _, args := range [][]string{{"init", "-q"}, {"add", "."}, {"-c", "user.name=n", "-c", "user.email=e", "commit", "-q", "-m", "all"}} {
			cmd := exec.Command("git", args...)
			cmd.Dir = dir
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Fatalf("git %v: %v\n%s", args, err, out)
			}
		}
	}
	return dir
}

func write(t *testing.T, name, text string, mode os.FileMode) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, []byte(text), mode); err != nil {
		t.Fatal(err)
	}
}

// TestUsersShells builds and starts a small checkout, whose path has a blank, with environments that users' shells
// export. The output must be the same as in a plain environment. With -short it uses all of them at once only.
func TestUsersShells(t *testing.T) {
	if _, err := exec.LookPath("bash"); err != nil {
		t.Skip("the launch scripts need bash")
	}
	if _, err := exec.LookPath("make"); err != nil {
		t.Skip("there is no make")
	}
	dir := smallCheckout(t)
	startup := filepath.Join(t.TempDir(), "startup")
	write(t, startup, "cd() { builtin cd \"$@\" && echo in \"$PWD\"; }\nset -o noclobber -o noglob\n", 0o644)
	long := filepath.Join(t.TempDir(), "tmp "+strings.Repeat("x", 120))
	if err := os.Mkdir(long, 0o700); err != nil {
		t.Fatal(err)
	}
	type shell struct {
		name, before string // before is run by the user's shell
		env          []string
	}
	shells := []shell{
		{name: "CDPATH", env: []string{"CDPATH=.:" + dir + ":" + filepath.Join(dir, "tests")}},
		{name: "POSIXLY_CORRECT", env: []string{"POSIXLY_CORRECT=1"}},
		{name: "BASH_ENV", env: []string{"BASH_ENV=" + startup}},
		{name: "options", env: []string{"SHELLOPTS=noclobber:noglob", "BASHOPTS=nullglob:failglob"}},
		{name: "functions", before: `cd() { builtin cd "$@" && echo in "$PWD"; }; grep() { command grep --color=always "$@"; }; ls() { echo listed; }; export -f cd grep ls`},
		{name: "umask", before: "umask 077"},
		{name: "locale", env: []string{"LC_ALL=C", "LANG=tr_TR.UTF-8"}},
		{name: "TMPDIR", env: []string{"TMPDIR=" + long}},
		{name: "standard input is closed", before: "exec <&-"},
		{name: "make", env: []string{"MAKEFLAGS=-j4 -s", "BIN=elsewhere"}},
		{name: "GOFLAGS", env: []string{"GOFLAGS=-mod=vendor"}},
		{name: "GO111MODULE", env: []string{"GO111MODULE=off"}},
		{name: "GOWORK", env: []string{"GOWORK=" + filepath.Join(dir, "no", "go.work")}},
		{name: "CGO_ENABLED", env: []string{"CGO_ENABLED=0"}},
		{name: "of another user", env: []string{"GIT_TEST_ASSUME_DIFFERENT_OWNER=1", "GOFLAGS=", "GOENV=off"}}, // git says "dubious ownership"
	}
	if u, err := user.Current(); err == nil && u.HomeDir == os.Getenv("HOME") {
		shells = append(shells, shell{name: "no HOME", before: "unset HOME GOCACHE GOMODCACHE"})
	}
	var all shell // everything at once
	all.name = "all"
	for _, s := range shells {
		if s.name != "make" { // whose BIN is a knob of run_single_gpu.sh
			all.env = append(all.env, s.env...)
			all.before += s.before + "\n"
		}
	}
	shells = append(shells, all)
	if testing.Short() {
		shells = shells[len(shells)-1:]
	}

	caches, err := exec.CommandContext(t.Context(), "go", "env", "GOCACHE", "GOMODCACHE").Output()
	if err != nil {
		t.Fatal(err)
	}
	cache, modules, _ := strings.Cut(strings.TrimSpace(string(caches)), "\n")
	// A Python without torch.
	python := filepath.Join(t.TempDir(), "python3")
	write(t, python, "#!/bin/sh\nexit 1\n", 0o755)
	run := func(s shell, command string) (string, error) {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
		defer cancel()
		cmd := exec.CommandContext(ctx, "bash", "-c", s.before+"\n"+command)
		cmd.Dir = dir
		cmd.WaitDelay = 10 * time.Second
		cmd.Env = slices.DeleteFunc(env.Strip(os.Environ()), func(e string) bool { return strings.HasPrefix(e, "MAKE") })
		cmd.Env = append(cmd.Env, "USE_CUDA=0", "USE_RDMA=0", "PYTHON="+python, "PATH="+filepath.Dir(python)+":"+os.Getenv("PATH"), "GOCACHE="+cache, "GOMODCACHE="+modules)
		cmd.Env = append(cmd.Env, s.env...)
		var errs bytes.Buffer
		cmd.Stderr = &errs
		out, err := cmd.Output()
		if err != nil {
			err = fmt.Errorf("%w: %s", err, errs.Bytes())
		}
		return string(out), err
	}
	commands := []string{"rm -rf bin; make build programs >&2 && command ls bin", "bash tests/fserver/run_single_gpu.sh some 'ar gument'", "command cd tests >&2; ROLE=joint ./run.sh", "tools/build_flags.sh a b"}
	want := map[string]string{}
	for _, c := range commands {
		out, err := run(shell{}, c)
		if err != nil || out == "" {
			t.Fatalf("%s, as it is: %q, %v", c, out, err)
		}
		want[c] = out
	}
	if w := want[commands[1]]; !strings.Contains(w, `"some" "ar gument"]`) || !strings.Contains(w, "/a check/out/bin/test_fserver\"") {
		t.Fatalf("run_single_gpu.sh starts %s", w)
	}
	for _, s := range shells {
		t.Run(s.name, func(t *testing.T) {
			for _, c := range commands {
				if s.name == "make" && c != commands[0] || s.name != all.name && (c == commands[2] || c == commands[3]) {
					continue
				}
				if out, err := run(s, c); err != nil || out != want[c] {
					t.Errorf("%s: %v\n%q, want\n%q", c, err, out, want[c])
				}
			}
		})
	}
}
