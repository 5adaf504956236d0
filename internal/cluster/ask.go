package cluster

// Questions about policies to the scheduler, from a process that is not a node.

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/stepaf/stepaf-go/internal/hostaddr"
	"github.com/stepaf/stepaf-go/internal/random"
	"github.com/stepaf/stepaf-go/postoffice/membership"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
	"github.com/stepaf/stepaf-go/van/stack"
)

// askRefusals is the number of handshakes in a row that may fail without a valid proof before the question fails. One
// handshake may also fail because the scheduler ends at that moment.
const askRefusals = 3

// askEvery is the wait for an answer before the question is sent again.
const askEvery = time.Second

// AskScheduler asks the scheduler of a running cluster, which cfg names, and returns its answers. This process is
// not, and does not become, a node of it. question is "list", "set POLICY" in the syntax of membership.ParsePolicy,
// "clear TARGET" or "clear all"; each question may be repeated without harm. log may be nil.
func AskScheduler(ctx context.Context, cfg *Config, log *slog.Logger, question string) ([]string, error) {
	log = cmp.Or(log, slog.New(slog.DiscardHandler))
	c := *cfg
	c.Role, c.Port, c.BindCPUCore = "worker", 0, false
	target, notFound := schedulerRecord(ctx, &c)
	fail := func(err error) error {
		return &van.Error{Op: "ask", Peer: "scheduler at " + target.Addr(), Err: err}
	}
	if notFound != nil { // the cluster runs, so it has a name
		return nil, fail(notFound)
	}
	incarnation, begun := max(uint32(random.Uint64()), 1), time.Now()
	v, err := stack.New(stack.Options{Role: van.Scheduler, OnFail: func(int, *van.Meta, error) {}, // the role of a process without data
		Options: van.Options{Config: &c, Log: log, Backend: backend.NewCPU(), Incarnation: incarnation}})
	if err != nil {
		return nil, fail(err)
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), shortLinger)
		defer cancel()
		_ = v.Close(ctx)
	}()
	host, _, err := advertise(ctx, &c, van.Worker, v.Van, hostaddr.This(), target.Hostname)
	if err != nil {
		return nil, fail(err)
	}
	port, err := v.Bind(ctx, van.Node{Role: van.Worker, ID: van.Empty, Hostname: host, AuxID: -1})
	if err != nil {
		return nil, fail(err)
	}
	handshakes := make(chan error, 16) // nil: a handshake has succeeded
	if w, ok := van.As[van.PeerWatcher](v.Van); ok {
		w.WatchPeers(func(_ int, up bool, cause error) {
			if up || errors.Is(cause, van.ErrUnauthenticated) {
				select {
				case handshakes <- cause:
				default: // there are enough
				}
			}
		})
	}
	type answer struct {
		number int
		text   string
	}
	came := make(chan answer, 1024)
	v.Start(func(m *van.Message) {
		if m.Control.Cmd != van.Heartbeat {
			return
		}
		if i, text, ok := membership.Answer(m.Body); ok {
			select {
			case came <- answer{i, text}:
			default: // the question is repeated
			}
		}
	})
	if err := v.Connect(ctx, van.SchedulerID, target); err != nil {
		return nil, fail(err)
	}
	body := membership.Question(incarnation, net.JoinHostPort(host, strconv.Itoa(port)), question)
	ask := time.NewTicker(askEvery)
	defer ask.Stop()
	var answers []string
	refusals, refusal := 0, error(nil) // since the last successful handshake, and the latest
	for i := int32(0); ; i++ {
		m := &van.Message{}
		m.Reset()
		m.Sender, m.Receiver = van.Empty, van.SchedulerID
		m.Timestamp, m.Control.Cmd, m.Body = i, van.Heartbeat, body
		// After a failed handshake the transport takes no message for a while. handshakes has the cause.
		if err := v.Send(m); err != nil && !errors.Is(err, van.ErrUnauthenticated) && !errors.Is(err, van.ErrQueueFull) {
			return nil, fail(err)
		}
		for again := false; !again; {
			select {
			case a := <-came:
				if a.number == 0 {
					answers = nil
				}
				reason, refused := strings.CutPrefix(a.text, "error ")
				switch {
				case a.number != len(answers):
				case refused:
					return nil, fail(errors.New(reason))
				case a.text == "end":
					return answers, nil
				default:
					answers = append(answers, a.text)
				}
			case refusal = <-handshakes:
				if refusals++; refusal == nil {
					refusals = 0
				} else if refusals == askRefusals {
					return nil, fail(refusal)
				}
			case <-ask.C:
				again = true
			case <-ctx.Done():
				if refusal != nil {
					return nil, fail(refusal)
				}
				return nil, &van.Error{Op: "ask", Peer: "scheduler at " + target.Addr(), Elapsed: time.Since(begun),
					Detail: fmt.Sprintf("no answer: it does not run, cannot reach %s, or is one of C++ StepMesh, which has no policies", host),
					Err:    van.TimedOut(context.Cause(ctx))}
			}
		}
	}
}
