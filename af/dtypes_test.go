package af_test

import (
	"bytes"
	"testing"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/tests/testcluster"
)

// TestEveryDtype: every type, including the 8-bit floats and the packed ones, arrives unchanged, together with its
// scales and with no rows, over every transport.
func TestEveryDtype(t *testing.T) {
	testcluster.Over(t, func(t *testing.T, o testcluster.Options) {
		c := testcluster.Start(t, o)
		serve(t, c.Servers[0], func(b af.Batch) {
			p := b.Pushes()
			for i, pull := range b.Pulls() {
				if pull.Dtype != p[i].Val.Dtype() || len(pull.Shape) != 2 || pull.Len != p[i].Val.Len() {
					t.Errorf("pull %d is %s%v, its push is %s", i, pull.Dtype, pull.Shape, p[i].Val.String())
				}
			}
			if err := b.Respond(p); err != nil {
				t.Error(err)
			}
		})
		w := newWorker(t, c.Workers[0])
		last := af.Float8E8M0x4
		if !last.Valid() || (last + 1).Valid() {
			t.Fatalf("%d is not the last code", last)
		}
		for d := af.Dtype(0); d <= last; d++ {
			for _, rows := range []int{0, 1, 257} {
				make2 := func(d af.Dtype, columns int, seed byte) (af.Tensor, []byte) {
					b := make([]byte, rows*columns*d.Size())
					for i := range b {
						b[i] = byte(i)*31 + seed // every value of a byte, NaNs among them
					}
					x, err := af.FromBytes(b, d, int64(rows), int64(columns))
					if err != nil {
						t.Fatal(err)
					}
					return x, b
				}
				x, sent := make2(d, 33, byte(d))
				scales, sentScales := make2(af.Float8E8M0FNU, 2, 7)
				y, got := make2(d, 33, 0)
				gotScales, scalesBack := make2(af.Float8E8M0FNU, 2, 0)
				clear(got)
				clear(scalesBack)
				call, err := w.PushPull([]af.KeyTensor{{Key: 1, Val: x}, {Key: 2, Val: scales}}, [][]af.KeyTensor{{{Key: 1, Val: y}, {Key: 2, Val: gotScales}}})
				if err == nil {
					err = call.Wait(t.Context())
				}
				if err != nil {
					t.Fatalf("%s, %d rows: %v", d, rows, err)
				}
				if !bytes.Equal(got, sent) || !bytes.Equal(scalesBack, sentScales) {
					t.Errorf("%s, %d rows: other bytes than were sent", d, rows)
				}
			}
		}
	}, testcluster.InProc, testcluster.TCP, testcluster.Unix, testcluster.SHM)
}
