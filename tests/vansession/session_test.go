package vansession

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestLoadAll(t *testing.T) {
	files, err := filepath.Glob("../../van/testdata/sessions/*.jsonl")
	if err != nil || len(files) == 0 {
		t.Fatalf("no sessions: %v", err)
	}
	for _, path := range files {
		name := strings.TrimSuffix(filepath.Base(path), ".jsonl")
		t.Run(name, func(t *testing.T) {
			s, err := Load(path)
			if err != nil {
				t.Fatal(err)
			}
			if s.Name != name {
				t.Errorf("name %q, want %q", s.Name, name)
			}
			ids := map[int]bool{0: true}
			for _, n := range s.Nodes {
				ids[n.ID] = true
			}
			sends, recvs := 0, 0
			for i, e := range s.Events {
				if e.Seq != i+1 || !ids[e.From] || !ids[e.To] {
					t.Fatalf("event %d: seq %d from %d to %d, want the seq %d and ids of the session", i, e.Seq, e.From, e.To, i+1)
				}
				if e.Via.Socket != "ROUTER" && e.Via.Socket != "DEALER" {
					t.Fatalf("event %d: socket %q", e.Seq, e.Via.Socket)
				}
				switch e.Type {
				case Send:
					sends++
					for _, f := range e.Frames {
						if f.Bytes == nil {
							t.Errorf("event %d: frame %s has no bytes", e.Seq, f.Kind)
						}
					}
				case Recv:
					recvs++
				}
			}
			if sends == 0 || recvs == 0 || len(s.Metas()) != sends {
				t.Errorf("%d sends, %d receives, %d metas", sends, recvs, len(s.Metas()))
			}
		})
	}
}

func TestLoadContents(t *testing.T) {
	s, err := Load("../../van/testdata/sessions/s1w1_batch.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	if got := s.Env["DMLC_NUM_WORKER"]; got != "1" {
		t.Errorf("DMLC_NUM_WORKER = %q, want 1", got)
	}
	if want := (Node{"worker", 9, 0, "127.0.0.1", 49229}); len(s.Nodes) != 3 || s.Nodes[2] != want {
		t.Errorf("nodes %v, want three, the last %v", s.Nodes, want)
	}
	if e := s.Events[2]; e.Type != Socket || e.What != "bind" || e.Addr != "tcp://127.0.0.1:22790" || e.Via.Socket != "ROUTER" {
		t.Errorf("event 3: %+v, want the scheduler's bind", e)
	}
	first := s.Events[11]
	if first.Type != Send || first.From != 8 || first.To != 1 || first.IDKnown || first.Via.Endpoint != "tcp://127.0.0.1:22790" ||
		first.Phase != "start" || first.Frame("meta").Len != 840 {
		t.Errorf("event 12: %+v, want the server's first message", first)
	}
	if r := s.Events[12]; r.Type != Recv || r.From != 0 || !slices.Equal(r.Kinds(), []string{"identity", "meta"}) || r.Frames[1].Bytes != nil {
		t.Errorf("event 13: %+v, want the same message at the scheduler", r)
	}
	answer := s.Events[82]
	if !slices.Equal(answer.Kinds(), []string{"dest", "self", "meta", "data[0]", "data[1]"}) || string(answer.Frames[1].Bytes) != "ps8" {
		t.Errorf("event 83: %v, want the pull response", answer.Kinds())
	}
	if answer.Frame("nothing") != nil {
		t.Error("Frame of an unknown kind is not nil")
	}
}

func TestLoadErrors(t *testing.T) {
	for _, tc := range []struct{ name, text, want string }{
		{"empty", "", "no session"},
		{"not JSON", "{", ":1:"},
		{"no session line", `{"type":"send"}`, ":1: type"},
		{"unknown type", `{"type":"session","name":"x"}` + "\n" + `{"type":"post"}`, `:2: type "post"`},
		{"bad hex", `{"type":"session","name":"x"}` + "\n" + `{"type":"send","frames":[{"kind":"meta","len":1,"hex":"0"}]}`, "frame meta"},
		{"wrong length", `{"type":"session","name":"x"}` + "\n" + `{"type":"send","frames":[{"kind":"meta","len":2,"hex":"00"}]}`, "1 bytes, want 2"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "s.jsonl")
			if err := os.WriteFile(path, []byte(tc.text), 0o600); err != nil {
				t.Fatal(err)
			}
			if _, err := Load(path); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error %v, want one with %q", err, tc.want)
			}
		})
	}
	if _, err := Load(filepath.Join(t.TempDir(), "none")); err == nil {
		t.Error("no error for a file that is not there")
	}
}

// Sockets are numbered within their process: those of two nodes may have the same number.
func TestLoadSocketsOfNodes(t *testing.T) {
	path := filepath.Join(t.TempDir(), "two.jsonl")
	lines := `{"type":"session","name":"two","nodes":[{"role":"server","id":8},{"role":"worker","id":9}]}
{"seq":1,"type":"socket_event","node":{"id":8},"socket":0,"socket_type":"ROUTER","event":"socket"}
{"seq":2,"type":"socket_event","node":{"id":9},"socket":0,"socket_type":"DEALER","event":"socket"}
{"seq":3,"type":"socket_event","node":{"id":8},"socket":0,"event":"bind"}
{"seq":4,"type":"socket_event","node":{"id":9},"socket":0,"event":"connect"}
`
	if err := os.WriteFile(path, []byte(lines), 0o600); err != nil {
		t.Fatal(err)
	}
	s, err := Load(path)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, e := range s.Events {
		got = append(got, e.Via.Socket)
	}
	if want := []string{"ROUTER", "DEALER", "ROUTER", "DEALER"}; !slices.Equal(got, want) {
		t.Errorf("socket types %q, want %q", got, want)
	}
}
