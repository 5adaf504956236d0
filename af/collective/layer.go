package collective

// Layer: a communicator as packages that build on one use it, such as af/window.

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/stepaf/stepaf-go/internal/cluster"
)

// Layer is a communicator with what packages that build on one need and programs do not. It is a
// small value.
type Layer struct{ *Comm }

// Layer is the communicator as packages that build on it use it.
func (c *Comm) Layer() Layer { return Layer{c} }

// App is the node.
func (l Layer) App() cluster.App { return l.b.node }

// ID is Options.ID.
func (l Layer) ID() int { return l.b.id }

// NodeIDs are the node ids of the ranks, ascending. They must not be changed.
func (l Layer) NodeIDs() []int { return l.b.ids }

// Name names a rank and its node, for errors.
func (l Layer) Name(rank int) string { return l.b.name(rank) }

// Limit is how long a wait with ctx may take, 0 for no limit.
func (l Layer) Limit(ctx context.Context) time.Duration { return l.b.limit(ctx) }

// Limited is a context that lasts for the communicator's limit.
func (l Layer) Limited() (context.Context, context.CancelFunc) {
	ctx, _, cancel := l.b.limited(context.Background())
	return ctx, cancel
}

// Fail makes the communicator fail on all ranks.
func (l Layer) Fail(err error) { l.b.fail(err) }

// tenants are what lasts until a communicator fails. All is guarded by base.mu.
type tenants struct {
	all     []*Tenant // replaced, never changed
	entered uint32    // how many there have been in this epoch
}

// Tenant is something that lasts as long as a communicator does not fail.
type Tenant struct {
	c       *Comm
	changed func(rank int, err error)

	// Epoch and Number name it: it has the same on all ranks if these call Enter in the same order.
	Epoch  uint64
	Number uint32
}

// Enter makes a Tenant of a communicator that has not failed. changed is called with rank -1 when
// it fails or is closed, and with the rank that has closed its end; any goroutine may call
// it, and it must not block.
func (l Layer) Enter(op string, changed func(rank int, err error)) (*Tenant, error) {
	b := &l.b
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := cmp.Or(b.err, b.left); err != nil {
		return nil, b.failed(op, err)
	}
	t := &Tenant{l.Comm, changed, b.epoch, l.tenants.entered}
	l.tenants.entered++
	l.tenants.all = append(l.tenants.all, t)
	return t, nil
}

// Leave ends it: changed is not called any more, but for calls that are under way.
func (t *Tenant) Leave() {
	t.c.b.mu.Lock()
	defer t.c.b.mu.Unlock()
	t.c.tenants.all = slices.DeleteFunc(slices.Clone(t.c.tenants.all), func(x *Tenant) bool { return x == t })
}
