package sim

import (
	"fmt"

	"github.com/stepaf/stepaf-go/internal/sim/plan"
	"github.com/stepaf/stepaf-go/van"
)

// fabric is the RDMA network of a cluster.
type fabric struct{ c *cluster }

func newFabric(c *cluster) *fabric { return &fabric{c} }

func (f *fabric) newVan(p *proc, o van.Options) (van.Van, error) {
	return nil, fmt.Errorf("no RDMA")
}
func (f *fabric) link(a, b plan.Node, do plan.Action) {}
func (f *fabric) calm()                               {}
func (f *fabric) close()                              {}
