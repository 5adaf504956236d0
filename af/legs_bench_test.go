package af_test

import (
	"testing"

	"github.com/stepaf/stepaf-go/af"
)

func BenchmarkLegs(b *testing.B) {
	c := start(b, 1, 1, 1, nil, nil)
	s, _ := af.NewTensorServer(c.servers[0], af.Options{})
	buf := make([]byte, 1024)
	_ = s.SetRequestHandle(func(x af.Batch) {
		t, _ := af.FromBytes(buf, af.Uint8, 1024)
		_ = x.Response([]af.KeyTensor{{Key: x.Pulls()[0].Key, Val: t}}, nil)
	})
	w, _ := af.NewTensorWorker(c.workers[0], af.Options{})
	pb, qb := make([]byte, 1024), make([]byte, 1024)
	pt, _ := af.FromBytes(pb, af.Uint8, 1024)
	qt, _ := af.FromBytes(qb, af.Uint8, 1024)
	push, pull := []af.KeyTensor{{Key: 1, Val: pt}}, []af.KeyTensor{{Key: 2, Val: qt}}
	var legs [9]float64
	b.ReportAllocs()
	b.ResetTimer()
	for range b.N {
		h, err := w.ZBatchPushPull(push, pull)
		if err != nil {
			b.Fatal(err)
		}
		if err := w.Wait(b.Context(), h); err != nil {
			b.Fatal(err)
		}
		q, _, _ := w.FetchTrace(h)
		r, s, _ := w.FetchTrace(h + 1)
		for i, d := range []uint64{q.PostSend - q.Start, r.Start - q.Start, r.PostSend - r.Start, r.PostRecv - r.PostSend, r.Process - r.PostRecv, s.Start - r.Process, s.PostSend - s.Start, s.PostRecv - s.PostSend, s.Process - s.PostRecv} {
			legs[i] += float64(d)
		}
	}
	b.StopTimer()
	for i, n := range []string{"0push_send", "1push_to_pull", "2pull_send", "3net_req", "4recv_process", "5handler", "6rsp_send", "7net_rsp", "8recv_process"} {
		b.ReportMetric(legs[i]/float64(b.N)/1e3, n+"_us")
	}
	c.finalize(b)
}
