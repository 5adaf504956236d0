package van_test

import (
	"errors"
	"testing"
	"time"

	"github.com/stepaf/stepaf-go/van"
)

// TestErrorText: the text of an Error has all its fields, once and in this order, and nothing
// for empty fields.
func TestErrorText(t *testing.T) {
	cause := errors.New("cause")
	for _, c := range []struct {
		e    van.Error
		want string
	}{
		{van.Error{Op: "send"}, "send"},
		{van.Error{Op: "send", Node: "worker 0 (id 9)"}, "worker 0 (id 9): send"},
		{van.Error{Op: "send", Peer: "server 0 (id 8)"}, "send with server 0 (id 8)"},
		{van.Error{Op: "send", Detail: "detail"}, "send: detail"},
		{van.Error{Op: "send", Err: cause}, "send: cause"},
		{van.Error{Op: "send", Elapsed: 1500*time.Millisecond + 400*time.Microsecond}, "send after 1.5s"},
		{van.Error{Op: "send", Limit: time.Second}, "send (limit 1s)"},
		{van.Error{Op: "send", Hint: "hint"}, "send; hint"},
		{van.Error{Op: "send", Node: "n", Peer: "p", Detail: "detail", Err: cause, Elapsed: time.Minute, Limit: time.Second, Hint: "hint"},
			"n: send with p: detail: cause after 1m0s (limit 1s); hint"},
	} {
		if got := c.e.Error(); got != c.want {
			t.Errorf("%q, want %q", got, c.want)
		}
		if errors.Is(&c.e, cause) != (c.e.Err != nil) {
			t.Errorf("%q: wraps its cause: %t", c.want, c.e.Err == nil)
		}
	}
}

// TestRequestsHas: Requests has Count requests of one customer of one application, from the first
// timestamp on, also for the largest timestamps.
func TestRequestsHas(t *testing.T) {
	has := func(first, count, ts int32, change func(*van.Meta)) bool {
		var m van.Meta
		m.Reset()
		m.Request, m.AppID, m.CustomerID, m.Timestamp = true, 3, 4, ts
		if change != nil {
			change(&m)
		}
		r := van.Requests{App: 3, Customer: 4, First: first, Count: count}
		return r.Has(&m)
	}
	const last = 1<<31 - 1
	for _, c := range []struct {
		first, count, ts int32
		want             bool
	}{
		{5, 2, 4, false}, {5, 2, 5, true}, {5, 2, 6, true}, {5, 2, 7, false}, {5, 0, 5, false}, {0, 1, 0, true}, {0, 1, -1, false},
		{last - 1, 2, last, true}, {last - 1, 2, last - 2, false}, {last, 1, 0, false},
	} {
		if got := has(c.first, c.count, c.ts, nil); got != c.want {
			t.Errorf("%d from %d on have %d: %t", c.count, c.first, c.ts, got)
		}
	}
	for what, change := range map[string]func(*van.Meta){
		"an answer":               func(m *van.Meta) { m.Request = false },
		"another application's":   func(m *van.Meta) { m.AppID = 4 },
		"another customer's":      func(m *van.Meta) { m.CustomerID = 3 },
		"a request for a barrier": func(m *van.Meta) { m.Control.Cmd = van.Barrier },
	} {
		if has(5, 2, 5, change) {
			t.Errorf("%s is one of the requests", what)
		}
	}
}
