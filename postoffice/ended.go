package postoffice

// What a node tells its scheduler if it ends before it has registered, so that those who wait for it
// learn why.

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/stepaf/stepaf-go/internal/random"
	"github.com/stepaf/stepaf-go/postoffice/membership"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/stack"
)

// endedTime is how long a node that ends waits until its scheduler has been told.
const endedTime = time.Second

// sayEnded tells the scheduler why the node that o describes ends, if the node has what a connection over ZMQ takes.
func sayEnded(ctx context.Context, o Options, why error) {
	if o.Config == nil || o.Van != nil || o.Config.VanType != "zmq" || o.Config.Role != "worker" && o.Config.Role != "server" {
		return
	}
	c := *o.Config
	c.Port, c.BindCPUCore, c.ZMQMaxSockets = 0, false, max(o.Config.ZMQMaxSockets, 4)
	scheduler, err := schedulerRecord(ctx, &c)
	if err != nil {
		return
	}
	v, err := stack.New(stack.Options{Role: van.Scheduler, OnFail: func(int, *van.Meta, error) {}, // the role of one without data
		Options: van.Options{Config: &c, Log: slog.New(slog.DiscardHandler), Backend: backend.NewCPU(), Incarnation: max(uint32(random.Uint64()), 1)}})
	if err != nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, endedTime)
	defer cancel()
	defer func() { _ = v.Close(ctx) }() // which waits until the message has left
	if err := v.Connect(ctx, van.SchedulerID, scheduler); err != nil {
		return
	}
	host, err := os.Hostname()
	if err != nil {
		host = "a host without a name"
	}
	m := &van.Message{}
	m.Reset()
	m.Sender, m.Receiver = van.Empty, van.SchedulerID
	m.Timestamp, m.Control.Cmd = 0, van.Heartbeat
	m.Body = membership.Ended(fmt.Sprintf("%s of rank %d on %s: %s", c.Role, c.Rank(), host, why))
	_ = v.Send(m) // the scheduler says then only that the node is missing
}
