package postoffice

import "github.com/stepaf/stepaf-go/van"

// Van is the transport as it is wrapped.
func (n *Node) Van() van.Van { return n.van }

// SetNext makes ts the next timestamp of c.
func (c *Customer) SetNext(ts int32) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.next = ts
}

// Places is the size of c's table of requests in flight.
func (c *Customer) Places() int { return len(*c.table.Load()) }
