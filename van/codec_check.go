package van

// The validation of a Meta, before it is sent and after it was received.

import (
	"fmt"
	"math"
	"strings"
)

// Validate checks that m can be encoded without loss and that a peer will accept it.
// The error wraps ErrInvalid and names the field. Validate does not check the
// fields against each other. Control fields that do not belong to the command
// are not sent.
func (m *Meta) Validate() error {
	if err := m.check(); err != nil {
		return &Error{Op: "encode message", Detail: fmt.Sprintf("%s = %v, want %s", err.Field, err.Value, err.Want), Err: ErrInvalid}
	}
	return nil
}

// check checks the values of a meta to send or of a received one.
func (m *Meta) check() *FieldError {
	switch {
	case len(m.Body) > math.MaxInt32:
		return &FieldError{"body_size", len(m.Body), "less than 2 GiB"}
	case len(m.DataTypes) > MaxDataTypes:
		return &FieldError{"data_type_size", len(m.DataTypes), fmt.Sprintf("0 to %d", MaxDataTypes)}
	case m.DataSize < 0:
		return &FieldError{"data_size", m.DataSize, "0 or more"}
	case m.ValLen < 0:
		return &FieldError{"val_len", m.ValLen, "0 or more"}
	case m.Dim < 0 || m.Dim > MaxDims:
		return &FieldError{"dim", m.Dim, fmt.Sprintf("0 to %d", MaxDims)}
	case m.SlaveQPNum < 0 || int(m.SlaveQPNum) >= len(m.SlaveQPCounter):
		// Peers read the counters from 1 to this number.
		return &FieldError{"slave_qp_num", m.SlaveQPNum, fmt.Sprintf("0 to %d", len(m.SlaveQPCounter)-1)}
	}
	for i, d := range m.Shape[:m.Dim] {
		if d < 0 {
			return &FieldError{fmt.Sprintf("shape[%d]", i), d, "0 or more"}
		}
	}
	return m.Control.check()
}

// checkHead checks the command of a message with this number of nodes.
func (c *Control) checkHead(nodes int) *FieldError {
	switch {
	case !c.Cmd.Valid():
		return &FieldError{"control.cmd", int32(c.Cmd), fmt.Sprintf("0 to %d", len(commandNames)-1)}
	case c.Cmd == EmptyCmd && nodes > 0:
		return &FieldError{"control.node_size", nodes, "0 in a data message"}
	}
	return nil
}

func (c *Control) check() *FieldError {
	if err := c.checkHead(len(c.Nodes)); err != nil {
		return err
	}
	if (c.Cmd == Barrier || c.Cmd == InstanceBarrier) && (c.BarrierGroup < 0 || c.BarrierGroup > math.MaxInt32) {
		return &FieldError{"control.barrier_group", c.BarrierGroup, "a group or node id"}
	}
	for i := range c.Nodes {
		if err := c.Nodes[i].check(); err != nil {
			err.Field = nodeField(i, err.Field)
			return err
		}
	}
	return nil
}

func (n *Node) check() *FieldError {
	switch {
	case n.Role != Server && n.Role != Worker && n.Role != Scheduler:
		return &FieldError{"role", int32(n.Role), "0 (server), 1 (worker) or 2 (scheduler)"}
	case len(n.Hostname) > MaxHostnameLen || strings.IndexByte(n.Hostname, 0) >= 0:
		return &FieldError{"hostname", fmt.Sprintf("%q", n.Hostname), fmt.Sprintf("at most %d bytes, none zero", MaxHostnameLen)}
	case len(n.Ports) > MaxPorts:
		return &FieldError{"num_ports", len(n.Ports), fmt.Sprintf("0 to %d", MaxPorts)}
	case n.Port < 0 || n.Port > math.MaxUint16:
		return &FieldError{"port", n.Port, "0 to 65535"}
	case len(n.DevTypes) > len(n.Ports):
		return &FieldError{"dev_types", len(n.DevTypes), fmt.Sprintf("no more than the %d ports", len(n.Ports))}
	case len(n.DevIDs) > len(n.Ports):
		return &FieldError{"dev_ids", len(n.DevIDs), fmt.Sprintf("no more than the %d ports", len(n.Ports))}
	case len(n.Endpoint) > MaxEndpointName:
		return &FieldError{"endpoint_name_len", len(n.Endpoint), fmt.Sprintf("0 to %d", MaxEndpointName)}
	}
	for _, f := range [...]struct {
		name  string
		value int
	}{{"id", n.ID}, {"customer_id", n.CustomerID}, {"aux_id", n.AuxID}} {
		if int64(f.value) != int64(int32(f.value)) {
			return &FieldError{f.name, f.value, "a 32-bit number"}
		}
	}
	return nil
}

func nodeField(i int, field string) string { return fmt.Sprintf("control.node[%d].%s", i, field) }
