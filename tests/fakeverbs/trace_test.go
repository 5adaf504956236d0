package fakeverbs

import (
	"fmt"
	"slices"
	"testing"

	"github.com/stepaf/stepaf-go/van/rdma/verbs"
)

func TestTrace(t *testing.T) {
	w := newWorld(t)
	w.sa.SetName("worker")
	w.sb.SetName("server")
	var got []string
	var posts []Record
	names := map[*Stack]string{w.sa: "worker", w.sb: "server", nil: "?"}
	w.net.Trace(func(r Record) {
		if r.Seq != len(got) {
			t.Errorf("record %d has number %d", len(got), r.Seq)
		}
		line := fmt.Sprintf("%s-%s qp %d active %v: ", names[r.Stack], names[r.Peer], r.QP, r.Active)
		switch r.Kind {
		case RecordCM:
			line += fmt.Sprintf("%s %d %q", r.Event, len(r.Private), slices.DeleteFunc(r.Private, func(b byte) bool { return b == 0 }))
			switch r.Event {
			case EventCreateQP:
				line += fmt.Sprintf(" %d %d %d", r.Options.SendDepth, r.Options.RecvDepth, r.Inline)
			case EventConnect, EventAccept:
				line += fmt.Sprintf(" %d %d %d", r.Param.RetryCount, r.Param.RNRRetryCount, r.AckTimeout)
			}
		case RecordPost:
			posts = append(posts, r)
			line += fmt.Sprintf("post %d %d %d %q", r.WR.Op, r.WR.Imm, r.Chain, r.Data)
		case RecordCompletion:
			line += fmt.Sprintf("completion %d %d %d", r.Completion.Type, r.Completion.Imm, r.Completion.Len)
		}
		got = append(got, line)
	})
	a := w.resolved(1, options)
	check(t, a.id.SetAckTimeout(14))
	check(t, a.id.Connect(params))
	b := w.accept(options, params)
	w.next(w.ca, verbs.Established)
	w.next(w.cb, verbs.Established)
	src, dst := a.memory(4, 0), b.memory(4, remote)
	copy(src.b, "data")
	inline := a.write(verbs.OpWriteImm, 3, 3, src, dst)
	inline.Flags |= verbs.Inline
	a.post(a.write(verbs.OpWrite, 1, 1, src, dst), inline)
	a.poll(2)
	b.poll(1)
	check(t, a.id.Disconnect())
	w.next(w.cb, verbs.Disconnected)
	w.net.Trace(nil)
	check(t, b.id.Disconnect())

	want := []string{
		`worker-? qp 0 active false: address resolved 0 ""`,
		`worker-? qp 0 active false: route resolved 0 ""`,
		`worker-? qp 17 active false: create_qp 0 "" 8 4 512`,
		`worker-server qp 17 active true: rdma_connect 5 "hello" 6 7 14`,
		`server-worker qp 0 active false: connect request 56 "hello"`,
		`server-worker qp 18 active false: create_qp 0 "" 8 4 512`,
		`server-worker qp 18 active false: rdma_accept 5 "hello" 6 7 0`,
		`worker-server qp 17 active true: established 196 "hello"`,
		`server-worker qp 18 active false: established 0 ""`,
		`worker-server qp 17 active true: post 2 1 0 "data"`,
		`worker-server qp 17 active true: post 3 3 1 "data"`,
		`worker-server qp 17 active true: completion 1 0 0`,
		`worker-server qp 17 active true: completion 1 0 0`,
		`server-worker qp 18 active false: completion 3 3 4`,
		`worker-server qp 17 active true: rdma_disconnect 0 ""`,
		`server-worker qp 18 active false: disconnected 0 ""`,
	}
	if !slices.Equal(got, want) {
		for i := range max(len(got), len(want)) {
			if i >= len(got) || i >= len(want) || got[i] != want[i] {
				t.Fatalf("line %d of %d:\n%s\nwant %d:\n%s", i, len(got), get(got, i), len(want), get(want, i))
			}
		}
	}
	p := posts[0]
	if p.Local != a.id.LocalAddr() || p.Remote != w.at || p.WR.RemoteAddr != dst.addr() || p.WR.RKey != dst.RKey() {
		t.Errorf("record %+v", p)
	}
}

func get(lines []string, i int) string {
	if i < len(lines) {
		return lines[i]
	}
	return "(nothing)"
}
