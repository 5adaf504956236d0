// Package commlayer is a communicator of af/collective as the packages that build on one use it, such as af/window. Programs
// do not need it, so it is not part of the API of af/collective.
package commlayer

import (
	"context"
	"fmt"
	"time"

	"github.com/stepaf/stepaf-go/internal/cluster"
	"github.com/stepaf/stepaf-go/van/env"
)

// Layer is a communicator with the further methods that packages on top of it need.
type Layer interface {
	// App is the node.
	App() cluster.App
	// ID is the communicator's ID.
	ID() int
	// NodeIDs are the node ids of the ranks, ascending. They must not be changed.
	NodeIDs() []int
	// Name names a rank and its node, for errors.
	Name(rank int) string
	// Limit is how long a wait with ctx may take, 0 for no limit.
	Limit(ctx context.Context) time.Duration
	// Limited is a context that lasts for the communicator's limit.
	Limited() (context.Context, context.CancelFunc)
	// Fail makes the communicator fail on all ranks.
	Fail(err error)
	// Enter makes a Child of a communicator that has not failed. changed is called with rank -1 when the communicator fails or
	// is closed, and with the rank that has closed its end. Any goroutine may call it, and it must not block.
	Enter(op string, changed func(rank int, err error)) (*Child, error)
}

// Child is an object that lasts as long as its communicator does not fail.
type Child struct {
	// Epoch and Number name the child. They are the same on all ranks if these call Enter in the same order.
	Epoch  uint64
	Number uint32
	// Leave ends the child: changed is not called any more, but for calls that are under way.
	Leave func()
}

// Of returns the layer of a *collective.Comm. Package collective sets it.
var Of func(comm any) Layer

// The application ids of communicators' data begin at AppBase.
const (
	AppBase = 0x5AF000
	MaxID   = 0xFFF
)

// AppOf is the application id of the data of the communicator with that ID.
func AppOf(id int) (app int, err error) {
	if id < 0 || id > MaxID {
		return 0, fmt.Errorf("%w: communicator %d, want 0 to %d", env.ErrInvalid, id, MaxID)
	}
	return AppBase + id, nil
}

// IDOf is the ID of the communicator whose data has that application id. ok is false for other applications.
func IDOf(app int) (id int, ok bool) {
	return app - AppBase, app >= AppBase && app <= AppBase+MaxID
}
