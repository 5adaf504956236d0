package prog

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/stepaf/stepaf-go/af"
	"github.com/stepaf/stepaf-go/tests/internal/lowfloat"
	"github.com/stepaf/stepaf-go/van/backend"
)

// Tensor returns a zeroed tensor on the node's device.
func (n *Node) Tensor(d af.Dtype, shape ...int64) (af.Tensor, error) {
	size := d.Size()
	for _, s := range shape {
		size *= int(s)
	}
	mem, err := n.Backend().Alloc(size)
	if err != nil {
		return af.Tensor{}, err
	}
	t, err := af.NewTensor(mem, d, shape...)
	if err != nil {
		return af.Tensor{}, err
	}
	return t, n.Put(t, make([]byte, size))
}

// Put copies host bytes into a tensor.
func (n *Node) Put(t af.Tensor, b []byte) error { return n.Backend().Copy(t.Mem(), backend.Bytes(b)) }

// Get copies a tensor's bytes to b, which must have its size.
func (n *Node) Get(b []byte, t af.Tensor) error { return n.Backend().Copy(backend.Bytes(b), t.Mem()) }

// Contents is the data of the node with a group rank and this node's instance index, in
// programs where each node sends different data: 2 bytes for each number of Bench.Size.
func (n *Node) Contents(groupRank int) []byte {
	b := make([]byte, 2*n.Config().Bench.Size)
	FillBytes(Random(groupRank, n.Topology().Instance), b)
	return b
}

// Equal tells with an error how the bytes of t differ from want. The error names t by what.
func (n *Node) Equal(what string, t af.Tensor, want []byte) error {
	if t.Len() != len(want) {
		return fmt.Errorf("%s: %s has %d bytes, want %d", what, t.String(), t.Len(), len(want))
	}
	got := t.Bytes()
	if got == nil {
		got = make([]byte, t.Len())
		if err := n.Get(got, t); err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
	}
	if bytes.Equal(got, want) {
		return nil
	}
	for i := range got {
		if got[i] != want[i] {
			return fmt.Errorf("%s: %s: byte %d is %#x, want %#x", what, t.String(), i, got[i], want[i])
		}
	}
	return nil
}

// Random is a source of test values that is the same in every process with the
// same seeds.
func Random(seed ...int) *rand.Rand {
	s := [2]uint64{0x9e3779b97f4a7c15, 1}
	for i, x := range seed {
		s[i%2] ^= (uint64(x) + 1) * 0xbf58476d1ce4e5b9
	}
	return rand.New(rand.NewPCG(s[0], s[1]))
}

// FillBytes fills b with random bits.
func FillBytes(r *rand.Rand, b []byte) {
	for len(b) >= 8 {
		binary.LittleEndian.PutUint64(b, r.Uint64())
		b = b[8:]
	}
	for i := range b {
		b[i] = byte(r.Uint64())
	}
}

// FillBF16 fills b with bfloat16 numbers from 0 up to 1.
func FillBF16(r *rand.Rand, b []byte) {
	for i := 0; i+1 < len(b); i += 2 {
		binary.LittleEndian.PutUint16(b[i:], lowfloat.BF16(r.Float32()))
	}
}

// AddBF16 adds the bfloat16 numbers in b to those in sum, rounding each.
func AddBF16(sum, b []byte) {
	for i := 0; i+1 < len(sum); i += 2 {
		x := lowfloat.FromBF16(binary.LittleEndian.Uint16(sum[i:])) + lowfloat.FromBF16(binary.LittleEndian.Uint16(b[i:]))
		binary.LittleEndian.PutUint16(sum[i:], lowfloat.BF16(x))
	}
}

// CloseBF16 tells whether the bfloat16 numbers in got are those in want but for
// the tolerance of torch.allclose.
func CloseBF16(got, want []byte) bool {
	if len(got) != len(want) {
		return false
	}
	for i := 0; i+1 < len(got); i += 2 {
		g := float64(lowfloat.FromBF16(binary.LittleEndian.Uint16(got[i:])))
		w := float64(lowfloat.FromBF16(binary.LittleEndian.Uint16(want[i:])))
		if d := g - w; !(max(d, -d) <= 1e-8+1e-5*max(w, -w)) && g != w {
			return false
		}
	}
	return true
}

// Floats returns the numbers of a float32 tensor, copied from its device.
func Floats(n *Node, t af.Tensor) ([]float32, error) {
	if t.Dtype() != af.Float32 {
		return nil, fmt.Errorf("tensor %s, want float32", t.String())
	}
	x := make([]float32, t.Len()/4)
	return x, n.Backend().Copy(backend.Slice(x), t.Mem())
}

// FromFloats returns a float32 tensor on the node's device with the numbers x.
func FromFloats(n *Node, x []float32, shape ...int64) (af.Tensor, error) {
	t, err := n.Tensor(af.Float32, shape...)
	if err != nil {
		return t, err
	}
	return t, n.Backend().Copy(t.Mem(), backend.Slice(x))
}

// Echo answers every pull of a batch with the push tensor of the same place, so
// there must be as many of both.
func Echo(b af.Batch) error {
	pushes, pulls := b.Pushes(), b.Pulls()
	if len(pushes) != len(pulls) || len(pulls) == 0 {
		b.Release()
		return fmt.Errorf("batch of %d pushes and %d pulls, want as many of both", len(pushes), len(pulls))
	}
	out := make([]af.KeyTensor, len(pulls))
	for i := range out {
		out[i] = af.KeyTensor{Key: pulls[i].Key, Val: pushes[i].Val}
	}
	return b.Respond(out, af.ByKey)
}

// ServeEcho is for Program.Serve: the server echoes.
func ServeEcho(*Node, *af.Server) (Handler, error) { return Echo, nil }

// Pulls makes a tensor to pull into from each server, all with one key.
func (n *Node) Pulls(key uint64, d af.Dtype, shape ...int64) ([]af.KeyTensor, error) {
	pull := make([]af.KeyTensor, n.Topology().NumServers)
	for s := range pull {
		t, err := n.Tensor(d, shape...)
		if err != nil {
			return nil, err
		}
		pull[s] = af.KeyTensor{Key: key, Val: t}
	}
	return pull, nil
}

// PutAll copies host bytes into each of some tensors.
func (n *Node) PutAll(ts []af.KeyTensor, b []byte) error {
	for i := range ts {
		if err := n.Put(ts[i].Val, b); err != nil {
			return err
		}
	}
	return nil
}

// OfEach makes a list for each server of one pull tensor for each.
func OfEach(pull []af.KeyTensor) (lists [][]af.KeyTensor) {
	for s := range pull {
		lists = append(lists, pull[s:s+1])
	}
	return lists
}

// PushPull waits for a push_pull, with one pull tensor of each server, and returns how long it took.
func PushPull(ctx context.Context, w *af.Worker, push, pull []af.KeyTensor, options ...af.CallOption) (time.Duration, error) {
	start := time.Now()
	call, err := w.PushPull(push, OfEach(pull), options...)
	if err == nil {
		err = call.Wait(ctx)
	}
	return time.Since(start), err
}
