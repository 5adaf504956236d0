package cluster

// The notice of a node that ends before it has registered. The node sends it to its scheduler, so that
// the nodes that wait for this one report the cause.

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/stepaf/stepaf-go/internal/limits"
	"github.com/stepaf/stepaf-go/internal/random"
	"github.com/stepaf/stepaf-go/postoffice/membership"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/stack"
)

// endedTimeout limits the time in which an ending node sends the notice.
const endedTimeout = time.Second

// sendEnded sends the scheduler the reason why the node that o describes ends. It does nothing if o does not allow a
// connection over ZMQ, or if the process cannot start libzmq's threads.
func sendEnded(ctx context.Context, o Options, why error) {
	if o.Config == nil || o.Van != nil || o.Config.VanType != "zmq" || o.Config.Role != "worker" && o.Config.Role != "server" {
		return
	}
	c := *o.Config
	c.Port, c.BindCPUCore, c.ZMQMaxSockets, c.ZMQIOThreads = 0, false, max(o.Config.ZMQMaxSockets, 4), 1
	if !limits.OS().CanNotify() {
		return // libzmq would abort the process, and the reason would be lost
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), endedTimeout) // the end of ctx may be why the node ends
	defer cancel()
	scheduler, err := schedulerRecord(ctx, &c)
	if err != nil {
		return
	}
	v, err := stack.New(stack.Options{Role: van.Scheduler, OnFail: func(int, *van.Meta, error) {}, // the role of a process without data
		Options: van.Options{Config: &c, Log: slog.New(slog.DiscardHandler), Backend: backend.NewCPU(), Incarnation: max(uint32(random.Uint64()), 1)}})
	if err != nil {
		return
	}
	defer func() { _ = v.Close(ctx) }() // Close waits until the message was sent
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
	_ = v.Send(m) // without the message the scheduler reports only that the node is missing
}
