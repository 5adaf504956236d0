package collective

// layer is the interface of a communicator for packages that build on it, such as af/window.

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/internal/commlayer"
)

// layer implements commlayer.Layer.
type layer struct{ *Comm }

func init() { commlayer.Of = func(c any) commlayer.Layer { return layer{c.(*Comm)} } }

func (l layer) App() cluster.App                        { return l.b.node }
func (l layer) ID() int                                 { return l.b.id }
func (l layer) NodeIDs() []int                          { return l.b.ids }
func (l layer) Name(rank int) string                    { return l.b.name(rank) }
func (l layer) Limit(ctx context.Context) time.Duration { return l.b.limit(ctx) }
func (l layer) Fail(err error)                          { l.b.fail(err) }

func (l layer) Limited() (context.Context, context.CancelFunc) {
	ctx, _, cancel := l.b.limited(context.Background())
	return ctx, cancel
}

// children are the users of a communicator, such as windows, which end when it fails. All fields are guarded by
// base.mu.
type children struct {
	all     []*child // replaced, never modified
	entered uint32   // number of children entered in this epoch
}

// child is a commlayer.Child and the function that it is notified by.
type child struct {
	commlayer.Child
	changed func(rank int, err error)
}

func (l layer) Enter(op string, changed func(rank int, err error)) (*commlayer.Child, error) {
	b := &l.b
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := cmp.Or(b.err, b.left); err != nil {
		return nil, b.failed(op, err)
	}
	t := &child{commlayer.Child{Epoch: b.epoch, Number: l.children.entered}, changed}
	t.Leave = func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		l.children.all = slices.DeleteFunc(slices.Clone(l.children.all), func(x *child) bool { return x == t })
	}
	l.children.entered++
	l.children.all = append(l.children.all, t)
	return &t.Child, nil
}
